"""Held-out accuracy: problems that neither warm start nor training has seen, answered once each."""

from collections.abc import Mapping
from dataclasses import dataclass

from nanorl.loops.build import Run
from nanorl.rollout.metrics import rollout_metrics

EVAL_SEED_OFFSET = 1_000_003
"""Keeps evaluation's noise apart from every training step's."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Means over the held-out problems."""

    num_prompts: int
    parts: Mapping[str, float]
    """`reward` and each of its parts -> mean."""

    def text(self, part: str) -> str:
        """The part's mean as shown."""
        return f"{self.parts[part]:.3f}" if part in self.parts else "-"


def evaluate(run: Run) -> Accuracy | None:
    """One sample a held-out problem from the engine's current weights; None where none are asked for.

    The same problems and the same noise before and after: what differs is the policy.
    """
    if not run.heldout:
        return None
    metrics = rollout_metrics(run.sample(run.heldout, EVAL_SEED_OFFSET, group_size=1, what="held-out"))
    names = {name.split("/")[1] for name in metrics if name.endswith("/mean")}
    return Accuracy(len(run.heldout), {name: metrics[f"rollout/{name}/mean"] for name in sorted(names)})
