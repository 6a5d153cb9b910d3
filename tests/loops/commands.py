"""Commands as a user gives them: in this process, where torch is loaded already, or as a process that can be killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from nanorl.cli import run_command

ROOT = Path(__file__).parents[2]


def nanorl(*words: str) -> int:
    """`nanorl WORDS` in this process; returns its exit code."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["nanorl", *words])
        try:
            run_command()
        except SystemExit as ending:
            return int(ending.code or 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0


class Command:
    """`nanorl WORDS` as a process of its own, in a session of its own, as a terminal gives it."""

    def __init__(self, log: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from nanorl.cli import main; main()", *words],
                cwd=ROOT,  # tests.loops.rewards is found from here
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, happened: Callable[[], object], what: str, within_s: float = 60.0) -> None:
        end = time.monotonic() + within_s
        while not happened():
            assert self.process.poll() is None, f"ended before {what}: {self.output}"
            assert time.monotonic() < end, f"no {what} within {within_s} s: {self.output}"
            time.sleep(0.02)

    def press_ctrl_c(self) -> None:
        """What a terminal does: the signal goes to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)


@contextlib.contextmanager
def running(log: Path, *words: str, env: Mapping[str, str] | None = None) -> Iterator[Command]:
    """A command that is killed at the end of the block, if it still runs."""
    command = Command(log, *words, env=env)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()


def descendants(pid: int) -> list[int]:
    """Children of any thread of a process, and theirs."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found + [deeper for child in found for deeper in descendants(child)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: list[int], within_s: float = 10.0) -> None:
    """Fails where a process outlives the time."""
    end = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < end, f"still there after {within_s} s: {[_words(pid) for pid in left]}"
        time.sleep(0.05)


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return str(pid)


def own_children() -> set[int]:
    """What this test process has started and not stopped; Python's own keeper of shared memory stays to the end."""
    children = {pid for pid in descendants(os.getpid()) if is_running(pid)}
    return {pid for pid in children if "resource_tracker" not in _words(pid)}
