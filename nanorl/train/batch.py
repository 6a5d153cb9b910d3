"""From samples to tensors: one optimizer step's samples, cut into micro-batches by token budget.

Letters: B sequences of a micro-batch, L sequence length, T = L - 1 targets (prediction space).

Shift by one: input_ids = tokens[:-1], target_ids = tokens[1:]. A response of R tokens after a prompt of P sits at
[P-1 : P+R-1] of the prediction space, exactly R long:

    tokens        p0 p1 p2 r0 r1        P = 3, R = 2
    input_ids     p0 p1 p2 r0
    target_ids    p1 p2 r0 r1
    loss_mask      .  .  1  1           [2 : 4]
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanorl.errors import BatchError
from nanorl.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch, padded on the right. With causal attention nothing real ever sees the padding."""

    input_ids: Tensor
    """[B, T] int64, 0 where padded."""
    target_ids: Tensor
    """[B, T] int64, 0 where padded."""
    loss_mask: Tensor
    """[B, T] bool, True where the target was sampled by the policy."""
    rollout_logprobs: Tensor
    """[B, T] fp32 nats, the engine's, 0.0 where masked."""
    advantages: Tensor
    """[B, T] fp32, the sample's advantage at every sampled token, 0.0 elsewhere."""
    weight_versions: Tensor
    """[B, T] int64, the weights that sampled the target, 0 where masked or not known."""
    old_logprobs: Tensor | None = None
    """[B, T] nats by the trainer's weights at the beginning of the step, 0.0 where masked; None: not computed."""

    def __post_init__(self) -> None:
        """Raises: BatchError where shapes differ."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors()}
        if len(set(shapes.values())) != 1 or self.input_ids.ndim != 2:
            raise BatchError(f"All tensors of a batch must have one shape [B, T], got {shapes}")

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in self._tensors()})

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, getattr(self, name)) for name in self.__slots__ if getattr(self, name) is not None]

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return int(self.loss_mask.sum())


def make_batch(samples: Sequence[Sample]) -> Batch:
    """Pads samples to the longest and shifts them by one.

    Raises:
        BatchError: there is no sample, or one has fewer than two tokens.
    """
    if not samples or min(len(sample.token_ids) for sample in samples) < 2:
        raise BatchError("A batch needs at least one sample, and each at least two tokens: one to see, one to predict")
    width = max(len(sample.token_ids) for sample in samples) - 1
    return Batch(
        input_ids=_pad([s.token_ids[:-1] for s in samples], width, torch.int64),
        target_ids=_pad([s.token_ids[1:] for s in samples], width, torch.int64),
        loss_mask=_pad([s.loss_mask[1:] for s in samples], width, torch.bool),
        rollout_logprobs=_pad([s.rollout_logprobs[1:] for s in samples], width, torch.float32),
        advantages=_pad([[s.advantage if m else 0.0 for m in s.loss_mask[1:]] for s in samples], width, torch.float32),
        weight_versions=_pad([_versions(s)[1:] for s in samples], width, torch.int64),
    )


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[Batch]:
    """Cuts samples, sorted by length, into batches of at most `max_tokens` padded tokens.

    A single sample longer than that gets a batch of its own. Sorting keeps padding small and, being stable, keeps the
    cut the same from run to run.
    """
    rows: list[Sample] = []
    for sample in sorted(samples, key=lambda s: -len(s.token_ids)):
        # The first of the rows is the longest: it decides how wide all are padded.
        if rows and (len(rows) + 1) * (len(rows[0].token_ids) - 1) > max_tokens:
            yield make_batch(rows)
            rows = []
        rows.append(sample)
    if rows:
        yield make_batch(rows)


def _versions(sample: Sample) -> list[int]:
    """[L] the version of each position."""
    versions = [0] * len(sample.token_ids)
    for version, start, end in sample.weight_versions:
        versions[start:end] = [version] * (end - start)
    return versions


def _pad(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], dtype=dtype)
