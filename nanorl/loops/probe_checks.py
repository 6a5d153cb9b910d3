"""What `nanorl probe-tito` finds, and the checks on nanorl's own types: samples, and batches as the loss sees them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanorl.tokens.drift import DriftReport
from nanorl.tokens.probe import TemplateReport
from nanorl.tokens.shift import slice_faults
from nanorl.train.batch import make_batch
from nanorl.types import Completion, Sample, VersionSpan

ROWS = 16
"""Sequences in one batch: enough that lengths differ and most rows are padded."""


@dataclass(frozen=True, slots=True)
class Check:
    """One statement, tried on many sequences."""

    statement: str
    """What holds where there are no faults."""
    num_checked: int
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether it was tried at all and held every time."""
        return self.num_checked > 0 and not self.faults


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt as it was sent and what came back."""

    prompt_ids: tuple[int, ...]
    """[P]"""
    completion: Completion
    """[R] ids and logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Everything that was found."""

    drift: tuple[DriftReport, ...]
    """Facts about re-encoding; nanorl never re-encodes, so they decide nothing."""
    checks: tuple[Check, ...]
    template: TemplateReport

    @property
    def single_turn_safe(self) -> bool:
        """Whether prompts can be rendered and every check held."""
        return self.template.single_turn_safe and all(check.passed for check in self.checks)

    @property
    def multi_turn_safe(self) -> bool:
        """Whether, beyond that, the template leaves history alone."""
        return self.single_turn_safe and self.template.multi_turn_safe

    @property
    def exit_code(self) -> int:
        """0: single turns and several turns are safe; 1: one of them is not."""
        return 0 if self.multi_turn_safe else 1


def random_turns(ids: Sequence[int], num_turns: int, seed: int) -> list[Turn]:
    """Ragged turns of any ids, pad and stop ids among them: a mask that looked at ids, not positions, would show."""
    rng = random.Random(seed)
    turns: list[Turn] = []
    for _ in range(num_turns):
        num_prompt, num_sampled = rng.randint(2, 12), rng.randint(0, 12)
        completion = Completion(
            token_ids=tuple(rng.choices(ids, k=num_sampled)),
            logprobs=tuple(-rng.random() - 0.001 for _ in range(num_sampled)),
            weight_versions=(VersionSpan(0, 0, num_sampled),) if num_sampled else (),
            finish_reason="stop",
        )
        turns.append(Turn(tuple(rng.choices(ids, k=num_prompt)), completion))
    return turns


def check_stored(turns: Sequence[Turn]) -> Check:
    """A sample's ids are the prompt as sent, then the ids as returned."""
    faults = [
        f"sequence {i}: the sample holds other ids"
        for i, (turn, sample) in enumerate(zip(turns, _samples(turns), strict=True))
        if sample.token_ids != turn.prompt_ids + turn.completion.token_ids
    ]
    return Check("a sample holds the ids as sent and as returned", len(turns), tuple(faults))


def check_slices(turns: Sequence[Turn]) -> Check:
    """In the batch that the loss sees, each response sits at [P-1 : P+R-1] and nothing else is trained."""
    faults: list[str] = []
    samples = _samples(turns)
    for start in range(0, len(turns), ROWS):
        batch = make_batch(samples[start : start + ROWS])
        for row, turn in enumerate(turns[start : start + ROWS]):
            faults += [
                f"sequence {start + row}: {fault}"
                for fault in slice_faults(
                    turn.prompt_ids,
                    turn.completion.token_ids,
                    torch.tensor(turn.completion.logprobs, dtype=torch.float32).tolist(),
                    target_ids=batch.target_ids[row].tolist(),
                    loss_mask=batch.loss_mask[row].tolist(),
                    rollout_logprobs=batch.rollout_logprobs[row].tolist(),
                )
            ]
    return Check("responses sit at [P-1 : P+R-1] of the batch", len(turns), tuple(faults))


def _samples(turns: Sequence[Turn]) -> list[Sample]:
    return [Sample.from_completion(str(i), 0, turn.prompt_ids, turn.completion) for i, turn in enumerate(turns)]
