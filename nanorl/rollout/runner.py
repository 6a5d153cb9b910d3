"""The event loop that rollouts run in, on its own thread; the trainer's thread hands coroutines over and waits."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from nanorl.errors import EngineError

T = TypeVar("T")

POLL_S = 0.5
"""How often the waiting thread wakes to look after the engine and to let Ctrl-C through."""


class EventLoopThread:
    """A running asyncio loop on a thread of its own; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancels what still runs, then ends the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins `work` and doesn't wait; it deals with its own exceptions."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float, watch: Callable[[], None] = lambda: None) -> T:
        """Runs `work` to its end and returns its result; its exception is raised here.

        `watch` is called while waiting and raises when waiting has lost its point: the engine died, say.

        Raises:
            EngineError: nothing came within `timeout_s`.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        waited = 0.0
        try:
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except concurrent.futures.TimeoutError:
                    if future.done():  # the work itself raised a TimeoutError
                        raise
                    waited += POLL_S
                    watch()
                if waited > timeout_s:
                    raise EngineError(f"Rollouts did not finish within {timeout_s:g} s: is the engine hung or paused?")
        finally:
            future.cancel()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
