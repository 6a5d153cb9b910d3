"""nanorl's embedded engine: a Hugging Face model on its own thread, continuous batching, live weight updates.

Everything that touches the model or the batch runs on the engine's thread, between two forward passes, in order of
arrival: there is nothing to lock.
"""

import queue
import random
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from nanorl.engine.adapter import ModelAdapter
from nanorl.engine.core import EngineCore, EngineLimits
from nanorl.engine.sequence import Request
from nanorl.engine.weights import WeightStore
from nanorl.errors import EngineError

T = TypeVar("T")


class TorchEngine:
    """Owns the thread. `submit` and `run` may be called from any other thread.

    Args:
        adapter: the model.
        tokenizer: decodes what stop strings are compared with.
        limits: what fits.
        seed: of the seeds that requests without one get.
    """

    def __init__(self, adapter: ModelAdapter, tokenizer: Any, limits: EngineLimits, *, seed: int) -> None:
        self.adapter = adapter
        self.limits = limits
        self.core = EngineCore(adapter, tokenizer, limits)
        self.weights = WeightStore(adapter.model)
        self.failure: str | None = None
        """Why the thread died, once it has."""
        self.on_crash: Callable[[], None] = lambda: None
        """Called on the engine's thread when it dies of an exception; to be set before `start`."""
        self._seeds = random.Random(seed)
        self._open: dict[int, Request] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Aborts all requests and ends the thread; returns at once."""
        self._stopping.set()
        self._commands.put(lambda: None)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within the time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def draw_seed(self) -> int:
        """A seed for a request that brings none, from the engine's own seeded generator."""
        return self._seeds.getrandbits(62)

    def submit(self, request: Request) -> None:
        """Queues a request; its callbacks tell how it goes."""

        def enqueue() -> None:
            self._open[id(request)] = request
            self.core.submit(request)

        self._enqueue(enqueue, lambda reason: request.on_done(request, reason))

    def forget(self, request: Request) -> None:
        """Drops a request whose client is gone."""

        def drop() -> None:
            if self._open.pop(id(request), None):
                self.core.abort_request(request)

        self._enqueue(drop, lambda _reason: None)

    def close_request(self, request: Request) -> None:
        """To be called by a request's on_done: it is no longer open."""
        self._open.pop(id(request), None)

    def run(self, command: Callable[[], T]) -> "Future[T]":
        """Runs `command` on the engine's thread between two forward passes; the future raises what it raises."""
        future: Future[T] = Future()

        def execute() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001 the caller's to handle, on the caller's thread
                future.set_exception(error)

        self._enqueue(execute, lambda reason: future.set_exception(EngineError(reason)))
        return future

    def _enqueue(self, command: Callable[[], None], refuse: Callable[[str], None]) -> None:
        def obeyed_or_refused() -> None:
            if self.failure or self._stopping.is_set():
                refuse(self.failure or "The engine is shutting down")
            else:
                command()

        if self._ended.is_set():  # nobody empties the queue any more
            obeyed_or_refused()
        else:
            self._commands.put(obeyed_or_refused)

    # The engine's thread

    def _main(self) -> None:
        try:
            while not self._stopping.is_set():
                self._obey(wait=not self.core.has_work)
                if self.core.has_work:
                    self.core.step()
            self.core.abort(None)
            self._obey(wait=False)
        except BaseException as error:  # noqa: BLE001 the thread's boundary: nobody may wait for a dead engine
            traceback.print_exc()
            self.failure = f"The engine died: {type(error).__name__}: {error}"
            self._fail_all()
            self.on_crash()
            while not self._stopping.is_set():
                self._obey(wait=True)  # the server still answers while it shuts down: everybody gets the reason
        finally:
            self._ended.set()

    def _obey(self, *, wait: bool) -> None:
        """Runs the commands that have come; with `wait`, at least one."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _fail_all(self) -> None:
        """Answers everybody who waits."""
        for request in list(self._open.values()):
            request.on_done(request, self.failure)
        self._open.clear()


def pick_device(name: str) -> torch.device:
    """auto: a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
