"""Runs one command and never leaves it behind: `python guard.py -- COMMAND ...`. Standard library only.

The parent holds the other end of stdin. When that closes (the parent stopped, crashed or was killed -9), or on SIGTERM,
SIGINT or SIGHUP, the command's whole process group gets SIGTERM and, after a grace of 5 s, SIGKILL. The exit code is
the command's. Killing the guard itself kills the command (Linux: PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5.0
_PARENT_POLL_S = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_guard() -> None:
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(child: "subprocess.Popen[bytes]", wakeup_fd: int, parent: int) -> None:
    """Returns when the command ended, the parent is gone or a signal asks to stop."""
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: stopping.append(received))
    while child.poll() is None and not stopping:
        readable, _, _ = select.select([0, wakeup_fd], [], [], _PARENT_POLL_S)
        if wakeup_fd in readable:
            os.read(wakeup_fd, 512)
        # A worker that the parent forked may hold the pipe open after the parent's death: ask for the parent itself
        # too.
        if (0 in readable and not os.read(0, 512)) or os.getppid() != parent:
            return


def _children() -> list[int]:
    """Direct children of the guard; as a subreaper it inherits every orphan below it (Linux)."""
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(pid) for pid in children.split()]


def _signal_all(group: int, number: int) -> None:
    """Signals the command's group, and whatever left the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for pid in _children():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) != group:
                os.kill(pid, number)


def _reap() -> None:
    """Collects orphans that ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return not _children()
    except PermissionError:  # macOS, for a group of zombies
        pass
    return False


def _stop(child: "subprocess.Popen[bytes]") -> int:
    """SIGTERM, a grace, SIGKILL, until nothing is left; returns the command's exit code as the shell writes it."""
    ended_alone = child.poll() is not None
    _signal_all(child.pid, signal.SIGTERM)
    # A command that ended by itself has no use for its helpers: they get no grace to speak of.
    end = time.monotonic() + (0.5 if ended_alone else GRACE_S)
    while time.monotonic() < end + 2.0:
        if child.poll() is not None:
            _reap()
            if _is_empty(child.pid):
                break
        if time.monotonic() >= end:
            _signal_all(child.pid, signal.SIGKILL)
        time.sleep(0.02)
    code = child.poll()
    return 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code


def main(argv: list[str]) -> int:
    """Runs `argv` until it ends or must end."""
    parent = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Everything else that is inheritable (a listening socket) is meant for the command; preexec_fn is safe without
    # threads.
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, close_fds=False, preexec_fn=_die_with_guard)  # noqa: PLW1509
    # The guard's own copy of the listening socket would keep the port open after the command died.
    os.closerange(3, min(reader, writer))
    os.closerange(max(reader, writer) + 1, 4096)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _wait(child, reader, parent)
    return _stop(child)


if __name__ == "__main__":
    separator = sys.argv.index("--")
    sys.exit(main(sys.argv[separator + 1 :]))
