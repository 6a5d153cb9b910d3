"""`nanorl check-parity`: do trainer and engine give the same tokens the same probability, also after a real sync?"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from nanorl.config import Config, TrackingConfig
from nanorl.engine.client import EngineClient
from nanorl.errors import EngineError, WeightSyncError
from nanorl.loops.build import Run, build
from nanorl.loops.parity_stats import BUCKETS, ROW_TITLES, Deltas, Gate, bf16_gate, fp32_gate
from nanorl.tracking.view import View
from nanorl.train.batch import make_batch
from nanorl.types import Sample

TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
"""What an engine that ignores or doubles the temperature may sample at."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Trainer and engine on the same tokens at one weight version."""

    title: str
    samples: tuple[Sample, ...]
    sampled: Deltas
    """Trainer minus the logprobs that the engine gave while sampling: what training feels."""
    prefill: Deltas
    """Trainer minus the engine's own rescoring of the finished sequences."""
    gate: Gate

    @property
    def holds(self) -> bool:
        """Whether both stay below the gate."""
        return self.gate.holds(self.sampled) and self.gate.holds(self.prefill)


@dataclass(frozen=True, slots=True)
class ParityResult:
    """What the check came to."""

    comparisons: tuple[Comparison, ...]
    suspect: str | None
    """Why it failed, as far as trying tells; None where it holds."""

    @property
    def holds(self) -> bool:
        """Whether every comparison does."""
        return self.suspect is None


def check_parity(config: Config, view: View) -> ParityResult:
    """Samples, rescores, makes one real optimizer step, syncs, and does it again.

    Raises:
        NanoRLError: bad input, or an engine that refuses or dies.
    """
    with tempfile.TemporaryDirectory(prefix="nanorl-parity-") as scratch:
        run_config = msgspec.structs.replace(config.run, dir=str(Path(scratch) / "run"), eval_prompts=0)
        config = msgspec.structs.replace(config, run=run_config, tracking=TrackingConfig(rollouts=False))
        with build(config, view) as run:
            result = inspect(run)
    _show(result, view)
    return result


def inspect(run: Run) -> ParityResult:
    """The check on a run that stands; it ends at the first comparison that fails."""
    before = _compare(run, "as loaded", noise=1)
    if not before.holds:  # the sync below would mend stale weights, and leave nothing to find
        return ParityResult((before,), find_suspect(run, before))
    run.trainer.step(_with_spread(before.samples), lambda done, total: run.view.progress("training", done, total))
    run.sync_weights()
    after = _compare(run, "after a step and a sync", noise=2)
    return ParityResult((before, after), None if after.holds else find_suspect(run, after))


def find_suspect(run: Run, failed: Comparison) -> str:
    """Tries what usually is wrong, the most certain first, and names the first that explains the difference."""
    for look in (_suspect_weights, _suspect_temperature, _suspect_dtype, _suspect_cache):
        found = look(run, failed)
        if found:
            return found
    return (
        "none of weights, temperature, dtype and cache explains it: the engine's model code or kernels differ from the "
        "trainer's"
    )


def trainer_logprobs(run: Run, samples: Sequence[Sample]) -> list[list[float]]:
    """[samples][R] nats, as the next training step would compute them."""
    found: list[list[float]] = []
    for sample in samples:
        batch = make_batch([sample]).to(run.trainer.policy.device)
        with torch.no_grad():
            scores = run.trainer.policy.score(batch).logprobs
        found.append(scores[batch.loss_mask].double().tolist())
    return found


def _compare(run: Run, title: str, noise: int) -> Comparison:
    groups = run.sample(run.prompts.next(run.prompts_per_step), noise)
    samples = tuple(s for group in groups for s in group.samples if s.is_valid and s.num_sampled)
    if not samples:
        raise EngineError("Expected answers to compare, got none: every sample failed or is empty, or none was graded.")
    run.view.progress("rescoring", 0, len(samples))
    ours = trainer_logprobs(run, samples)
    with EngineClient(run.engine.url) as client:
        rescored = client.score(
            [s.token_ids for s in samples], [s.response_start for s in samples], run.config.rollout.temperature
        )
    sampled = Deltas.between(ours, [s.rollout_logprobs[s.response_start :] for s in samples])
    return Comparison(title, samples, sampled, Deltas.between(ours, rescored), _gate(run, samples, ours))


def _gate(run: Run, samples: Sequence[Sample], ours: list[list[float]]) -> Gate:
    if run.config.model.dtype == "float32":
        return fp32_gate(is_embedded=run.engine.is_embedded)
    return bf16_gate(Deltas.between(ours, _logprobs_in(run, samples, None)).mean)


def _logprobs_in(run: Run, samples: Sequence[Sample], autocast: torch.dtype | None) -> list[list[float]]:
    """The trainer's logprobs as if it computed in another dtype."""
    policy = run.trainer.policy
    own, policy.autocast = policy.autocast, autocast
    try:
        return trainer_logprobs(run, samples)
    finally:
        policy.autocast = own


def _engine_logprobs(samples: Sequence[Sample]) -> list[Sequence[float]]:
    return [s.rollout_logprobs[s.response_start :] for s in samples]


def _suspect_weights(run: Run, _: Comparison) -> str | None:
    """Every tensor by checksum: a skipped, swapped or stale one shows by its name."""
    try:
        run.sync.verify(run.trainer.named_tensors())
    except WeightSyncError as error:
        return f"weights: the engine doesn't hold what the trainer sent. {error}"
    except EngineError:
        return None  # an engine without checksums: the other suspects can still be tried
    return None


def _suspect_temperature(run: Run, failed: Comparison) -> str | None:
    """The temperature at which the trainer agrees best with the engine."""
    policy = run.trainer.policy
    own = policy.temperature
    means: dict[float, float] = {}
    try:
        for temperature in sorted({*TEMPERATURES, own, run.config.rollout.temperature}):
            policy.temperature = temperature
            ours = trainer_logprobs(run, failed.samples)
            means[temperature] = Deltas.between(ours, _engine_logprobs(failed.samples)).mean
    finally:
        policy.temperature = own
    best = min(means, key=lambda t: means[t])
    if best != own and means[best] < 0.5 * means[own]:
        fit = f"the engine's logprobs fit {best} (mean {means[best]:.1e} nats)"
        return f"temperature: the trainer computes at {own}, {fit}"
    return None


def _suspect_dtype(run: Run, failed: Comparison) -> str | None:
    """Whether the other dtype fits the engine better than the configured one."""
    names = {"float32": None, "bfloat16": torch.bfloat16}
    means = {
        name: Deltas.between(_logprobs_in(run, failed.samples, dtype), _engine_logprobs(failed.samples)).mean
        for name, dtype in names.items()
    }
    own = str(run.config.model.dtype)
    other = next(name for name in names if name != own)
    if means[other] < 0.5 * means[own] or run.engine.dtype not in (own, None):
        return f"dtype: the trainer computes in {own}, the engine in {run.engine.dtype or other}"
    return None


def _suspect_cache(_: Run, failed: Comparison) -> str | None:
    """Rescoring agrees and sampling doesn't: decoding used other keys and values than these weights make."""
    if failed.gate.holds(failed.prefill) and not failed.gate.holds(failed.sampled):
        return "cache: the engine's rescoring agrees, its sampling doesn't: stale keys and values, or decode kernels"
    return None


def _with_spread(samples: Sequence[Sample]) -> list[Sample]:
    """Samples that move the weights whatever their rewards: theirs where they differ, else alternating signs."""
    if any(sample.advantage for sample in samples):
        return list(samples)
    return [replace(sample, advantage=1.0 if i % 2 else -1.0) for i, sample in enumerate(samples)]


def _show(result: ParityResult, view: View) -> None:
    rows: list[tuple[str, ...]] = []
    for comparison in result.comparisons:
        rows.append(comparison.sampled.row(f"{comparison.title}: sampling"))
        rows.append(comparison.prefill.row(f"{comparison.title}: rescoring"))
    view.table("|trainer - engine| logprobs, nats", ROW_TITLES, rows)
    last = result.comparisons[-1].sampled
    buckets = [(f"response tokens {a}-{min(b, len(last.values)) - 1}", last.within(a, b)) for a, b in BUCKETS]
    view.table(
        f"By position, {result.comparisons[-1].title}",
        ROW_TITLES,
        [deltas.row(title) for title, deltas in buckets if len(deltas.values)],
    )
    for comparison in result.comparisons:
        verdict = "holds" if comparison.holds else "FAILS"
        gate = comparison.gate
        view.note(f"{verdict}: {comparison.title}, {gate.statistic} at most {gate.limit:.1e} ({gate.reason})")
    if result.suspect:
        view.note(f"warning: suspect: {result.suspect}")
