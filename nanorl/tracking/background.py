"""Work that must never hold up training: a bounded queue, a thread, and failures that are reported once and counted."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

Warn = Callable[[str], None]
"""Shows one line to the person at the terminal; only ever called from the thread that owns the view."""


class Background(Generic[T]):
    """Hands items to `handle` on a thread of its own, in order.

    Neither `put` nor `close` raises for what `handle` does, and both end within a known time. The first failure is
    shown at the next call, the number of all of them at the end.
    """

    def __init__(
        self, name: str, handle: Callable[[T], None], warn: Warn, *, patience_s: float, at_end: Callable[[], None]
    ) -> None:
        """`put` waits `patience_s` for a full queue before it drops the item; `at_end` runs on the thread, too."""
        self.name = name
        self.num_failed = 0
        """Items that were dropped or whose handling raised."""
        self._handle, self._warn, self._at_end = handle, warn, at_end
        self._patience_s = patience_s
        self._queue: queue.Queue[T | None] = queue.Queue(maxsize=16)
        self._count = threading.Lock()
        self._unreported: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"nanorl-{name}", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Queues an item."""
        try:
            self._queue.put(item, timeout=self._patience_s)
        except queue.Full:
            self._fail("it is too slow, and its queue is full")
        self._report()

    def close(self, timeout_s: float = 60.0) -> None:
        """Waits until everything queued is handled, for `timeout_s` at most, and says what was lost."""
        with contextlib.suppress(queue.Full):  # the thread hangs: the join below says so
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {timeout_s:g} s; {self._queue.qsize()} items were given up")
        self._report()
        if self.num_failed > 1:
            self._warn(f"{self.name}: {self.num_failed} items were lost in all")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._guarded(lambda item=item: self._handle(item))
        self._guarded(self._at_end)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 the boundary: whatever a backend or a disk does, training goes on
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        with self._count:
            self.num_failed += 1
            if self.num_failed == 1:
                self._unreported = reason

    def _report(self) -> None:
        with self._count:
            reason, self._unreported = self._unreported, None
        if reason:
            self._warn(f"warning: {self.name} failed, training goes on: {reason}")
