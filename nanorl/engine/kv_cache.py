"""The KV cache: one preallocated block of token positions a layer, cut into rows of equal length.

Letters: B running rows, U prompts of one prefill, N rows they are stored for, T positions, H heads, D head size.
Row r of layer l is `keys[l][r, :length]` with shape [T, H, D]; positions lie before heads, so that one token is one
contiguous write and a row moves as one block. The block is reserved once; pages that no token used stay untouched.
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
        self._key_blocks = [_zeros(max_tokens * s.key_width, dtype, device) for s in shapes]
        self._value_blocks = [_zeros(max_tokens * s.value_width, dtype, device) for s in shapes]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._decodes = False
        self._num_rows = 0
        self._span = 0
        self._slots = self._source = self._target = torch.empty(0, dtype=torch.int64, device=device)

    # Layout

    def rows_of(self, row_length: int) -> int:
        """How many rows of that length fit."""
        return self.max_tokens // row_length

    def set_row_length(self, row_length: int, num_rows: int, used: int) -> None:
        """Cuts the blocks into rows of another length; the first `num_rows` rows keep their first `used` positions."""
        if row_length == self.row_length:
            return
        rows = self.rows_of(row_length)
        kept = [view[:num_rows, :used].clone() for view in (*self._keys, *self._values)] if num_rows else []
        self.row_length = row_length
        self._keys = [
            block[: rows * row_length * s.key_width].view(rows, row_length, s.key_width)
            for s, block in zip(self._shapes, self._key_blocks, strict=True)
        ]
        self._values = [
            block[: rows * row_length * s.value_width].view(rows, row_length, s.value_width)
            for s, block in zip(self._shapes, self._value_blocks, strict=True)
        ]
        for view, copy in zip((*self._keys, *self._values), kept, strict=False):
            view[:num_rows, :used] = copy

    def move_rows(self, source: Tensor, target: Tensor, used: int) -> None:
        """Copies the first `used` positions of rows `source` over those of rows `target`."""
        for view in (*self._keys, *self._values):
            view[target, :used] = view[source, :used]

    def wipe_row(self, row: int) -> None:
        """Zeroes a row that ended with NaN or infinity: its successor would meet them at positions that it masks."""
        for view in (*self._keys, *self._values):
            view[row] = 0

    # Passes

    def begin_prefill(self, source: Tensor, target: Tensor) -> None:
        """The next pass sees whole prompts: prompt source[i] of it is stored in row target[i] (both [N])."""
        self._decodes, self._source, self._target = False, source, target

    def begin_decode(self, lengths: Tensor, span: int) -> None:
        """The next pass adds a token to each of the first B rows, at position lengths[b]; attention sees [0, span)."""
        self._decodes, self._num_rows, self._span = True, len(lengths), span
        self._slots = torch.arange(len(lengths), device=lengths.device) * self.row_length + lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention with [., H, T, D] states; answers the states to attend to."""
        shape = self._shapes[layer_idx]
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if not self._decodes:
            if len(self._target):
                self._store(keys, key_states)
                self._store(values, value_states)
            return key_states, value_states
        keys.view(-1, shape.key_width).index_copy_(
            0, self._slots, key_states.transpose(1, 2).reshape(-1, shape.key_width)
        )
        values.view(-1, shape.value_width).index_copy_(
            0, self._slots, value_states.transpose(1, 2).reshape(-1, shape.value_width)
        )
        return self._read(keys, shape.num_heads), self._read(values, shape.num_heads)

    def _store(self, view: Tensor, states: Tensor) -> None:
        flat = states.transpose(1, 2).flatten(2)
        view[self._target, : flat.shape[1]] = flat[self._source]

    def _read(self, view: Tensor, num_heads: int) -> Tensor:
        return view[: self._num_rows, : self._span].unflatten(-1, (num_heads, -1)).transpose(1, 2)

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
