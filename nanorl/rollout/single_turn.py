"""Single-turn rollout: prompts in, graded groups with advantages out, token in and token out."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Protocol

import msgspec

from nanorl.algo.advantages import group_advantages
from nanorl.config import AlgoConfig, RolloutConfig
from nanorl.engine.protocol import SamplingParams
from nanorl.errors import DataError
from nanorl.rewards.hub import GradeItem, RewardFailure, RewardResult
from nanorl.types import Completion, Group, Message, Prompt, Sample

Progress = Callable[[int, int], None]
"""Called with (done, all) samples."""


class Sampler(Protocol):
    """What the rollout needs of an engine (`nanorl.engine.client.GenerationClient`)."""

    async def generate_batch(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """One request for all prompts; answers the n completions of each, in order."""
        ...


class Renderer(Protocol):
    """What the rollout needs of a chat template (`nanorl.tokens.chat.ChatFormat`)."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn."""
        ...

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's ids up to where the policy goes on."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text for rewards and people."""
        ...


class Grader(Protocol):
    """What the rollout needs of the reward hub (`nanorl.rewards.hub`)."""

    async def grade_all(self, items: Sequence[GradeItem]) -> list[RewardResult | RewardFailure]:
        """One result an item, in order; a failure never stands for a score."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurn:
    """Everything a rollout needs that doesn't change from step to step."""

    sampler: Sampler
    chat: Renderer
    grader: Grader
    rollout: RolloutConfig
    algo: AlgoConfig
    temperature: float
    """The training's; 0 only where nothing is trained."""
    context_length: int
    """Tokens that prompt and response together may have."""

    async def collect(
        self, prompts: Sequence[Prompt], seed: int, group_size: int, on_progress: Progress = lambda done, total: None
    ) -> list[Group]:
        """Samples group_size responses a prompt, grades them, and gives each sample its advantage.

        All first tries go as one request: the engine sees the same batch in every run with the same seed, and so
        answers the same bits. FAILED and ABORTED samples are sampled again, `max_retries` times at most, and masked
        after that.
        A sample that was interrupted goes on from its own tokens, within what is left of its budget.

        Raises:
            DataError: a prompt leaves no room for a response.
            EngineError: the engine can't be reached.
        """
        rng = random.Random(seed)
        prompt_ids = [self.chat.render(prompt.messages) for prompt in prompts]
        sampling = [self._sampling(prompt, ids) for prompt, ids in zip(prompts, prompt_ids, strict=True)]
        wanted = [(row, index) for row in range(len(prompts)) for index in range(group_size)]
        done: dict[tuple[int, int], Sample] = {}
        begun: dict[tuple[int, int], Completion] = {}
        for attempt in range(self.rollout.max_retries + 1):
            size = group_size if attempt == 0 else 1
            rows = [row for row, index in wanted if index % size == 0]
            heads = [begun[key].token_ids if key in begun else () for key in wanted[::size]]
            answers = await self.sampler.generate_batch(
                [[*prompt_ids[row], *head] for row, head in zip(rows, heads, strict=True)],
                [
                    _for_request(sampling[row], size, rng.getrandbits(48), len(head))
                    for row, head in zip(rows, heads, strict=True)
                ],
            )
            completions = dict(zip(wanted, (c for group in answers for c in group), strict=True))
            completions |= {key: begun[key].followed_by(completions[key]) for key in wanted if key in begun}
            begun = {key: whole for key, whole in completions.items() if _can_go_on(whole)}
            samples = [
                Sample.from_completion(prompts[row].id, index, prompt_ids[row], completions[row, index])
                for row, index in wanted
            ]
            done |= dict(zip(wanted, await self._grade([prompts[row] for row, _ in wanted], samples), strict=True))
            wanted = [key for key in wanted if not done[key].is_valid]
            on_progress(len(done) - len(wanted), len(done))
            if not wanted:
                break
        by_row: list[list[Sample]] = [[] for _ in prompts]
        for (row, _), sample in sorted(done.items()):
            by_row[row].append(sample)
        return [
            with_advantages(Group(prompt=p, samples=tuple(s)), self.algo) for p, s in zip(prompts, by_row, strict=True)
        ]

    def _sampling(self, prompt: Prompt, prompt_ids: Sequence[int]) -> SamplingParams:
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise DataError(
                f"Prompt {prompt.id!r} has {len(prompt_ids)} tokens; the context of {self.context_length} leaves no "
                "room for a response. Shorten or drop the prompt, or raise the engine's context length."
            )
        return SamplingParams(
            max_new_tokens=min(self.rollout.max_new_tokens or room, room),
            temperature=self.temperature,
            stop_token_ids=list(self.chat.stop_token_ids),
            skip_special_tokens=False,
            no_stop_trim=True,
        )

    async def _grade(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[Sample]:
        """Rewards for the valid samples; a failed grading makes its sample FAILED."""
        places = [i for i, sample in enumerate(samples) if sample.is_valid]
        items = [self._grade_item(prompts[i], samples[i]) for i in places]
        graded = list(samples)
        for i, result in zip(places, await self.grader.grade_all(items), strict=True):
            if isinstance(result, RewardFailure):
                graded[i] = samples[i].failed(result.cause, result.message)
            else:
                graded[i] = replace(samples[i], reward=result.value, reward_parts=result.parts)
        return graded

    def _grade_item(self, prompt: Prompt, sample: Sample) -> GradeItem:
        text = self.chat.decode(sample.token_ids[sample.response_start :])
        return GradeItem(prompt=prompt, text=text, finish_reason=sample.finish_reason)


def with_advantages(group: Group, algo: AlgoConfig) -> Group:
    """The group with each valid member's advantage set; below two valid members there is nothing to compare: all 0."""
    valid = group.valid
    if len(valid) < 2:
        return group
    values = iter(group_advantages([s.reward for s in valid if s.reward is not None], algo.std, algo.eps))
    samples = tuple(replace(s, advantage=next(values)) if s.is_valid else s for s in group.samples)
    return Group(prompt=group.prompt, samples=samples)


def _for_request(sampling: SamplingParams, n: int, seed: int, num_begun: int) -> SamplingParams:
    """For n samples with their own noise (the engine seeds sample i with seed + i), and the rest of the budget."""
    left = sampling.max_new_tokens - num_begun
    return msgspec.structs.replace(sampling, n=n, sampling_seed=seed, max_new_tokens=left)


def _can_go_on(completion: Completion) -> bool:
    """Whether it was interrupted with sound tokens; an engine that computes nonsense also ends with `abort`."""
    is_cut = completion.finish_reason == "abort" and bool(completion.token_ids)
    return is_cut and all(map(isfinite, completion.logprobs))
