"""Ctrl-C and SIGTERM wait for a seam: what they would cut in two is worth a few seconds."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

PATIENCE_S = 5.0


@contextlib.contextmanager
def deferred(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """A signal within the block takes effect at its end, or after `patience_s`, or with the second one.

    Only the main thread gets signals; elsewhere, and for signals that nobody handles, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Callable[[int, FrameType | None], Any]] = {}
    received: list[int] = []
    timers: list[threading.Timer] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) > 1:
            before[signum](signum, frame)
        # The second signal is ours: a step that takes too long is cut after all.
        timers.append(threading.Timer(patience_s, os.kill, (os.getpid(), signum)))
        timers[-1].daemon = True
        timers[-1].start()

    for signum in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(signum)
        if callable(handler):
            before[signum] = handler
            signal.signal(signum, hold)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if received:
        before[received[0]](received[0], None)
