"""The order of a weight update, whatever carries it: pause, begin, send, end, flush, continue; and what it cost.

Old-weight keys and values are never reused (running requests are retracted, the cache is flushed), every answer's
`success` is read, and generation goes on afterwards whether or not the update worked.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nanorl.engine.client import EngineClient
from nanorl.errors import EngineError, WeightSyncError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""(Hugging Face parameter name, full tensor); aliases of tied weights may be among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one sync carried and what each part of it took, in milliseconds."""

    version: int
    num_bytes: int
    num_tensors: int
    copy_ms: float
    """Into the bucket, or onto the disk."""
    serialize_ms: float
    pause_ms: float
    begin_ms: float
    """0 where the server has no weight session."""
    send_ms: float
    """The update calls: the engine's own copy is finished when they return."""
    end_ms: float
    flush_ms: float
    continue_ms: float
    verify_ms: float
    """The cheap check afterwards."""

    @property
    def total_ms(self) -> float:
        """begin + copy + serialize + send + end: what the metric sync/total_ms and every published figure mean."""
        return self.begin_ms + self.copy_ms + self.serialize_ms + self.send_ms + self.end_ms

    @property
    def stalled_ms(self) -> float:
        """How long generation stood still: pause to continue."""
        return self.pause_ms + self.begin_ms + self.send_ms + self.end_ms + self.flush_ms + self.continue_ms

    def metrics(self) -> dict[str, float]:
        """The report as `sync/...` metrics."""
        names = (
            "begin_ms",
            "copy_ms",
            "serialize_ms",
            "send_ms",
            "end_ms",
            "total_ms",
            "stalled_ms",
            "verify_ms",
            "num_bytes",
        )
        return {f"sync/{name}": getattr(self, name) for name in names}


class WeightSync(Protocol):
    """Moves the trainer's weights into one engine."""

    def sync(self, named_tensors: NamedTensors, version: int) -> SyncReport:
        """Makes the engine hold these weights as `version`. Raises: WeightSyncError, EngineError."""
        ...

    def verify(self, named_tensors: NamedTensors) -> int:
        """Compares every tensor by checksum; returns how many. Raises: WeightSyncError naming those that differ."""
        ...

    def close(self) -> None:
        """Frees the carrier's memory."""
        ...


@dataclass(slots=True)
class Stopwatch:
    """Milliseconds by name, summed over laps of the same name."""

    laps: dict[str, float] = field(default_factory=dict[str, float])

    @contextlib.contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Times a block, also one that raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.laps[name] = self.laps.get(name, 0.0) + (time.perf_counter() - start) * 1e3

    def report(self, version: int, num_bytes: int, num_tensors: int) -> SyncReport:
        """The laps as a report; what did not happen took 0."""
        names = ("copy", "serialize", "pause", "begin", "send", "end", "flush", "continue", "verify")
        times = {f"{name}_ms": self.laps.get(name, 0.0) for name in names}
        return SyncReport(version=version, num_bytes=num_bytes, num_tensors=num_tensors, **times)


@contextlib.contextmanager
def paused(client: EngineClient, watch: Stopwatch) -> Iterator[None]:
    """Pause (retract); the block replaces the weights; flush, continue. After a failure generation goes on too.

    Retract, because running requests then go on after the update with keys and values computed anew, while abort would
    lose them and in_place would mix two models in one cache.

    Raises:
        EngineError: the engine doesn't answer, or refuses to flush.
    """
    try:
        with watch.lap("pause"):
            client.pause("retract")
        yield
        with watch.lap("flush"):
            client.flush_cache()
    except BaseException:
        with contextlib.suppress(EngineError):
            client.continue_()
        raise
    with watch.lap("continue"):
        client.continue_()


@contextlib.contextmanager
def weight_session(client: EngineClient, watch: Stopwatch) -> Iterator[None]:
    """Begin; the block sends; end. The session is closed after a failure too. Nothing where the server knows no
    session.

    Raises:
        WeightSyncError: the engine refused a step.
    """
    with watch.lap("begin"):
        _begin(client)
    try:
        yield
    except BaseException:
        with contextlib.suppress(EngineError, WeightSyncError):
            _end(client)
        raise
    with watch.lap("end"):
        _end(client)


def check_version(client: EngineClient, version: int) -> None:
    """Raises: WeightSyncError where the engine reports another weight version than the one just sent."""
    held = client.model_info().version
    if held != version:
        raise WeightSyncError(
            f"Expected the engine {client.url} at weight version {version} after the sync, it reports {held}. "
            "Does another trainer update it?"
        )


def _begin(client: EngineClient) -> None:
    if not client.has_weight_session:
        return
    try:
        client.begin_weight_update()
    except WeightSyncError as error:
        raise WeightSyncError(
            f"{error}. Another trainer is updating this engine right now, or one that was killed left its session "
            "open: use another engine, or, when nobody updates it, close the session: "
            f"curl -X POST -H 'Content-Type: application/json' -d '{{}}' {client.url}/end_weight_update"
        ) from None


def _end(client: EngineClient) -> None:
    if client.has_weight_session:
        client.end_weight_update()
