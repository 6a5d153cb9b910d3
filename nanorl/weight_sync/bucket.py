"""A flat bucket: all parameters side by side in one persistent buffer, allocated once, filled by one `_foreach_copy_`.

The order and the views are made once. A limit splits a big model into several layouts, one call each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nanorl.engine.shared_buffer import SharedBuffer
from nanorl.engine.tensor_payload import FlattenedTensorMetadata, serialize_bucket, serialize_for_loader
from nanorl.errors import WeightSyncError

_ALIGNMENT = 256
"""Bytes; every tensor starts at a multiple, so that any dtype can view its place and copies stay vectorised."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of the model that goes over in one call."""

    metadata: tuple[FlattenedTensorMetadata, ...]
    views: tuple[torch.Tensor, ...]
    """Where each tensor lies in the buffer, in its shape and the engine's dtype."""


def drop_aliases(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """{name: tensor} with tied tensors once, under their first name: the engine ties them itself.

    A tied head sent under its own name would be written twice, or untied by an engine that keeps two copies.
    """
    kept: dict[str, torch.Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in named_tensors:
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        kept[name] = tensor.detach()
    return kept


class FlatBucket:
    """One buffer for a fixed set of tensors, kept for the engine's lifetime.

    Args:
        tensors: {name: tensor}, aliases dropped; their shapes and order are fixed from here on.
        dtype: what floating-point tensors are cast to on the way; None keeps each tensor's own.
        device: where the buffer lies: the engine's.
        max_bytes: splits the tensors into several layouts of at most so many bytes (a bigger tensor gets its own).
        for_loader: whether the engine reads it with `nanorl.engine.sglang_loader`.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        max_bytes: int | None = None,
        for_loader: bool = False,
    ) -> None:
        self._serialize = serialize_for_loader if for_loader else serialize_bucket
        # Layouts lie over each other where the engine has copied one when it answers. SGLang's own loader on a GPU only
        # has its copies queued by then, so each layout gets a place of its own.
        is_reused = device.type == "cpu" or for_loader
        placed: list[Sequence[FlattenedTensorMetadata]] = []
        size = 0
        for part in _split(tensors, dtype, max_bytes):
            placed.append(_place(part, dtype, 0 if is_reused else _aligned(size)))
            size = max(size, placed[-1][-1].end_idx)
        if not size:
            raise WeightSyncError("There is no tensor to send: the model's parameters are empty")
        self._shared = SharedBuffer(size) if device.type == "cpu" else None
        self.buffer = self._shared.tensor if self._shared else torch.empty(size, dtype=torch.uint8, device=device)
        self._payloads: dict[int, str] = {}
        self.layouts = tuple(
            Layout(
                tuple(metadata),
                tuple(self.buffer[m.start_idx : m.end_idx].view(m.dtype).view(m.shape) for m in metadata),
            )
            for metadata in placed
        )

    @property
    def num_bytes(self) -> int:
        """Payload bytes of a whole sync, alignment left out."""
        return sum(m.numel for layout in self.layouts for m in layout.metadata)

    @property
    def num_tensors(self) -> int:
        """How many tensors a whole sync carries."""
        return sum(len(layout.views) for layout in self.layouts)

    @property
    def is_reachable(self) -> bool:
        """Whether an engine can still open the buffer: one that died with it open may have taken its name away."""
        return self._shared is None or self._shared.is_linked

    def fill(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies (and casts) a layout's tensors into the buffer, in one fused call.

        Raises:
            WeightSyncError: a tensor is missing or has another shape than when the bucket was made.
        """
        sources = []
        for m in layout.metadata:
            tensor = tensors.get(m.name)
            if tensor is None or tensor.shape != m.shape:
                came = "nothing" if tensor is None else str(list(tensor.shape))
                raise WeightSyncError(f"{m.name}: expected shape {list(m.shape)} as in the first sync, got {came}")
            sources.append(tensor)
        with torch.no_grad():
            torch._foreach_copy_(list(layout.views), sources)  # pyright: ignore[reportPrivateImportUsage]

    def payload(self, index: int) -> str:
        """The serialized handle of layout `index`, made once."""
        if index not in self._payloads:
            name = self._shared.name if self._shared else None
            self._payloads[index] = self._serialize(self.buffer, self.layouts[index].metadata, shared_name=name)
        return self._payloads[index]

    def close(self) -> None:
        """Takes the name of shared memory away; the memory itself goes with the bucket."""
        if self._shared is not None:
            self._shared.close()


def wire_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a tensor travels in: the engine's for floating point, its own otherwise."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _split(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, max_bytes: int | None
) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    used = 0
    for name, tensor in tensors.items():
        size = _aligned(tensor.numel() * wire_dtype(tensor, dtype).itemsize)
        if part and max_bytes is not None and used + size > max_bytes:
            yield part
            part, used = {}, 0
        part[name] = tensor
        used += size
    if part:
        yield part


def _place(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, start: int
) -> Sequence[FlattenedTensorMetadata]:
    placed: list[FlattenedTensorMetadata] = []
    for name, tensor in tensors.items():
        wire = wire_dtype(tensor, dtype)
        size = tensor.numel() * wire.itemsize
        placed.append(FlattenedTensorMetadata(name, tensor.shape, wire, start, start + size, size))
        start = _aligned(start + size)
    return placed


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
