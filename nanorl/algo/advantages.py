"""Advantages as plain floats in float64: rewards of one group in, one number a sample out."""

from collections.abc import Sequence
from math import sqrt
from typing import Literal

from nanorl.errors import ConfigError

Std = Literal["population", "sample", "none"]


def group_advantages(rewards: Sequence[float], std: Std = "population", eps: float = 1e-6) -> list[float]:
    """Group-relative advantages: (R - mean) / (std + eps), within one prompt's own group of G rewards.

    A group whose rewards are all the same (max == min) has nothing to tell: it gets exactly 0.0, whatever rounding
    makes of its standard deviation (six rewards of 0.3 have one of 5e-17 in float64, and eps may be smaller than that).

    Args:
        rewards: [G] rewards of the group's valid members.
        std: `population` divides by sqrt(sum / G) as the first GRPO codes did, `sample` by sqrt(sum / (G - 1)) as the
            DeepSeekMath text and TRL do, `none` only subtracts the mean (Dr.GRPO).
        eps: keeps the division finite.

    Returns:
        [G] advantages.

    Raises:
        ConfigError: fewer than two rewards; a group of one is always its own mean.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1; Dr.GRPO (arXiv 2503.20783).
    """
    if len(rewards) < 2:
        raise ConfigError(f"A group advantage needs at least 2 rewards, got {len(rewards)}: raise group_size")
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centered = [reward - mean for reward in rewards]
    if std == "none":
        return centered
    degrees = len(rewards) if std == "population" else len(rewards) - 1
    scale = sqrt(sum(c * c for c in centered) / degrees) + eps
    return [c / scale for c in centered]
