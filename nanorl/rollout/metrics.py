"""What a step's rollouts show, as numbers for the log: means over exactly the samples that train."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from nanorl.rollout.filters import has_spread
from nanorl.types import Group, Sample, Status


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`rollout/...` metrics of the groups of one step; docs/metrics.md has the formulas.

    Reward and its parts are means over valid samples. Failed and aborted samples appear in counts only.
    """
    samples = [sample for group in groups for sample in group.samples]
    valid = [sample for sample in samples if sample.is_valid]
    rewards = [sample.reward for sample in valid if sample.reward is not None]
    metrics = {
        "rollout/reward/mean": _mean(rewards),
        "rollout/reward/std": _mean([(r - _mean(rewards)) ** 2 for r in rewards]) ** 0.5,
        "rollout/response_tokens/mean": _mean([sample.num_sampled for sample in valid]),
        "rollout/truncated_share": _mean([sample.status is Status.TRUNCATED for sample in valid]),
        "rollout/zero_spread_groups": _mean([not has_spread(group) for group in groups]),
        "rollout/num_samples": len(samples),
        "rollout/num_tokens": sum(sample.num_sampled for sample in samples),
        "rollout/num_failed": sum(sample.status is Status.FAILED for sample in samples),
        "rollout/num_aborted": sum(sample.status is Status.ABORTED for sample in samples),
        "rollout/dropped_groups": sum(len(group.valid) < 2 for group in groups),
    }
    for name in sorted({part for sample in valid for part in sample.reward_parts}):
        metrics[f"rollout/{name}/mean"] = _mean([sample.reward_parts.get(name, 0.0) for sample in valid])
    for cause, count in sorted(_causes(samples).items()):
        metrics[f"rollout/failed/{cause}"] = count
    return metrics


def _causes(samples: Sequence[Sample]) -> Counter[str]:
    return Counter(str(s.metadata.get("cause", "engine")) for s in samples if s.status is Status.FAILED)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
