"""The way from the rollouts to the engine: counts who is inside, remembers when anybody was, and can be closed."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from nanorl.engine.protocol import SamplingParams
from nanorl.rollout.single_turn import Sampler
from nanorl.types import Completion

Span = tuple[float, float]
"""Seconds of `time.perf_counter`: from, to."""


class Turnstile:
    """A `Sampler` around another one. Its coroutines belong to the rollouts' event loop; any thread may read."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.inside = 0
        """Requests at the engine now."""
        self._since = 0.0
        self._busy: deque[Span] = deque(maxlen=4096)

    async def generate_batch(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """Passes on to the engine, waiting where the turnstile is closed."""
        await self._is_open.wait()
        if self.inside == 0:
            self._since = time.perf_counter()
            self._is_empty.clear()
        self.inside += 1
        try:
            return await self._sampler.generate_batch(prompt_ids, sampling)
        finally:
            self.inside -= 1
            if self.inside == 0:
                self._busy.append((self._since, time.perf_counter()))
                self._is_empty.set()

    async def drain(self) -> None:
        """Closes, and waits until nobody is inside."""
        self._is_open.clear()
        await self._is_empty.wait()

    async def reopen(self) -> None:
        """Lets requests pass again."""
        self._is_open.set()

    def busy(self, start: float, end: float) -> list[Span]:
        """When at least one request was at the engine, within [start, end]."""
        spans = list(self._busy)
        if self.inside:
            spans.append((self._since, end))
        return [(max(a, start), min(b, end)) for a, b in spans if b > start and a < end]
