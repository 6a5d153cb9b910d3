"""Who grades: built-in rules by name, run on the spot, or a user's `module:function`, run where it can be killed."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Protocol

from nanorl.config import RewardConfig
from nanorl.errors import RewardError
from nanorl.rewards.checks import GradeItem, RewardFailure, RewardFunction, grade_safely
from nanorl.rewards.rules import RewardResult, grade_arithmetic
from nanorl.rewards.worker import READY

__all__ = ["GradeItem", "Grader", "InProcessGrader", "RewardFailure", "RewardResult", "WorkerGrader", "build_grader"]

BUILT_IN: Mapping[str, RewardFunction] = {"arithmetic": grade_arithmetic}

START_TIMEOUT_S = 120.0
"""A user's module may import something heavy."""


class Grader(Protocol):
    """Grades a batch without blocking the event loop for longer than a few milliseconds."""

    async def grade_all(self, items: Sequence[GradeItem]) -> list[RewardResult | RewardFailure]:
        """One result an item, in order; a failure never stands for a score."""
        ...

    def close(self) -> None:
        """Ends what the grader started."""
        ...


def build_grader(section: RewardConfig) -> Grader:
    """The grader that the config names; a user's function is imported now, so that a mistake shows before training.

    Raises:
        RewardError: a function that can't be imported.
    """
    if section.name in BUILT_IN:
        return InProcessGrader(BUILT_IN[section.name])
    return WorkerGrader(section.name, section.timeout_s, section.num_workers)


class InProcessGrader:
    """Runs a trusted, fast function directly."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    async def grade_all(self, items: Sequence[GradeItem]) -> list[RewardResult | RewardFailure]:
        """One result an item, in order."""
        return [grade_safely(self._function, item) for item in items]

    def close(self) -> None:
        """Nothing was started."""


class WorkerGrader:
    """Runs a user's function in processes of its own, each item under a hard timeout.

    A process that hangs or dies is replaced; its item fails by name and the batch goes on.
    """

    def __init__(self, function_path: str, timeout_s: float, num_workers: int | None = None) -> None:
        """Raises: RewardError where the function can't be imported."""
        count = num_workers or min(4, os.cpu_count() or 1)
        self._timeout_s = timeout_s
        self._workers = [_Worker(function_path)]  # alone first: a mistake is reported once
        self._workers += [_Worker(function_path) for _ in range(count - 1)]
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        # A thread for each worker: whatever runs in the pool finds a free one, however many batches there are.
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="grader")

    async def grade_all(self, items: Sequence[GradeItem]) -> list[RewardResult | RewardFailure]:
        """One result an item, in order. Several batches may be graded at once; they share the workers.

        Raises:
            RewardError: a worker that had to be replaced can't be started again, or the grader was closed meanwhile.
        """
        if self._workers[0].is_closed:
            raise RewardError("The grader was closed")
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(self._pool, self._grade, item) for item in items)))

    def _grade(self, item: GradeItem) -> RewardResult | RewardFailure:
        worker = self._free.get()
        try:
            if worker.is_closed:  # the run ended: this thread must not keep the process alive
                raise RewardError("The grader was closed in the middle of a batch")
            return worker.grade(item, self._timeout_s)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Kills the processes, also in the middle of a batch."""
        for worker in self._workers:
            worker.close()
        self._pool.shutdown(cancel_futures=True)


class _Worker:
    """One process that runs the function, and the pipe to it."""

    def __init__(self, function_path: str) -> None:
        self._function_path = function_path
        self.is_closed = False
        """For good: nothing is started again."""
        self._start()

    def grade(self, item: GradeItem, timeout_s: float) -> RewardResult | RewardFailure:
        """The function's answer, or why there is none after timeout_s at the latest."""
        try:
            self._pipe.send(item)
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
            failure = RewardFailure(
                cause="timeout", message=f"{self._function_path} gave no answer within {timeout_s:g} s"
            )
        except (EOFError, OSError):
            code = self._process.wait()
            failure = RewardFailure(cause="died", message=f"{self._function_path} ended its process with code {code}")
        if not self.is_closed:
            self.stop()
            self._start()
        if self.is_closed:  # meanwhile: what was just started must not stay
            self._process.kill()
        return failure

    def close(self) -> None:
        """Kills the process for good. A thread that grades with it meets the pipe's end: so the pipe stays open."""
        self.is_closed = True
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Kills the process, wherever it is."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-m", "nanorl.rewards.worker", self._function_path, str(theirs.fileno())]
        # The function's prints go to stderr: stdout is the program's own.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            answer = (
                self._pipe.recv() if self._pipe.poll(START_TIMEOUT_S) else f"no answer within {START_TIMEOUT_S:g} s"
            )
        except (EOFError, OSError):
            answer = f"Importing the reward {self._function_path!r} ended the process with code {self._process.wait()}"
        if answer != READY:
            self.stop()
            raise RewardError(f"Can't start the reward {self._function_path!r}: {answer}")
