"""The process in which a user's reward function runs: `python -m nanorl.rewards.worker MODULE:FUNCTION FD`.

It answers GradeItems one by one over the pipe FD, and ends when the other side is gone, even in the middle of a
function that never returns. It can be killed at any time; nothing is lost but the item in hand.
"""

import importlib
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import cast

from nanorl.errors import RewardError
from nanorl.rewards.checks import GradeItem, RewardFunction, grade_safely

READY = "ready"


def import_function(path: str) -> RewardFunction:
    """The function behind `module:function`.

    Raises:
        RewardError: no such module or function, or the module fails on import.
    """
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise RewardError(f"{path!r} can't be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise RewardError(f"Expected a function at {path!r}, got {type(function).__name__}")
    return cast("RewardFunction", function)


def serve(function_path: str, pipe: Connection) -> None:
    """Answers READY or the reason why not, then one result an item."""
    try:
        function = import_function(function_path)
    except RewardError as error:
        pipe.send(str(error))
        return
    pipe.send(READY)
    items: queue.SimpleQueue[GradeItem] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, items), daemon=True).start()
    while True:
        pipe.send(grade_safely(function, items.get()))


def _receive(pipe: Connection, items: "queue.SimpleQueue[GradeItem]") -> None:
    """Reads on a thread of its own, so that the end of the parent is noticed while the function runs."""
    try:
        while True:
            items.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)  # the main thread may never return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it closes the pipe
    serve(sys.argv[1], Connection(int(sys.argv[2])))
