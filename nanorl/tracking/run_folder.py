"""The folder of one run: who owns it, what lies in it, and how it is found again."""

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import nanorl
from nanorl.errors import CheckpointError, ConfigError, NanoRLError

RUNS = Path("runs")
"""Where runs go that were given no folder."""

WRITTEN = (
    "config.json",
    "versions.json",
    "metrics.jsonl",
    "run.log",
    "run.lock",
    "engine.log",
    "curves.png",
    "*.run-id",
    "nonfinite-*.jsonl",
    "rollouts/step-*",
)
"""Every file that a run writes."""
TREES = ("checkpoints", "tensorboard", "wandb", "mlruns", "weights")
"""Folders that belong to a run as a whole."""

PACKAGES = ("torch", "transformers", "sglang", "numpy", "msgspec")


class RunFolder:
    """Paths inside a run folder. As a context manager it keeps run.log, and gives the folder free at the end."""

    def __init__(self, path: Path, lock: int | None = None, *, is_new: bool = False) -> None:
        """`lock` is the open lock file of a run that owns the folder; a reader has none. `is_new`: this run made it."""
        self.path = path
        self._lock = lock
        self._is_new = is_new
        self._log: logging.Handler | None = None

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def versions(self) -> Path:
        """Versions of packages, the git revision, where the model lay. Its presence says that a run made the folder."""
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One file a step, see `nanorl.tracking.rollouts`."""
        return self.path / "rollouts"

    @property
    def log(self) -> Path:
        """What the terminal showed, with times, and the traceback of what ended the run."""
        return self.path / "run.log"

    @property
    def engine_log(self) -> Path:
        """What an engine of our own prints."""
        return self.path / "engine.log"

    def __enter__(self) -> Self:
        """Everything logged under `nanorl` goes into run.log from here on."""
        self._log = _QuietFileHandler(self.log, encoding="utf-8")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("nanorl")
        logger.addHandler(self._log)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Notes how the run ended, closes run.log, gives the lock back.

        A start (all before `keep`) that failed with a message or was broken off leaves no folder, unless an engine's
        log is in there.
        """
        logger = logging.getLogger("nanorl")
        if error is not None:
            logger.error("the run ended by %s", type(error).__name__, exc_info=error)
        if self._log:
            logger.removeHandler(self._log)
            with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
                self._log.close()
        is_explained = isinstance(error, (NanoRLError, KeyboardInterrupt, SystemExit))
        if self._is_new and is_explained and not _has(self.engine_log):
            with contextlib.suppress(OSError):
                _clear(self.path)
                (self.path / "run.lock").unlink(missing_ok=True)
                self.path.rmdir()  # fails where somebody else's file is in it
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def keep(self) -> None:
        """Everything has started: the folder stays, however the run ends."""
        self._is_new = False

    def point_latest(self) -> None:
        """Makes runs/latest lead here, if this is in runs/; elsewhere a person chose the place and finds it again."""
        latest = RUNS / "latest"
        if self.path.resolve().parent != RUNS.resolve() or (latest.exists() and not latest.is_symlink()):
            return
        part = RUNS / f".latest-{os.getpid()}"
        with contextlib.suppress(OSError):  # a file system without links
            part.symlink_to(self.path.resolve().name)
            part.replace(latest)


def create_run_folder(
    path: str | None, model_name: str, *, overwrite: bool, model_path: Path | str | None = None
) -> RunFolder:
    """Makes and owns an empty run folder, `runs/<time>-<model>` where no path is given.

    `model_path` is where the model lies on this machine; in a hub's cache that names the revision too. `nanorl show`
    takes the tokenizer from there.

    Raises:
        ConfigError: the folder holds something already and `overwrite` is not set, or a live run owns it.
        CheckpointError: it can't be written to.
    """
    try:
        given = Path(path) if path else _make_unused(RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(model_name).name}")
        if given.exists():
            _check_unused(given, overwrite=overwrite)
        is_new = not (path and given.exists())
        given.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(given, _acquire(given), is_new=is_new)
        _clear(given)
        facts = versions() | ({"model_path": str(Path(model_path).resolve())} if model_path else {})
        write_atomically(folder.versions, json.dumps(facts, indent=2).encode() + b"\n")
    except OSError as error:
        where = path or RUNS
        raise CheckpointError(
            f"Can't write to the run folder {where}: {error.strerror or error}. Choose another --run-dir."
        ) from None
    return folder


def reopen_run_folder(path: Path) -> RunFolder:
    """Owns the folder of an earlier run, to go on with it.

    Raises:
        ConfigError: a live run owns it.
        CheckpointError: no run was ever there, or it can't be written to.
    """
    folder = find_run(str(path))
    try:
        return RunFolder(folder.path, _acquire(folder.path))
    except OSError as error:
        raise CheckpointError(f"Can't write to the run folder {path}: {error.strerror or error}.") from None


def find_run(name: str) -> RunFolder:
    """A run to read: a folder, the name of one in `runs/`, or `latest`.

    Raises:
        CheckpointError: there is none.
    """
    for path in (Path(name), RUNS / name):
        if (path / "versions.json").is_file():
            return RunFolder(path)
    known = sorted(p.parent.name for p in RUNS.glob("*/versions.json") if not p.parent.is_symlink())
    hint = (
        f"Runs in {RUNS}/: {', '.join(known[-5:])}."
        if known
        else f"There is no run in {RUNS}/ yet: `nanorl train` makes one."
    )
    raise CheckpointError(f"Expected the folder of a run or `latest`, got {name!r}, where no run is. {hint}")


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a small file as a whole: a reader or a crash sees the old one or the new one."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that decide numbers, and the git revision of the working folder."""
    found = {"nanorl": nanorl.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no repository: the version says it
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        found["nanorl_git"] = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()
    return found


class _QuietFileHandler(logging.FileHandler):
    """A full disk is reported by the tracker of metrics.jsonl; a traceback for every line of a log helps nobody."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 logging's name
        """Drops the line."""


def _make_unused(path: Path) -> Path:
    """Makes `path`, or the first of path-2, path-3, ... that doesn't exist: two runs may start within a second."""
    candidate, number = path, 1
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            candidate.mkdir()
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        else:
            return candidate


def _check_unused(path: Path, *, overwrite: bool) -> None:
    """Refuses a folder in use, and with `overwrite` one that no run made: a mistyped --run-dir must not cost files."""
    if not path.is_dir():
        raise ConfigError(f"Expected a folder for the run, {path} is a file. Choose another --run-dir.")
    if not any(entry.name != "run.lock" for entry in path.iterdir()):
        return
    if (path / "versions.json").is_file() and not _has(path / "metrics.jsonl"):
        return  # a start that failed: nothing was trained, so there is nothing to lose
    if not overwrite:
        raise ConfigError(
            f"Expected a new or empty run folder, {path} is used already. "
            "Choose another --run-dir, or --overwrite to delete what an earlier run left there."
        )
    if not (path / "versions.json").is_file():
        raise ConfigError(f"{path} holds files, but no run made it (there is no versions.json): it is not overwritten")


def _acquire(path: Path) -> int:
    """Locks run.lock for as long as this process lives and the file stays open; the kernel frees it after any death."""
    lock = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode().strip() or "unknown"
        os.close(lock)
        raise ConfigError(
            f"The run folder {path} belongs to a live run (process {owner}). Choose another --run-dir."
        ) from None
    except OSError:
        pass  # a network file system without locks: go on as if there were no second run
    os.truncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _clear(path: Path) -> None:
    """Removes what an earlier run wrote, and nothing else. The lock is ours by now: its file stays."""
    for pattern in WRITTEN:
        for file in path.glob(pattern):
            if file.name != "run.lock":
                file.unlink()
    for tree in TREES:
        if (path / tree).exists():
            shutil.rmtree(path / tree)
    with contextlib.suppress(OSError):  # none there, or somebody else's file in it
        (path / "rollouts").rmdir()


def _has(file: Path) -> bool:
    """Whether anything was written to it."""
    return file.is_file() and file.stat().st_size > 0
