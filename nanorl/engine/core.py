"""The engine without its thread: continuous batching, pausing, aborting. Nothing in here waits or locks.

Letters: U prompts of one prefill, N their rows, T positions, B running rows, V vocabulary.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanorl.engine.adapter import ModelAdapter
from nanorl.engine.batch import RunningBatch
from nanorl.engine.kv_cache import SlotCache
from nanorl.engine.meter import RateMeter
from nanorl.engine.prefill import Prefill
from nanorl.engine.protocol import FinishInfo, PauseMode
from nanorl.engine.sampler import sample
from nanorl.engine.sequence import EngineSequence, Request

ROW_STEP = 16
"""Rows of the cache are multiples of this long, so that similar requests need no new layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine has room for."""

    context_length: int
    """The most tokens of a prompt and its response together."""
    max_total_tokens: int
    """Token positions in the KV cache, all rows together."""
    max_running_requests: int
    """The most rows that decode together."""
    max_prefill_tokens: int = 8192
    """The most padded prompt tokens in one forward pass; a longer prompt goes alone."""


class EngineCore:
    """Sequences wait in order of arrival, run as rows of one batch, and finish.

    Each gets the KV memory for its worst case when it is admitted: no running row is thrown out for lack of memory.
    """

    def __init__(self, adapter: ModelAdapter, tokenizer: Any, limits: EngineLimits) -> None:
        self.adapter = adapter
        self.limits = limits
        self.version = "default"
        self.paused: PauseMode | None = None
        self.meter = RateMeter()
        self.waiting: deque[EngineSequence] = deque()
        self._tokenizer = tokenizer
        self._arrivals = itertools.count()
        self._cache = SlotCache(adapter.layer_shapes, limits.max_total_tokens, adapter.device, adapter.dtype)
        self._cache.set_row_length(ROW_STEP, 0, 0)
        self.batch = RunningBatch(self._cache, limits.max_running_requests, adapter.vocab_size, adapter.device)
        self._prefill = Prefill(adapter, self._cache, limits.max_prefill_tokens)

    # Requests

    def submit(self, request: Request) -> None:
        """Queues all sequences of a request."""
        request.num_open = len(request.sequences)
        for sequence in request.sequences:
            sequence.arrival = next(self._arrivals)
            self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.paused is None and bool(self.waiting or self.batch.sequences)

    def abort(self, rid: str | None) -> None:
        """Ends the sequences whose id starts with `rid` (None: all) with what they have."""

        def is_meant(sequence: EngineSequence) -> bool:
            return rid is None or sequence.rid.startswith(rid)

        running = self._take([row for row, s in enumerate(self.batch.sequences) if is_meant(s)])
        waiting = [s for s in self.waiting if is_meant(s)]
        self.waiting = deque(s for s in self.waiting if not is_meant(s))
        for sequence in running + waiting:
            self._finish(sequence, FinishInfo("abort", message="Aborted"))

    def abort_request(self, request: Request) -> None:
        """Ends all that is left of one request, whose client is gone."""
        rows = [row for row, s in enumerate(self.batch.sequences) if s.request is request]
        self.waiting = deque(s for s in self.waiting if s.request is not request)
        self._take(rows)

    @torch.inference_mode()
    def check_model(self) -> None:
        """Runs the model on one token, without the cache: what /health wants to know."""
        self.adapter.run_alone([0])

    # Pausing

    def pause(self, mode: PauseMode) -> None:
        """Stops stepping: abort ends all requests, retract puts running ones back to the queue, in_place keeps them."""
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self.retract()
        self.paused = mode

    def resume(self) -> None:
        """Steps again."""
        self.paused = None

    def retract(self) -> None:
        """Puts running sequences back to the queue, with their output so far; their KV will be computed again."""
        retracted = self._take(list(range(len(self.batch))))
        for sequence in retracted:
            sequence.num_retractions += 1
        self.waiting = deque(sorted([*retracted, *self.waiting], key=lambda s: s.arrival))

    def can_flush(self) -> bool:
        """Whether no KV is in use, and none will be before generation continues."""
        return not self.batch.sequences and (self.paused is not None or not self.waiting)

    def prepare_weight_change(self) -> None:
        """Before weights change: old KV must not serve new tokens, unless the pause says so (in_place)."""
        if self.paused == "in_place":
            self.batch.collect(list(range(len(self.batch))), self.version)
        else:
            self.retract()

    def set_version(self, version: str) -> None:
        """From now on tokens are sampled by these weights."""
        self.batch.collect(list(range(len(self.batch))), self.version)
        self.version = version

    # Steps

    @torch.inference_mode()
    def step(self) -> None:
        """Prefills who can be admitted, else samples one token for every running row."""
        admitted = self._admit()
        if admitted:
            self._start(admitted)
        elif self.batch.sequences:
            self._decode()

    def _admit(self) -> list[EngineSequence]:
        """Takes sequences from the queue as long as their worst case fits, and lays the cache out for them."""
        if not self.waiting:
            return []
        admitted: list[EngineSequence] = []
        longest = max((s.max_tokens for s in self.batch.sequences), default=0)
        num_rows, num_tokens = len(self.batch), 0
        prompts: set[int] = set()
        while self.waiting and num_tokens < self.limits.max_prefill_tokens:
            sequence = self.waiting[0]
            needs_row = sequence.params.max_new_tokens > 0
            fits = self._cache.rows_of(_row_length(max(longest, sequence.max_tokens))) > num_rows
            if needs_row and (num_rows == self.limits.max_running_requests or not fits):
                break
            if needs_row:
                num_rows += 1
                longest = max(longest, sequence.max_tokens)
            if id(sequence.prompt_ids) not in prompts or sequence.output_ids:
                num_tokens += len(sequence.prefix)
                prompts.add(id(sequence.prompt_ids))
            admitted.append(self.waiting.popleft())
        if longest:
            self._lay_out(_row_length(longest), num_rows)
        return admitted

    def _lay_out(self, row_length: int, num_rows: int) -> None:
        """Longer rows where needed; shorter ones only to make new rows fit, or where nothing must move."""
        fits = self._cache.rows_of(self._cache.row_length) >= num_rows
        if row_length > self._cache.row_length or not fits or not self.batch.sequences:
            used = int(self.batch.lengths[: len(self.batch)].max()) if self.batch.sequences else 0
            self._cache.set_row_length(row_length, len(self.batch), used)

    def _start(self, admitted: list[EngineSequence]) -> None:
        """Prefills, and samples the first token of every new row."""
        rows = [s for s in admitted if s.params.max_new_tokens > 0]
        start = len(self.batch)
        if rows:
            self.batch.add(rows)
        logits = self._prefill.run(rows, start, [s for s in admitted if s.params.max_new_tokens == 0])
        for sequence in admitted:
            if sequence.params.max_new_tokens == 0:
                self._finish(sequence, FinishInfo("length", length=0))
        if rows:
            self._sample(start, logits)

    def _decode(self) -> None:
        """One token for every row."""
        num_rows = len(self.batch)
        lengths = self.batch.lengths[:num_rows]
        span = int(lengths.max()) + 1
        self._cache.begin_decode(lengths, span)
        hidden = self.adapter.hidden(
            self.batch.next_ids[:num_rows, None], lengths[:, None], self._cache, self._decode_mask(lengths, span)
        )
        lengths += 1
        self._sample(0, self.adapter.logits(hidden[:, 0]))

    def _decode_mask(self, lengths: Tensor, span: int) -> Tensor:
        """[B, 1, 1, span] to add to attention scores: each row sees its own positions, the new token included."""
        dtype = self.adapter.dtype
        outside = torch.arange(span, device=lengths.device) > lengths[:, None]
        mask = torch.zeros(outside.shape, dtype=dtype, device=lengths.device).masked_fill_(
            outside, torch.finfo(dtype).min
        )
        return mask[:, None, None]

    def _sample(self, start: int, logits: Tensor) -> None:
        """Draws a token for rows start..B-1 from [B - start, V] logits, and finishes those that are done."""
        tokens, logprobs = sample(logits, self.batch.sampling_rows(start))
        self.meter.add(len(self.batch) - start)
        done = self.batch.record(start, tokens, logprobs)
        self.batch.collect(done, self.version)
        finishes = {row: _finish_of(self.batch.sequences[row]) for row in done}
        for row, finish in finishes.items():
            if finish.type == "abort":
                self._cache.wipe_row(row)
        if self.batch.any_watched:
            finishes |= self._match_stop_strings(start)  # before stop ids, as SGLang
            self._report(start, finishes)
        for sequence, finish in zip(self._take(list(finishes)), finishes.values(), strict=True):
            self._finish(sequence, finish)

    def _match_stop_strings(self, start: int) -> dict[int, FinishInfo]:
        """Rows from `start` on that a stop string ends with this token."""
        rows = [row for row, s in enumerate(self.batch.sequences) if row >= start and s.stop_strings]
        self.batch.collect(rows, self.version)
        matches = {row: self._match_stop_string(self.batch.sequences[row]) for row in rows}
        return {row: FinishInfo("stop", matched=stop) for row, stop in matches.items() if stop is not None}

    def _match_stop_string(self, sequence: EngineSequence) -> str | None:
        """The stop string that the last token completed. A token gives at least one byte, or is a special one."""
        window = max(len(stop.encode()) for stop in sequence.stop_strings) + 4
        tail = self._tokenizer.decode(sequence.output_ids[-window:], skip_special_tokens=False)
        return next((stop for stop in sequence.stop_strings if stop in tail), None)

    def _report(self, start: int, finishes: Mapping[int, FinishInfo]) -> None:
        """Tells streams of their new token; the last one is told with the end."""
        rows = [row for row, s in enumerate(self.batch.sequences) if row >= start and s.request.on_progress]
        self.batch.collect(rows, self.version)
        for row in rows:
            sequence = self.batch.sequences[row]
            if row not in finishes and sequence.request.on_progress:
                sequence.request.on_progress(sequence)

    # Endings

    @torch.inference_mode()  # an abort comes between steps, and moves rows of tensors that a step has made
    def _take(self, rows: list[int]) -> list[EngineSequence]:
        """Removes rows from the batch; their sequences hold all their tokens."""
        if not rows:
            return []
        self.batch.collect(rows, self.version)
        taken = [self.batch.sequences[row] for row in rows]
        self.batch.remove(sorted(rows))
        return taken

    def _finish(self, sequence: EngineSequence, finish: FinishInfo) -> None:
        sequence.finish, sequence.weight_version = finish, self.version
        request = sequence.request
        request.num_open -= 1
        if request.on_progress:
            request.on_progress(sequence)
        if request.num_open == 0:
            request.on_done(request, None)


def _row_length(num_tokens: int) -> int:
    return math.ceil(num_tokens / ROW_STEP) * ROW_STEP


def _finish_of(sequence: EngineSequence) -> FinishInfo:
    """Why a row that is done is done: what cannot be sampled further, then stop ids before the budget, as SGLang."""
    token, logprob = sequence.output_ids[-1], sequence.output_logprobs[-1]
    if not math.isfinite(logprob):
        return FinishInfo("abort", message="The model's logits are not finite: the weights are broken")
    if token in sequence.stop_ids:
        return FinishInfo("stop", matched=token)
    return FinishInfo("length", length=sequence.params.max_new_tokens)
