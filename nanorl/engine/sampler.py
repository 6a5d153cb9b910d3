"""Sampling, vectorised over the batch's rows. Letters: B rows, V vocabulary, S stop ids.

A row's noise comes from its own seed and the number of the token alone (a counter-based generator): whoever else is in
the batch, and whether the row was interrupted in between, changes a sample only through rounding at a near-tie.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN, _MIX_1, _MIX_2 = _signed(0x9E3779B97F4A7C15), _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def mix64(x: Tensor) -> Tensor:
    """splitmix64's finalizer: a bijection of int64 whose every output bit depends on every input bit.

    Source: https://prng.di.unimi.it/splitmix64.c. `>>` is arithmetic on int64, hence the masks.
    """
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(key: Tensor, counter: Tensor) -> Tensor:
    """[B] float64 in [0, 1): 53 random bits of (key, counter). Keys are mixed seeds: close ones lie far apart."""
    bits = mix64(key + counter * GOLDEN)
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


@dataclass(slots=True)
class SamplingRows:
    """How each row samples; the flags tell whether any row asks for a step that can otherwise be skipped."""

    key: Tensor
    """[B] int64, mix64(seed)."""
    counter: Tensor
    """[B] int64, tokens sampled so far."""
    temperature: Tensor
    """[B] float32; 1 for greedy rows, whose logprobs are those of the plain logits (as SGLang's)."""
    greedy: Tensor
    """[B] bool."""
    top_p: Tensor
    top_k: Tensor
    """[B] int64; V or more: off."""
    min_p: Tensor
    any_greedy: bool
    any_truncated: bool


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Draws one token a row.

    logprob = log_softmax(logits / temperature) in fp32 over the whole vocabulary, also where top-p, top-k or min-p
    narrow what may be drawn. The draw inverts the cumulative distribution in float64.

    Args:
        logits: [B, V] of any float type.
        rows: settings of the B rows.

    Returns:
        ([B] int64 token ids, [B] float32 logprobs in nats; NaN where the logits were not finite).
    """
    scaled = logits.float() / rows.temperature[:, None]
    # log_softmax spelled out, because the draw needs the exponentials too: one pass over the vocabulary less.
    shifted = scaled - scaled.amax(-1, keepdim=True)
    weights = shifted.exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    log_total = cumulative[:, -1:].log().float()
    if rows.any_truncated:
        cumulative = _truncate(weights, rows).cumsum(-1, dtype=torch.float64)
    tokens = _invert(cumulative, uniform(rows.key, rows.counter))
    if rows.any_greedy:
        tokens = torch.where(rows.greedy, shifted.argmax(-1), tokens)
    return tokens, (shifted.gather(-1, tokens[:, None]) - log_total)[:, 0]


def _invert(cumulative: Tensor, noise: Tensor) -> Tensor:
    """[B, V] float64 running sums of weights >= 0 (of any total), [B] float64 noise -> [B] ids, none of weight 0."""
    total = cumulative[:, -1]
    # Below the total even after rounding, so that the first entry beyond the target exists and has a weight.
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return found.clamp_max_(cumulative.shape[-1] - 1)  # NaN weights find nothing; their NaN logprob ends the row


def _truncate(weights: Tensor, rows: SamplingRows) -> Tensor:
    """Zeroes what top-k, then top-p, then min-p exclude, in the rows that ask for it."""
    vocab_size = weights.shape[-1]
    asks = ((rows.top_k < vocab_size) | (rows.top_p < 1.0) | (rows.min_p > 0.0)).nonzero()[:, 0]
    chosen = weights[asks]
    ranked, order = chosen.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=weights.device)
    keep = rank < rows.top_k[asks, None]
    ranked = torch.where(keep, ranked, 0.0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    # A token stays while the mass before it is below top_p, so that the best one always stays.
    keep &= ranked.cumsum(-1, dtype=torch.float64) - ranked < rows.top_p[asks, None]
    keep &= ranked >= ranked[:, :1] * rows.min_p[asks, None]
    mask = torch.zeros_like(keep).scatter_(-1, order, keep)
    return weights.index_copy(0, asks, torch.where(mask, chosen, 0.0))
