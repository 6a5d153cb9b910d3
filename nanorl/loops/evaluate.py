"""Held-out accuracy: problems that neither warm start nor training has seen, answered by the current weights."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from pathlib import Path
from statistics import fmean

import msgspec

from nanorl.config import Config, TrackingConfig
from nanorl.loops.build import Run, build
from nanorl.rollout.metrics import rollout_metrics
from nanorl.tracking.view import View
from nanorl.types import Group

EVAL_SEED_OFFSET = 1_000_003
"""Keeps evaluation's noise apart from every training step's."""

CORRECT = "correct"
"""The reward part that says right or wrong; a reward without it counts as right above 0."""

Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Means over the held-out problems."""

    num_prompts: int
    parts: Mapping[str, float]
    """`reward` and each of its parts -> mean."""

    def text(self, part: str) -> str:
        """The part's mean as shown."""
        return f"{self.parts[part]:.3f}" if part in self.parts else "-"

    def metrics(self) -> dict[str, float]:
        """As `eval/<part>/mean`."""
        return {f"eval/{name}/mean": value for name, value in self.parts.items()}


@dataclass(frozen=True, slots=True)
class Score:
    """One number of an evaluation, in [0, 1], with its 95 % confidence interval over prompts."""

    name: str
    value: float
    low: float
    high: float
    num_prompts: int


def evaluate(run: Run) -> Accuracy | None:
    """One sample a held-out problem at the training temperature; None where none are asked for.

    The same problems and the same noise each time: what differs is the policy.
    """
    if not run.heldout:
        return None
    metrics = rollout_metrics(run.sample(run.heldout, EVAL_SEED_OFFSET, group_size=1, what="held-out"))
    names = {name.split("/")[1] for name in metrics if name.endswith("/mean")}
    return Accuracy(len(run.heldout), {name: metrics[f"rollout/{name}/mean"] for name in sorted(names)})


def evaluate_model(config: Config, view: View, *, num_samples: int) -> list[Score]:
    """`nanorl eval`: of every held-out prompt the greedy answer, and `num_samples`, 0 or more, at the temperature.

    Raises:
        NanoRLError: bad input, or an engine that refuses or dies.
    """
    with tempfile.TemporaryDirectory(prefix="nanorl-eval-") as scratch:
        scratch_run = msgspec.structs.replace(config.run, dir=str(Path(scratch) / "run"))
        config = msgspec.structs.replace(config, run=scratch_run, tracking=TrackingConfig(rollouts=False))
        with build(config, view) as run:
            greedy = run.sample(run.heldout, EVAL_SEED_OFFSET, group_size=1, temperature=0.0, what="greedy")
            sampled = []
            if num_samples:
                sampled = run.sample(run.heldout, EVAL_SEED_OFFSET, group_size=num_samples, what="sampled")
    scores = [_score("greedy", [_share_right(group) for group in greedy])]
    if num_samples:
        scores.append(_score(f"avg@{num_samples}", [_share_right(group) for group in sampled]))
    return scores + [
        _score(f"pass@{k}", [_pass_at(group, k) for group in sampled]) for k in _powers_of_two(num_samples)
    ]


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Chance that of k samples drawn from n, num_right of them right, at least one is: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), eq. 1.
    """
    return 1.0 - comb(n - num_right, k) / comb(n, k)


def wilson_interval(mean: float, n: int) -> tuple[float, float]:
    """95 % interval of a mean of n values in [0, 1], never empty at 0 or 1; wide enough for values between, too.

    Source: Wilson, Probable inference (JASA 22, 1927).
    """
    center = mean + Z95**2 / (2 * n)
    spread = Z95 * sqrt(max(0.0, mean * (1 - mean) / n) + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def as_json(scores: Sequence[Score]) -> str:
    """The scores for machines."""
    return json.dumps([asdict(score) for score in scores], indent=2)


def show(scores: Sequence[Score], view: View) -> None:
    """The scores as a table."""
    rows = [(s.name, f"{s.value:.3f}", f"{s.low:.3f}", f"{s.high:.3f}", str(s.num_prompts)) for s in scores]
    view.table("Held-out accuracy, 95 % confidence", ("", "accuracy", "from", "to", "prompts"), rows)


def _score(name: str, values: Sequence[float]) -> Score:
    mean = fmean(values) if values else 0.0
    low, high = wilson_interval(mean, len(values)) if values else (0.0, 1.0)
    return Score(name, mean, low, high, len(values))


def _share_right(group: Group) -> float:
    right = _right(group)
    return fmean(right) if right else 0.0


def _pass_at(group: Group, k: int) -> float:
    right = _right(group)
    return pass_at_k(len(right), sum(right), min(k, len(right))) if right else 0.0


def _right(group: Group) -> list[bool]:
    return [sample.reward_parts.get(CORRECT, sample.reward or 0.0) > 0 for sample in group.valid]


def _powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]
