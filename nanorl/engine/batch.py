"""The running batch: one row a sequence, all about it in preallocated tensors: a step is a few vector operations.

Letters: B running rows, R the most rows, S stop ids, W the longest response. Active rows are always 0..B-1: when one
ends, the last row moves into its place.
"""

import torch
from torch import Tensor

from nanorl.engine.kv_cache import SlotCache
from nanorl.engine.sampler import SamplingRows, mix64
from nanorl.engine.sequence import EngineSequence

_NO_TOKEN = -1


class RunningBatch:
    """Rows that decode together. Collecting moves what was sampled from the tensors into the sequences' own lists."""

    def __init__(self, cache: SlotCache, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.sequences: list[EngineSequence] = []
        """[B] the sequence of each row."""
        self.cache = cache
        self.device = device
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self.lengths = self._column(torch.int64)
        """[R] tokens of the row in the KV cache."""
        self.next_ids = self._column(torch.int64)
        """[R] the last sampled token, which the next step feeds."""
        self._counts = self._column(torch.int64)
        self._limits = self._column(torch.int64)
        self._keys = self._column(torch.int64)
        self._top_k = self._column(torch.int64)
        self._temperature = self._column(torch.float32)
        self._top_p = self._column(torch.float32)
        self._min_p = self._column(torch.float32)
        self._greedy = self._column(torch.bool)
        self._stop_ids = torch.full((max_rows, 1), _NO_TOKEN, device=device)
        self._out_ids = torch.empty((max_rows, 0), dtype=torch.int64, device=device)
        self._out_logprobs = torch.empty((max_rows, 0), dtype=torch.float32, device=device)
        self._any_greedy = self._any_truncated = self.any_watched = False

    def __len__(self) -> int:
        return len(self.sequences)

    def _column(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._max_rows, dtype=dtype, device=self.device)

    @property
    def _columns(self) -> tuple[Tensor, ...]:
        return (
            *(self.lengths, self.next_ids, self._counts, self._limits, self._keys, self._top_k, self._temperature),
            *(self._top_p, self._min_p, self._greedy, self._stop_ids),
        )

    # Rows come and go

    def add(self, sequences: list[EngineSequence]) -> None:
        """Appends rows for sequences whose prefix is (about to be) in the cache."""
        start, end = len(self), len(self) + len(sequences)
        self._widen(sequences)
        params = [sequence.params for sequence in sequences]
        self._fill(self.lengths, start, [len(sequence.prefix) for sequence in sequences])
        self._fill(self._counts, start, [len(sequence.output_ids) for sequence in sequences])
        self._fill(self._limits, start, [p.max_new_tokens for p in params])
        self._fill(self._keys, start, [sequence.seed for sequence in sequences])
        self._keys[start:end] = mix64(self._keys[start:end])
        self._fill(self._top_k, start, [p.top_k if p.top_k > 0 else self._vocab_size for p in params])
        self._fill(self._temperature, start, [p.temperature or 1.0 for p in params])
        self._fill(self._greedy, start, [p.temperature == 0.0 for p in params])
        self._fill(self._top_p, start, [p.top_p for p in params])
        self._fill(self._min_p, start, [p.min_p for p in params])
        width = self._stop_ids.shape[1]
        self._fill(self._stop_ids, start, [[*s.stop_ids, *[_NO_TOKEN] * (width - len(s.stop_ids))] for s in sequences])
        self.sequences += sequences
        self._refresh_flags()

    def _fill(self, column: Tensor, start: int, values: list[int] | list[float] | list[bool] | list[list[int]]) -> None:
        column[start : start + len(values)] = torch.tensor(values, dtype=column.dtype, device=self.device)

    def _widen(self, sequences: list[EngineSequence]) -> None:
        """Makes room for more stop ids a row and longer responses."""
        num_stops = max(len(sequence.stop_ids) for sequence in sequences)
        if num_stops > self._stop_ids.shape[1]:
            padding = num_stops - self._stop_ids.shape[1]
            self._stop_ids = torch.nn.functional.pad(self._stop_ids, (0, padding), value=_NO_TOKEN)
        width = max(sequence.params.max_new_tokens for sequence in sequences)
        if width > self._out_ids.shape[1]:
            padding = width - self._out_ids.shape[1]
            self._out_ids = torch.nn.functional.pad(self._out_ids, (0, padding))
            self._out_logprobs = torch.nn.functional.pad(self._out_logprobs, (0, padding))

    def remove(self, rows: list[int]) -> None:
        """Drops rows (collected before); the last rows move into the holes."""
        gone, num_kept = set(rows), len(self) - len(rows)
        target = [row for row in rows if row < num_kept]
        source = [row for row in range(num_kept, len(self)) if row not in gone]
        if source:
            used = int(self.lengths[: len(self)].max())
            self._move(torch.tensor(source, device=self.device), torch.tensor(target, device=self.device), used)
            for a, b in zip(source, target, strict=True):
                self.sequences[b] = self.sequences[a]
        del self.sequences[num_kept:]
        self._refresh_flags()

    def _move(self, source: Tensor, target: Tensor, used: int) -> None:
        for column in self._columns:
            column[target] = column[source]
        width = int(self._counts[: len(self)].max())
        for block in (self._out_ids, self._out_logprobs):
            block[target, :width] = block[source, :width]
        self.cache.move_rows(source, target, used)

    def _refresh_flags(self) -> None:
        params = [sequence.params for sequence in self.sequences]
        self._any_greedy = any(p.temperature == 0.0 for p in params)
        self._any_truncated = any(p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0 for p in params)
        self.any_watched = any(s.stop_strings or s.request.on_progress for s in self.sequences)

    # Sampling

    def sampling_rows(self, start: int) -> SamplingRows:
        """How rows start..B-1 sample."""
        rows = slice(start, len(self))
        return SamplingRows(
            key=self._keys[rows],
            counter=self._counts[rows],
            temperature=self._temperature[rows],
            greedy=self._greedy[rows],
            top_p=self._top_p[rows],
            top_k=self._top_k[rows],
            min_p=self._min_p[rows],
            any_greedy=self._any_greedy,
            any_truncated=self._any_truncated,
        )

    def record(self, start: int, tokens: Tensor, logprobs: Tensor) -> list[int]:
        """Takes one sampled token for each row from `start` on; returns the rows that a stop id, budget or NaN ends."""
        rows = slice(start, len(self))
        counts = self._counts[rows]
        self._out_ids[rows].scatter_(1, counts[:, None], tokens[:, None])
        self._out_logprobs[rows].scatter_(1, counts[:, None], logprobs[:, None])
        self.next_ids[rows] = tokens
        counts += 1
        stopped = (tokens[:, None] == self._stop_ids[rows]).any(-1)
        done = stopped | (counts >= self._limits[rows]) | ~logprobs.isfinite()
        return [start + row for row in done.nonzero()[:, 0].tolist()]

    def collect(self, rows: list[int], version: str) -> None:
        """Appends what rows have sampled since they were last collected to their sequences; `version` sampled it."""
        if not rows:
            return
        index = torch.tensor(rows, device=self.device)
        counts: list[int] = self._counts[index].tolist()
        width = max(counts)
        ids: list[list[int]] = self._out_ids[index, :width].tolist()
        logprobs: list[list[float]] = self._out_logprobs[index, :width].tolist()
        for row, count, row_ids, row_logprobs in zip(rows, counts, ids, logprobs, strict=True):
            sequence = self.sequences[row]
            new = slice(len(sequence.output_ids), count)
            sequence.append(row_ids[new], row_logprobs[new], version)
