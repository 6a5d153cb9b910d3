"""What a training step shows: sums over tokens while it runs, `train/...` metrics at its end."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanorl.algo.corrections import BehaviourWeights, ess_share
from nanorl.algo.losses import PolicyLoss, kl_k3, masked_log_ratio
from nanorl.train.batch import Batch
from nanorl.train.model import TokenScores


@dataclass(slots=True)
class Sums:
    """Running sums over a minibatch or a step; numbers, not tensors."""

    values: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, **values: Tensor | float) -> None:
        """Adds each under its name."""
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + float(value)

    def peak(self, name: str, value: Tensor | float) -> None:
        """Keeps the highest."""
        self.values[name] = max(self.values.get(name, 0.0), float(value))

    def mean(self, name: str, count: str) -> float:
        """The sum `name` over the sum `count`."""
        return self.values.get(name, 0.0) / max(self.values.get(count, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Loss:
    """One micro-batch, evaluated."""

    scores: TokenScores
    policy: PolicyLoss
    """Its loss is weighted already."""
    behaviour: BehaviourWeights | None
    """Of the decoupled form; None without a correction."""


@torch.no_grad()
def measure(batch: Batch, loss: Loss, version: int | None, sums: Sums) -> None:
    """Adds what one micro-batch shows, each summed over its sampled tokens."""
    delta = masked_log_ratio(loss.scores.logprobs, batch.rollout_logprobs, batch.loss_mask)
    sums.add(
        tokens=batch.num_tokens,
        abs_delta=delta.abs().sum(),
        clipped=loss.policy.is_clipped.sum(),
        entropy=loss.scores.entropy.sum(),
        ratio=(loss.policy.ratio * batch.loss_mask).sum(),
        width=batch.input_ids.numel(),
    )
    is_own = batch.loss_mask if version is None else batch.loss_mask & (batch.weight_versions == version)
    own = torch.where(is_own, delta, 0.0)
    sums.add(own_tokens=is_own.sum(), own_delta=own.abs().sum(), own_kl=kl_k3(own).sum())
    sums.peak("own_max", own.abs().max())
    if loss.behaviour:
        weights = loss.behaviour.weights
        sums.add(
            weight=weights.sum(),
            weight_squared=weights.square().sum(),
            weight_clipped=loss.behaviour.is_clipped.sum(),
        )


def step_metrics(totals: Sums) -> dict[str, float]:
    """`train/...` metrics of a whole step, see docs/metrics.md."""
    return {
        "train/pg_loss": totals.mean("pg_loss", "updates"),
        "train/grad_norm": totals.mean("grad_norm", "updates"),
        "train/clip_fraction": totals.mean("clipped", "tokens"),
        "train/entropy": totals.mean("entropy", "tokens"),
        "train/ratio": totals.mean("ratio", "tokens"),
        "train/drift/mean": totals.mean("drift_abs_delta", "drift_tokens"),
        "train/padding_share": 1.0 - totals.mean("real", "width"),
        "train/num_tokens": totals.values.get("tokens", 0.0),
        "train/updates": totals.values.get("updates", 0.0),
        "train/empty_minibatches": totals.values.get("empty", 0.0),
        "train/nonfinite_minibatches": totals.values.get("nonfinite", 0.0),
        **_mismatch(totals),
        **_correction(totals),
    }


def _mismatch(totals: Sums) -> dict[str, float]:
    """Trainer against engine at one weight version; nothing where every trained token is of older weights."""
    if totals.values.get("updates") and not totals.values.get("mismatch_own_tokens"):
        return {}
    return {
        "train/mismatch/mean": totals.mean("mismatch_own_delta", "mismatch_own_tokens"),
        "train/mismatch/max": totals.values.get("mismatch_own_max", 0.0),
        "train/mismatch_kl": totals.mean("mismatch_own_kl", "mismatch_own_tokens"),
    }


def _correction(totals: Sums) -> dict[str, float]:
    """What the behaviour weights came to; nothing without a correction."""
    if "weight" not in totals.values:
        return {}
    sums = [totals.values[name] for name in ("weight", "weight_squared", "tokens")]
    return {
        "train/ess": ess_share(*sums),
        "train/weight/mean": totals.mean("weight", "tokens"),
        "train/weight/clipped_share": totals.mean("weight_clipped", "tokens"),
    }
