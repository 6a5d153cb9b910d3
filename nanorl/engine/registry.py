"""Which engines run on this machine, and which run holds which: small JSON files under the user's state folder.

`nanorl serve` leaves a file per server, so that other commands find it; a run that uses a server it doesn't own leases
it, so that two trainers never update one engine by turns. Files of dead processes are removed by whoever reads them.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from nanorl.engine.client import EngineClient
from nanorl.errors import EngineError, NanoRLError


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True):
    """One process for good: ids are reused, ids with their start time are not."""

    pid: int
    start: str

    @classmethod
    def here(cls) -> "ProcessMark":
        """This process."""
        return cls(pid=os.getpid(), start=_start_time(os.getpid()) or "")

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        return _start_time(self.pid) == self.start


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A server that `nanorl serve` runs."""

    url: str
    model: str
    """The folder or hub id that it serves."""
    engine: str
    """torch or sglang."""
    process: ProcessMark
    started_at: float
    """Seconds since the epoch."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who uses a server."""

    url: str
    owner: str
    """The run folder, for people."""
    process: ProcessMark


Record = TypeVar("Record", ServerRecord, Lease)


def state_folder() -> Path:
    """$XDG_STATE_HOME/nanorl, by default ~/.local/state/nanorl."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "nanorl"


@contextlib.contextmanager
def register_server(url: str, model: str, engine: str) -> Iterator[ServerRecord]:
    """Makes a running server findable for as long as the block lasts."""
    record = ServerRecord(
        url=url, model=_canonical(model), engine=engine, process=ProcessMark.here(), started_at=time.time()
    )
    path = state_folder() / "servers" / f"{os.getpid()}.json"
    _write(path, record)
    try:
        yield record
    finally:
        path.unlink(missing_ok=True)


def live_servers() -> list[ServerRecord]:
    """Every registered server whose process runs; files of the others are removed."""
    found: list[ServerRecord] = []
    for path in sorted((state_folder() / "servers").glob("*.json")):
        record = _read(path, ServerRecord)
        if record is None:
            path.unlink(missing_ok=True)
        else:
            found.append(record)
    return found


def find_server(model: str, engine: str | None = None) -> str | None:
    """The URL of a live `nanorl serve` of this model, one that really answers; None where there is none.

    `engine`: only one of torch, or of sglang.
    """
    for record in live_servers():
        if record.model == _canonical(model) and engine in (None, record.engine):
            with contextlib.suppress(EngineError), EngineClient(record.url) as client:
                client.model_info(timeout_s=3.0)
                return record.url
    return None


@contextlib.contextmanager
def acquire_lease(url: str, owner: str, *, take_over: bool = False) -> Iterator[Lease]:
    """Holds a server against other runs of this machine while the block lasts.

    Args:
        url: the server.
        owner: what to call this run when another one asks; its folder.
        take_over: take it from whoever holds it.

    Raises:
        EngineError: a live run holds it.
    """
    path = _lease_path(url)
    lease = Lease(url=url, owner=owner, process=ProcessMark.here())
    with _locked(path):
        held = _read(path, Lease)
        if held is not None and not take_over:
            raise EngineError(
                f"The engine {url} is used by another run: {held.owner} (process {held.process.pid}). Two trainers "
                "would overwrite each other's weights. Use another engine, wait, or pass --take-over."
            )
        _write(path, lease)
    try:
        yield lease
    finally:
        with _locked(path):
            if _read(path, Lease) == lease:
                path.unlink(missing_ok=True)


def check_lease(lease: Lease) -> None:
    """Raises: EngineError where another run has taken the server over; to be asked before each sync."""
    held = _read(_lease_path(lease.url), Lease)
    if held != lease:
        who = f"{held.owner} (process {held.process.pid})" if held else "somebody who removed the lease"
        raise EngineError(
            f"The engine {lease.url} was taken over by {who}; this run can't go on with another run's weights."
        )


def _lease_path(url: str) -> Path:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    return state_folder() / "leases" / f"{quote(f'{host}:{parts.port}', safe='')}.json"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One reader-and-writer of a lease at a time; the kernel drops the lock of a process that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path, record_type: type[Record]) -> Record | None:
    """A record whose process lives; None for no file, one that can't be read, or a dead process's."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=record_type)
    except (OSError, msgspec.DecodeError):
        return None
    return record if record.process.is_alive else None


def _write(path: Path, record: ServerRecord | Lease) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_bytes(msgspec.json.encode(record))
        partial.replace(path)
    except OSError as error:
        raise NanoRLError(
            f"Can't write {path}: {error}. Set XDG_STATE_HOME to a folder that this user may write."
        ) from None


def _canonical(model: str) -> str:
    """A folder by its real path, a hub id as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None where it doesn't run (a zombie doesn't)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
        return None if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return None if Path("/proc/self/stat").exists() else _start_time_without_proc(pid)


def _start_time_without_proc(pid: int) -> str | None:
    """macOS: only whether the process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"
