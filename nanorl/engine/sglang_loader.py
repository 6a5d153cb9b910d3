"""Runs inside an SGLang that nanorl launched: a weight update as one fused copy, not as the model's 290 loads.

The first update of a layout goes through the model's own `load_weights`, which knows what is fused (q/k/v, gate/up),
sharded, padded and renamed, while every copy that it makes is recorded. Later ones repeat exactly those copies in one
`_foreach_copy_`. A model that does more than copy (casts, repacks, derives) keeps its own way for good.

Needs torch only. SGLang: `--custom-weight-loader nanorl.engine.sglang_loader.load`, then `load_format` of that name.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copies buckets into the model; finished, on a GPU too, when it returns.

    Args:
        model: SGLang's.
        named_tensors: (layout as JSON: [[name, dtype, shape, first byte, end byte], ...], [bytes] uint8 bucket).
    """
    for layout, flat in named_tensors:
        plan = _plans.get(layout)
        if plan is None or plan.model is not model:
            _plans[layout] = _record(model, flat, _views(layout, flat))
        elif plan.copies is None:
            model.load_weights(_views(layout, flat))
        else:
            plan.repeat(flat)
        if flat.is_cuda:  # the trainer writes the bucket anew as soon as it has the answer
            torch.cuda.current_stream(flat.device).synchronize()


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy out of the bucket, as the model made it."""

    target: Tensor
    """A view of one of the model's parameters."""
    first_byte: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def source(self, flat: Tensor) -> Tensor:
        """The view of a bucket that was copied."""
        typed = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return typed.as_strided(self.size, self.stride, self.first_byte // self.dtype.itemsize)


@dataclass(slots=True)
class _Plan:
    model: Any
    copies: list[_Copy] | None
    """None: the model does more than copy."""
    flat: Tensor
    """The bucket that the sources lie in; a trainer that comes anew brings another one."""
    sources: list[Tensor]

    def repeat(self, flat: Tensor) -> None:
        assert self.copies is not None
        if flat.data_ptr() != self.flat.data_ptr() or not self.sources:
            self.flat, self.sources = flat, [copy.source(flat) for copy in self.copies]
        with torch.no_grad():
            torch._foreach_copy_([copy.target for copy in self.copies], self.sources)  # pyright: ignore[reportPrivateImportUsage]


_plans: dict[str, _Plan] = {}
"""Layout -> how the model takes it."""


def _views(layout: str, flat: Tensor) -> list[tuple[str, Tensor]]:
    return [
        (name, flat[start:end].view(getattr(torch, dtype)).view(shape))
        for name, dtype, shape, start, end in json.loads(layout)
    ]


def _record(model: Any, flat: Tensor, views: list[tuple[str, Tensor]]) -> _Plan:
    """Loads once by the model's own way, and keeps how it did that."""
    with _Recorder(flat) as recorder:
        model.load_weights(views)
    starts = {copy.first_byte for copy in recorder.copies}
    seen = [any(_first_byte(view, flat) <= start < _end_byte(view, flat) for start in starts) for _, view in views]
    # A tensor of which nothing was copied is cast on the way, or ignored: both want the model's own way.
    is_copied = all(seen) and not hasattr(model, "post_load_weights")
    return _Plan(model, recorder.copies if is_copied else None, flat, [])


def _first_byte(view: Tensor, flat: Tensor) -> int:
    return view.data_ptr() - flat.data_ptr()


def _end_byte(view: Tensor, flat: Tensor) -> int:
    return _first_byte(view, flat) + view.numel() * view.itemsize


class _Recorder(TorchDispatchMode):
    """Notes every copy whose source lies in the bucket."""

    def __init__(self, flat: Tensor) -> None:
        super().__init__()
        self.flat = flat
        self.copies: list[_Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Source: torch.utils._python_dispatch.TorchDispatchMode."""
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if source.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr():
                first = _first_byte(source, self.flat)
                self.copies.append(_Copy(target, first, source.dtype, tuple(source.shape), tuple(source.stride())))
        return func(*args, **(kwargs or {}))
