"""The policy as the trainer sees it: a Hugging Face causal language model that answers logprobs of given targets."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanorl.models.load import load_causal_lm
from nanorl.train.batch import Batch


class TokenScores(NamedTuple):
    """What a forward pass says of the targets."""

    logprobs: Tensor
    """[B, T] nats, fp32 or better: log softmax(logits / temperature) of the targets, 0 where masked; with gradient."""
    entropy: Tensor
    """[B, T] nats of the whole distribution, 0 where masked; no gradient."""


class Policy:
    """Wraps the model; never samples, never trains by itself.

    The model stays in eval mode for good: dropout would make two passes over the same tokens disagree, and the ratio of
    the first minibatch would no longer be 1.
    """

    def __init__(self, model: nn.Module, temperature: float, autocast: torch.dtype | None = None) -> None:
        """`temperature` is the rollout's: logprobs are those of logits / temperature, as the engine samples."""
        self.model = model.eval()
        self.temperature = temperature
        self.autocast = autocast
        self.device = next(model.parameters()).device
        self._body, self._head = _split_head(model)

    def score(self, batch: Batch) -> TokenScores:
        """One forward pass over a micro-batch; the head sees only positions whose target was sampled."""
        mask = batch.loss_mask
        with self._autocast():
            logits = self._logits(batch.input_ids, mask)
        precise = torch.promote_types(logits.dtype, torch.float32)
        logprobs, entropy = _select(logits.to(precise) / self.temperature, batch.target_ids[mask])
        zeros = torch.zeros(mask.shape, dtype=precise, device=mask.device)
        return TokenScores(zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropy))

    def _logits(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """[N, V] logits at the N set positions of mask, row by row."""
        if self._body is not None and self._head is not None:
            hidden = self._body(input_ids=input_ids, use_cache=False).last_hidden_state
            return self._head(hidden[mask])
        return self.model(input_ids=input_ids, use_cache=False).logits[mask]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def load_policy(
    path: str | Path, device: torch.device, temperature: float, autocast: torch.dtype | None = None
) -> Policy:
    """Loads a Hugging Face folder in fp32.

    Raises:
        ModelError: the folder doesn't hold all of a causal language model that transformers can load.
    """
    model = load_causal_lm(path, torch.float32)
    return Policy(nn.Module.to(model, device), temperature, autocast)


def _select(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """[N, V] fp32 logits, [N] targets -> ([N] logprobs of the targets, [N] entropies without gradient)."""
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def _split_head(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """(body, head) where head(body(x)) is exactly the model's logits, else (None, None).

    Some models scale or cap logits after the head; trying it on a few tokens is surer than a list of their names.
    """
    body, head = getattr(model, "base_model", None), getattr(model, "get_output_embeddings", lambda: None)()
    if body is None or body is model or head is None:
        return None, None
    probe = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
    with torch.no_grad():
        whole = model(input_ids=probe, use_cache=False).logits
        parts = head(body(input_ids=probe, use_cache=False).last_hidden_state)
    return (body, head) if torch.equal(whole, parts) else (None, None)
