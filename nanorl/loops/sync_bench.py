"""`nanorl sync-bench`: what a weight sync costs, part by part, over every carrier that reaches the engine."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

from nanorl.config import Config, SyncConfig
from nanorl.engine.client import EngineClient
from nanorl.loops.engine import acquire_engine, check_reach
from nanorl.loops.resolve import resolve
from nanorl.tracking.view import View
from nanorl.train.model import load_policy
from nanorl.weight_sync.base import SyncReport
from nanorl.weight_sync.carriers import Carrier, allowed_carriers, make_sync

PARTS = ("begin", "copy", "serialize", "send", "end", "total")

NUM_WARMUP = 2
"""Syncs before the clock runs: the first makes the bucket and compares names and shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierResult:
    """One carrier's syncs, each verified by the checksum of every tensor."""

    carrier: str
    num_syncs: int
    num_tensors: int
    num_bytes: int
    parts_ms: dict[str, dict[str, float]]
    """Part -> median, p95, min."""
    gb_per_s: float
    """num_bytes / median total."""
    copy_limit_ms: float
    """A bare copy of as many bytes in this process's memory, median, measured in the same run."""
    share_of_limit: float
    """copy_limit_ms / median total: 1 would be a sync that is nothing but one copy."""
    trainer_growth_mb: float
    """Memory after the last sync minus after the warm-up."""
    engine_growth_mb: float | None
    """The same of the engine's process; None where it isn't on this machine."""


def sync_bench(config: Config, view: View, *, iters: int) -> list[CarrierResult]:
    """Measures every allowed carrier, or the configured one, `iters` syncs each.

    Raises:
        WeightSyncError: the engine refuses, or holds other bits after a sync.
        NanoRLError: bad input.
    """
    config, model = resolve(config, view.progress)
    check_reach(config)
    with tempfile.TemporaryDirectory(prefix="nanorl-sync-bench-") as scratch:
        folder = Path(scratch)
        with acquire_engine(config, model, folder / "engine.log", "sync-bench") as engine:
            device = torch.device(config.model.device)
            tensors = load_policy(model.path, device, 1.0).model.state_dict()
            view.header(
                {"model": model.name, "engine": engine.description, "device": str(device), "dtype": str(engine.dtype)}
            )
            with EngineClient(engine.url) as client:
                allowed = allowed_carriers(client, device)
                wanted = allowed if config.sync.carrier == "auto" else (config.sync.carrier,)
                bench = _Bench(client, tensors, device, folder, view, config.sync.bucket_mb)
                return [bench.measure(carrier, iters) for carrier in wanted]


def as_json(results: Sequence[CarrierResult]) -> str:
    """The results for machines."""
    return json.dumps([asdict(result) for result in results], indent=2)


class _Bench:
    """The same tensors over one carrier after the other."""

    def __init__(
        self,
        client: EngineClient,
        tensors: dict[str, torch.Tensor],
        device: torch.device,
        folder: Path,
        view: View,
        bucket_mb: int | None,
    ) -> None:
        self.bucket_mb = bucket_mb
        self.client, self.tensors, self.device, self.folder, self.view = client, tensors, device, folder, view
        self.version = client.model_info().version
        self.engine_pid: int | None = client.server_info().get("process_id")

    def measure(self, carrier: Carrier, iters: int) -> CarrierResult:
        """`iters` syncs of weights that change each time; every one is verified outside the clock."""
        section = SyncConfig(carrier=carrier, bucket_mb=self.bucket_mb)
        sync = make_sync(section, self.client, self.device, self.folder)
        reports: list[SyncReport] = []
        memory: tuple[float, float | None] = (0.0, None)
        try:
            for i in range(NUM_WARMUP + iters):
                self._change(i)
                self.version += 1
                report = sync.sync(self.tensors.items(), self.version)
                sync.verify(self.tensors.items())
                if i < NUM_WARMUP:
                    memory = self._memory_mb()
                else:
                    reports.append(report)
                self.view.progress(carrier, len(reports), iters)
        finally:
            sync.close()
        return self._result(carrier, reports, memory)

    def _change(self, i: int) -> None:
        """Other weights than the last sync's, so that a sync that does nothing can't pass; they never wander off."""
        floats = list({t.data_ptr(): t for t in self.tensors.values() if t.is_floating_point()}.values())
        for tensor in floats:
            tensor.mul_(1.25 if i % 2 == 0 else 0.8)

    def _result(
        self, carrier: Carrier, reports: Sequence[SyncReport], before: tuple[float, float | None]
    ) -> CarrierResult:
        parts = {part: _summary([getattr(report, f"{part}_ms") for report in reports]) for part in PARTS}
        num_bytes, total_ms = reports[0].num_bytes, parts["total"]["median"]
        limit_ms = _median_ms(_copier(num_bytes, self.device))
        after = self._memory_mb()
        engine_growth = None if after[1] is None or before[1] is None else after[1] - before[1]
        return CarrierResult(
            carrier=carrier,
            num_syncs=len(reports),
            num_tensors=reports[0].num_tensors,
            num_bytes=num_bytes,
            parts_ms=parts,
            gb_per_s=num_bytes / total_ms / 1e6,
            copy_limit_ms=limit_ms,
            share_of_limit=limit_ms / total_ms,
            trainer_growth_mb=after[0] - before[0],
            engine_growth_mb=engine_growth,
        )

    def _memory_mb(self) -> tuple[float, float | None]:
        """(this process, the engine's), resident, and what this process has allocated on the GPU."""
        gpu = torch.cuda.memory_allocated() / 1e6 if self.device.type == "cuda" else 0.0
        return (_resident_mb("self") or 0.0) + gpu, _resident_mb(str(self.engine_pid)) if self.engine_pid else None


def _copier(num_bytes: int, device: torch.device) -> Callable[[], None]:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return copy


def _median_ms(work: Callable[[], None], rounds: int = 15) -> float:
    times: list[float] = []
    for _ in range(rounds):
        start = perf_counter()
        work()
        times.append((perf_counter() - start) * 1e3)
    return sorted(times)[rounds // 2]


def _summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": ordered[len(ordered) // 2], "p95": ordered[int(0.95 * (len(ordered) - 1))], "min": ordered[0]}


def _resident_mb(pid: str) -> float | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):
        return None
    return pages * 4096 / 1e6


def show(results: Sequence[CarrierResult], view: View) -> None:
    """A table a carrier, and one that compares them."""
    for result in results:
        rows = [(part, *(f"{result.parts_ms[part][k]:.2f}" for k in ("median", "p95", "min"))) for part in PARTS]
        size = f"{result.num_tensors} tensors, {result.num_bytes / 1e6:,.1f} MB"
        title = f"{result.carrier}: {result.num_syncs} syncs of {size}"
        view.table(title, ("ms", "median", "p95", "min"), rows)
    view.table(
        "Carriers, every tensor verified by checksum after each sync",
        ("", "total ms", "GB/s", "bare copy ms", "share of limit", "trainer MB", "engine MB"),
        [
            (
                result.carrier,
                f"{result.parts_ms['total']['median']:.2f}",
                f"{result.gb_per_s:.2f}",
                f"{result.copy_limit_ms:.2f}",
                f"{result.share_of_limit:.1%}",
                f"{result.trainer_growth_mb:+.1f}",
                "-" if result.engine_growth_mb is None else f"{result.engine_growth_mb:+.1f}",
            )
            for result in results
        ],
    )
