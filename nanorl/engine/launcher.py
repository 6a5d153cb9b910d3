"""Starts an engine as a child that is never left behind: Ctrl-C, SIGTERM, an exception, kill -9 of this process.

Generic over the command: nanorl's embedded engine inherits a socket that is already listening, so its port can't be
raced for; SGLang, which opens its own, gets a port number.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from nanorl.engine import guard
from nanorl.engine.client import EngineClient, ModelInfo
from nanorl.engine.ports import HOST, listen_locally
from nanorl.errors import EngineError

_CAUSES: Sequence[tuple[str, str]] = (
    (r"address already in use|Errno 98", "the port is taken"),
    (r"out of memory|OutOfMemory|MemoryError|Cannot allocate memory|not enough memory", "not enough memory"),
    (
        # An exception's own line: SGLang logs in passing what it could not import and does without.
        r"^(ModuleNotFoundError|ImportError)|undefined symbol|minimum required version",
        "a package is missing or of the wrong version",
    ),
    (r"RepositoryNotFound|Repo id must be|couldn't connect to|not appear to have a file", "the model can't be found"),
    (r"Can't load|not a valid model|Unrecognized model|not supported for now", "the model can't be loaded"),
    (r"greater than the derived context_length", "a context that is longer than the model's"),
    (r"unrecognized arguments|invalid choice|expected one argument", "a flag that the engine doesn't know"),
)
"""(what an engine's log says, what that means): SGLang's and the embedded engine's words; the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """What to run. `{port}` and `{fd}` in argv are replaced; a command without `{fd}` opens the port itself."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to this process's environment."""
    port: int = 0
    """0: any free one."""


def embedded_engine(model: str | Path, *arguments: str, port: int = 0) -> EngineCommand:
    """The command of nanorl's own engine; further `arguments` as `python -m nanorl.engine.server --help` lists them."""
    return EngineCommand(
        argv=(sys.executable, "-m", "nanorl.engine.server", "--model", str(model), "--fd", "{fd}", *arguments),
        port=port,
    )


class EngineProcess:
    """A running engine that this process owns; a context manager.

    Args:
        command: what to run.
        log_path: where its output goes; None: a temporary file, removed after a clean stop.
        ready_timeout_s: how long loading the model may take.

    Raises:
        EngineError: the port is taken, the command died (with the tail of its log and the likely cause), or no answer
            in time.
    """

    def __init__(self, command: EngineCommand, *, log_path: Path | None = None, ready_timeout_s: float = 300.0) -> None:
        self._command = command
        self._keeps_log = log_path is not None
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._port = command.port
        self._log_start = 0
        if log_path is None:
            handle, name = tempfile.mkstemp(prefix=f"nanorl-engine-{os.getpid()}-", suffix=".log")
            os.close(handle)
            log_path = Path(name)
        self.log_path = log_path

    @property
    def url(self) -> str:
        """Where the engine listens; known from `start` on, and the same after a restart."""
        return f"http://{HOST}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The guard's process id while it runs."""
        return self._process.pid if self._process else None

    def __enter__(self) -> "EngineProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> ModelInfo:
        """Starts the command and waits until it answers /model_info. Raises: EngineError; nothing is left running."""
        try:
            self._spawn()
            with EngineClient(self.url, timeout_s=5.0) as client:
                return client.wait_ready(self._ready_timeout_s, alive=self.check_alive)
        except EngineError as error:
            message = str(error)
            if self.poll() is None:  # still running, but never answered
                message += f"\n{self._log_tail()}"
            self.stop(keep_log=True)
            raise EngineError(message) from None
        except BaseException:  # Ctrl-C while the model loads
            self.stop()
            raise

    def poll(self) -> int | None:
        """None while the engine runs, else its exit code."""
        return self._process.poll() if self._process else 0

    def wait_for_death(self, timeout_s: float) -> None:
        """Gives an engine that is dying the time to be dead; returns early when it is."""
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)

    def check_alive(self) -> None:
        """Raises: EngineError when the engine has died, with the tail of its log and the likely cause."""
        code = self.poll()
        if code is not None:
            raise EngineError(
                f"The engine {self.url} ended with exit code {code}: {self._cause(code)}.\n{self._log_tail()}"
            )

    def restart(self) -> ModelInfo:
        """Stops what is left and starts again at the same URL, with the model's weights as they are on disk."""
        self.stop(keep_log=True)
        return self.start()

    def stop(self, *, keep_log: bool = False) -> None:
        """Ends the engine and everything below it, within seconds; harmless when it isn't running."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            try:
                process.stdin.close()  # the guard takes it from here, even if this process is killed right now
                process.wait(guard.GRACE_S + 4.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self._keeps_log and not keep_log:
            self.log_path.unlink(missing_ok=True)

    def _spawn(self) -> None:
        with listen_locally(self._port) as listener, self._open_log() as log:
            self._port = listener.getsockname()[1]
            inherits = any("{fd}" in argument for argument in self._command.argv)
            if not inherits:
                listener.close()
            words = {"{port}": str(self._port), "{fd}": str(listener.fileno())}
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    guard.__file__,
                    "--",
                    *(_fill(argument, words) for argument in self._command.argv),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._command.env},
                pass_fds=[listener.fileno()] if inherits else [],
                start_new_session=True,  # Ctrl-C in the terminal is this process's to handle
            )

    def _open_log(self) -> IO[bytes]:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        log = self.log_path.open("ab")
        self._log_start = log.tell()
        return log

    def _log_tail(self, num_lines: int = 20) -> str:
        text = ""
        with contextlib.suppress(OSError):
            written = self.log_path.read_bytes()[self._log_start :]  # not what an earlier start has left
            text = "\n".join(written.decode("utf-8", "replace").splitlines()[-num_lines:])
        return f"The end of its log {self.log_path}:\n{text}" if text else f"Its log {self.log_path} is empty."

    def _cause(self, code: int) -> str:
        tail = self._log_tail(100)
        for pattern, cause in _CAUSES:
            if re.search(pattern, tail, re.IGNORECASE | re.MULTILINE):
                return f"most likely {cause}"
        if code in (-9, 137):
            return "it was killed, most likely for lack of memory"
        return "the cause should stand in its log"


def _fill(argument: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        argument = argument.replace(word, value)
    return argument
