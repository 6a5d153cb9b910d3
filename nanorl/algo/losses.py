"""The policy loss and what is measured beside it, as pure tensor functions.

Letters: B sequences, T targets (prediction space, one less than the sequence). Masks select before anything is
computed, so that NaN or inf at a masked position never reaches a sum or a gradient. Everything is fp32 or better.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nanorl.errors import BatchError

Reduction = Literal["token", "sample", "constant"]

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: far beyond any ratio that clipping lets through, far below overflow in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Per-token results of `policy_loss`; nothing is reduced yet."""

    loss: Tensor
    """[B, T] loss of each sampled token, 0 where masked; carries the gradient."""
    ratio: Tensor
    """[B, T] rho = pi_train / pi_behaviour, 1 where masked; no gradient."""
    is_clipped: Tensor
    """[B, T] bool, where the clipped branch was the larger, so that the token has no gradient."""


def masked_log_ratio(train_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi_train / pi_behaviour) where mask is set, else exactly 0 with zero gradient.

    Both sides are replaced before the subtraction: `where` after it would still send NaN into the gradient.

    Args:
        train_logprobs: [B, T] nats, with gradient.
        behaviour_logprobs: [B, T] nats, of the policy that sampled.
        mask: [B, T] bool.

    Returns:
        [B, T] nats, clamped to +-MAX_LOG_RATIO.

    Raises:
        BatchError: shapes differ.
    """
    if not train_logprobs.shape == behaviour_logprobs.shape == mask.shape:
        shapes = [tuple(t.shape) for t in (train_logprobs, behaviour_logprobs, mask)]
        raise BatchError(f"train_logprobs, behaviour_logprobs and mask must have one shape [B, T], got {shapes}")
    delta = torch.where(mask, train_logprobs, 0.0) - torch.where(mask, behaviour_logprobs, 0.0)
    return delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate: max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A), per token.

    With `dual_clip` c > 1 the loss of a token with A < 0 is at most c |A|: a token that became far more likely although
    it was bad would otherwise pull without bound.

    Args:
        log_ratio: [B, T] nats, from `masked_log_ratio`.
        advantages: [B, T].
        mask: [B, T] bool, True at sampled tokens.
        clip_low: how far rho may fall below 1.
        clip_high: how far rho may rise above 1.
        dual_clip: c, or None.

    Source: PPO (arXiv 1707.06347) eq. 7; dual clip (arXiv 1912.09729) eq. 5; separate bounds DAPO (arXiv 2503.14476).
    """
    if not log_ratio.shape == advantages.shape == mask.shape:
        raise BatchError(
            f"log_ratio, advantages, mask: {tuple(log_ratio.shape)}, {tuple(advantages.shape)}, {tuple(mask.shape)}"
        )
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_dual = (advantages < 0) & (loss > bound)
        loss = torch.where(is_dual, bound, loss)
        is_clipped = is_clipped | is_dual
    return PolicyLoss(loss=torch.where(mask, loss, 0.0), ratio=ratio.detach(), is_clipped=is_clipped & mask)


def token_weights(
    mask: Tensor, reduction: Reduction, num_tokens: int, num_samples: int, constant_length: int
) -> Tensor:
    """What each token's loss is multiplied by, so that summing over all micro-batches and ranks gives the reduction.

    `token`: 1 / num_tokens. `sample`: 1 / (tokens of the sample * num_samples). `constant`: 1 / (constant_length
    * num_samples). The totals are those of the whole optimizer step, never of a micro-batch: that is what makes the
    gradient independent of how the step is split.

    Args:
        mask: [B, T] bool.
        reduction: `token` (DAPO), `sample` (GRPO's text) or `constant` (Dr.GRPO).
        num_tokens: sampled tokens of the whole step.
        num_samples: samples of the whole step.
        constant_length: tokens, for `constant`.

    Returns:
        [B, T] fp32, 0 where masked; all 0 where the step has nothing to train on.
    """
    weights = mask.to(torch.float32)
    if num_tokens == 0 or num_samples == 0:
        return torch.zeros_like(weights)
    if reduction == "token":
        return weights / num_tokens
    if reduction == "sample":
        return weights / (weights.sum(-1, keepdim=True).clamp(min=1.0) * num_samples)
    return weights / (constant_length * num_samples)


def kl_k1(log_ratio: Tensor) -> Tensor:
    """-log_ratio: unbiased for KL(behaviour || train), high variance, may be negative."""
    return -log_ratio


def kl_k2(log_ratio: Tensor) -> Tensor:
    """log_ratio^2 / 2: biased, low variance, its gradient is right for a KL loss."""
    return log_ratio.square() / 2


def kl_k3(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) - 1 - log_ratio: unbiased and never negative, over tokens of the behaviour policy.

    Source: Schulman, Approximating KL divergence (http://joschu.net/blog/kl-approx.html).
    """
    return log_ratio.exp() - 1.0 - log_ratio
