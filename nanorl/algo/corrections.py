"""Corrections for samples that other weights (or other kernels) sampled than those that train: pure tensor functions.

The decoupled form takes two steps from the behaviour policy, which sampled, to the one that trains. The proximal policy
between them is the trainer's own, at the beginning of the step:

    loss = w * max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
    r = pi_train / pi_proximal                clipped as in PPO: how far this step may move
    w = bounded(pi_proximal / pi_behaviour)   no gradient: how much a sample still says of the policy it is to improve

Letters: B sequences, T targets. Source: decoupled PPO (arXiv 2110.00641), as in AReaL (arXiv 2505.24298).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanorl.algo.losses import MAX_LOG_RATIO
from nanorl.errors import BatchError

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourWeights:
    """What each token's loss is multiplied by."""

    weights: Tensor
    """[B, T] w, 0 where masked; no gradient."""
    is_clipped: Tensor
    """[B, T] bool, where the bound changed the ratio: truncated, or set to 0."""


def ratio_of(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """pi_proximal / pi_behaviour of each token, or of its whole sequence.

    `token`: exp(d_t). `sequence`: exp(sum of d over the sequence), exact and of high variance. `geometric`:
    exp(mean of d over the sequence), which does not depend on its length.

    Args:
        log_ratio: [B, T] nats, d, from `masked_log_ratio`.
        mask: [B, T] bool.
        level: over what.

    Returns:
        [B, T], 1 where masked at level `token`.
    """
    if log_ratio.shape != mask.shape:
        raise BatchError(f"log_ratio and mask must have one shape, got {tuple(log_ratio.shape)}, {tuple(mask.shape)}")
    if level == "token":
        return log_ratio.exp()
    total = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(log_ratio)


def truncated(ratio: Tensor, mask: Tensor, cap: float) -> BehaviourWeights:
    """w = min(ratio, cap): TIS at level `token`.

    Source: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (https://fengyao.notion.site/off-policy-rl).
    """
    return BehaviourWeights(
        weights=torch.where(mask, ratio.clamp(max=cap), 0.0).detach(), is_clipped=(ratio > cap) & mask
    )


def masked(ratio: Tensor, mask: Tensor, low: float, cap: float) -> BehaviourWeights:
    """w = ratio where low <= ratio <= cap, else 0: MIS; IcePop at level `token` with a low above 0.

    Source: MIS, When Speed Kills Stability (https://richardli.xyz/rl-collapse); IcePop, Every Step Evolves
    (arXiv 2510.18855).
    """
    is_outside = (ratio < low) | (ratio > cap)
    return BehaviourWeights(weights=torch.where(mask & ~is_outside, ratio, 0.0).detach(), is_clipped=is_outside & mask)


def ess_share(sum_weights: float, sum_squares: float, count: float) -> float:
    """Effective sample size as a share: (sum w)^2 / (n sum w^2); 1 where all weights are equal, 0 where all are 0.

    Source: Kong (1992), A note on importance sampling using standardized weights.
    """
    # The sums are of fp32 weights: equal ones may come out a rounding above 1.
    return min(1.0, sum_weights**2 / (count * sum_squares)) if count and sum_squares else 0.0
