"""How far two sets of logprobs of the same tokens lie apart, and how far they may."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorl.algo.losses import kl_k3

LARGE = 0.1
"""Nats above which a single token's difference is counted: its importance weight is off by a tenth."""

FP32_MAX_EMBEDDED = 1e-5
FP32_MAX = 1e-4
BF16_MEAN = 0.03

BUCKETS = ((0, 8), (8, 32), (32, 128), (128, 512), (512, 1 << 30))
"""Response positions [from, to): a cache or position fault grows with the position, a temperature doesn't."""


@dataclass(frozen=True, slots=True)
class Deltas:
    """Differences of one comparison, token by token."""

    values: Tensor
    """[N] float64 nats, trainer minus engine (or first minus second)."""
    positions: Tensor
    """[N] int64, place in the response."""

    @classmethod
    def between(cls, first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> "Deltas":
        """Per response, [R] logprobs each."""
        rows = [
            torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)
            for a, b in zip(first, second, strict=True)
        ]
        return cls(torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows]))

    def within(self, start: int, end: int) -> "Deltas":
        """Only response positions [start, end)."""
        chosen = (self.positions >= start) & (self.positions < end)
        return Deltas(self.values[chosen], self.positions[chosen])

    @property
    def mean(self) -> float:
        """Mean |difference|, nats."""
        return float(self.values.abs().mean()) if len(self.values) else 0.0

    @property
    def max(self) -> float:
        """Largest |difference|, nats."""
        return float(self.values.abs().max()) if len(self.values) else 0.0

    @property
    def p99(self) -> float:
        """99th percentile of |difference|, nats."""
        return float(self.values.abs().quantile(0.99)) if len(self.values) else 0.0

    @property
    def k3(self) -> float:
        """Mean of exp(d) - 1 - d, nats: an estimate of the KL divergence."""
        return float(kl_k3(self.values).mean()) if len(self.values) else 0.0

    @property
    def num_large(self) -> int:
        """Tokens that differ by more than LARGE."""
        return int((self.values.abs() > LARGE).sum())

    @property
    def ess(self) -> float:
        """Effective sample size of the weights exp(d) as a share of N: (sum w)^2 / (N sum w^2)."""
        if not len(self.values):
            return 1.0
        weights = self.values.exp()
        return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))

    def row(self, title: str) -> tuple[str, ...]:
        """One line of the table."""
        numbers = (f"{self.mean:.1e}", f"{self.p99:.1e}", f"{self.max:.1e}", f"{self.k3:.1e}")
        return (title, f"{len(self.values)}", *numbers, f"{self.num_large}", f"{self.ess:.4f}")


ROW_TITLES = ("", "tokens", "mean", "p99", "max", "k3", f">{LARGE}", "ESS")


@dataclass(frozen=True, slots=True)
class Gate:
    """What a comparison must stay below."""

    statistic: str
    """`max` or `mean`."""
    limit: float
    """Nats."""
    reason: str

    def holds(self, deltas: Deltas) -> bool:
        """Whether it does; NaN doesn't."""
        return getattr(deltas, self.statistic) <= self.limit


def fp32_gate(*, is_embedded: bool) -> Gate:
    """In fp32 only rounding may differ: of the same model code (embedded), or of an engine's own kernels."""
    limit = FP32_MAX_EMBEDDED if is_embedded else FP32_MAX
    return Gate("max", limit, "fp32: rounding only")


def bf16_gate(own_noise: float) -> Gate:
    """In bf16 a small model is noisy by itself: twice what the trainer's own bf16 makes of its fp32 is allowed.

    Args:
        own_noise: mean |bf16 - fp32| of the trainer on the same tokens, nats.
    """
    return Gate(
        "mean", max(BF16_MEAN, 2 * own_noise), f"bf16: the trainer's own bf16 differs from fp32 by {own_noise:.1e}"
    )
