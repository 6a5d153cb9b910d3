"""The KV cache: one preallocated block of memory a layer, cut into rows of equal length.

Letters: B running rows, U prompts of one prefill, N rows they are stored for, T positions, H heads, D head size.
Row r of layer l is `keys[l][r]` with shape [H, row length, D]: attention reads a head's positions one after the other
(half the time of positions before heads, on a CPU). The block is reserved once; pages that nobody used stay untouched.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from nanorl.engine.adapter import LayerShape


class SlotCache(Cache):
    """transformers' cache interface over the rows. A forward pass is announced by `begin_prefill` or `begin_decode`.

    Args:
        shapes: heads and head sizes of every layer.
        max_tokens: positions in all rows together.
    """

    def __init__(self, shapes: list[LayerShape], max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self.max_tokens = max_tokens
        self.row_length = 0
        self._shapes = shapes
        self._blocks = [
            _zeros(max_tokens * width, dtype, device) for s in shapes for width in (s.key_width, s.value_width)
        ]
        self._views: list[Tensor] = []
        """Keys and values of layer 0, of layer 1, ...: [rows, H, row length, D]."""
        self._decodes = False
        self._span = 0
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._source = self._target = self._offsets = self._starts = nothing

    # Layout

    def rows_of(self, row_length: int) -> int:
        """How many rows of that length fit."""
        return self.max_tokens // row_length

    def set_row_length(self, row_length: int, num_rows: int, used: int) -> None:
        """Cuts the blocks into rows of another length; the first `num_rows` rows keep their first `used` positions."""
        if row_length == self.row_length:
            return
        kept = [view[:num_rows, :, :used].clone() for view in self._views] if num_rows else []
        self.row_length, rows = row_length, self.rows_of(row_length)
        widths = [(s.num_heads, width) for s in self._shapes for width in (s.key_width, s.value_width)]
        self._views = [
            block[: rows * row_length * width].view(rows, num_heads, row_length, width // num_heads)
            for block, (num_heads, width) in zip(self._blocks, widths, strict=True)
        ]
        for view, copy in zip(self._views, kept, strict=False):
            view[:num_rows, :, :used] = copy

    def move_rows(self, source: Tensor, target: Tensor, used: int) -> None:
        """Copies the first `used` positions of rows `source` over those of rows `target`."""
        for view in self._views:
            view[target, :, :used] = view[source, :, :used]

    def wipe_row(self, row: int) -> None:
        """Zeroes a row that ended with NaN or infinity: its successor would meet them at positions that it masks."""
        for view in self._views:
            view[row] = 0

    # Passes

    def begin_prefill(self, source: Tensor, target: Tensor) -> None:
        """The next pass sees whole prompts: prompt source[i] of it is stored in row target[i] (both [N])."""
        self._decodes, self._source, self._target = False, source, target

    def begin_decode(self, lengths: Tensor, span: int) -> None:
        """The next pass adds a token to each of the first B rows, at position lengths[b]; attention sees [0, span)."""
        self._decodes, self._span = True, span
        self._offsets = lengths.clone()
        self._starts = torch.arange(len(lengths), device=lengths.device) * self.row_length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention with [., H, T, D] states; answers the states to attend to."""
        states = (key_states, value_states)
        views = self._views[2 * layer_idx : 2 * layer_idx + 2]
        if self._decodes:
            keys, values = (self._append(view, new) for view, new in zip(views, states, strict=True))
            return keys, values
        if len(self._target):
            for view, new in zip(views, states, strict=True):
                view[self._target, :, : new.shape[2]] = new[self._source]
        return states

    def _append(self, view: Tensor, states: Tensor) -> Tensor:
        """Writes one token a row; all that attention may see of the running rows."""
        _, num_heads, _, size = view.shape
        # A row's heads lie row_length apart in the view of single [D] vectors.
        heads = torch.arange(num_heads, device=view.device) * self.row_length
        slots = (self._starts[:, None] * num_heads + heads + self._offsets[:, None]).reshape(-1)
        view.view(-1, size).index_copy_(0, slots, states.reshape(-1, size))
        return view[: len(self._offsets), :, : self._span]

    # What transformers asks a cache when it makes masks and positions; only prefills leave the mask to it.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Prefill starts at position 0; decoding passes its positions and mask explicitly."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See get_seq_length."""
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        """(keys, offset) of a prefill. Older versions pass the positions instead of their number."""
        return (query_length.shape[0] if isinstance(query_length, Tensor) else query_length), 0

    @property
    def is_compileable(self) -> bool:
        """Rows come and go: shapes change from step to step."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """Full attention in every layer (others are refused when the model is loaded)."""
        return [False] * len(self._shapes)

    @property
    def is_initialized(self) -> bool:
        """The memory exists from the start."""
        return True


def _zeros(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since attention multiplies also what it masks out (by 0, which NaN survives).

    On a CPU they are numpy's, which come from calloc: pages that nothing writes to take no memory.
    """
    if device.type != "cpu":
        return torch.zeros(num, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num * dtype.itemsize, dtype=np.uint8)).view(dtype)
