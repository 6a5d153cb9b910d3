"""sync-bench as a whole: every carrier, machine-readable, and no sync that did nothing gets through."""

import json
from math import prod
from pathlib import Path

import pytest
import torch

from nanorl.config import SyncConfig
from nanorl.config_load import load_config
from nanorl.engine.client import EngineClient
from nanorl.errors import WeightSyncError
from nanorl.loops import sync_bench as bench
from nanorl.tracking.view import PlainView
from nanorl.weight_sync.base import NamedTensors, SyncReport, WeightSync
from nanorl.weight_sync.carriers import Carrier, make_sync
from tests.loops.commands import nanorl, own_children


def test_every_carrier_as_json(tiny_model: Path, shared_engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    children = own_children()
    words = ["sync-bench", "--iters", "3", "--json", "--model", str(tiny_model), "--engine-url", shared_engine]
    assert nanorl(*words) == 0
    assert own_children() == children
    results = json.loads(capsys.readouterr().out)
    assert [result["carrier"] for result in results] == ["shared_memory", "disk"]
    with EngineClient(shared_engine) as client:
        shapes = [entry["shape"] for entry in client.server_info()["parameters"].values()]
    for result in results:
        assert result["num_syncs"] == 3
        assert result["num_tensors"] == len(shapes)
        assert result["num_bytes"] == 4 * sum(map(prod, shapes))
        parts = result["parts_ms"]
        assert list(parts) == ["begin", "copy", "serialize", "send", "end", "total"]
        assert all(0 <= part["min"] <= part["median"] <= part["p95"] for part in parts.values())
        assert 0 < parts["copy"]["median"] < parts["total"]["median"]
        assert 0 < parts["send"]["median"] < parts["total"]["median"]
        assert result["gb_per_s"] == pytest.approx(result["num_bytes"] / parts["total"]["median"] / 1e6)
        assert result["share_of_limit"] == pytest.approx(result["copy_limit_ms"] / parts["total"]["median"])
        # Sizes in MB; slime 1731 grew by the whole model a sync, here 0.5 MB.
        assert abs(result["trainer_growth_mb"]) < 20
        assert abs(result["engine_growth_mb"]) < 20


def test_tables_for_people(tiny_model: Path, shared_engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sync-bench", "--iters", "1", "--set", "sync.carrier=disk", "--model", str(tiny_model)]
    assert nanorl(*words, "--engine-url", shared_engine) == 0
    shown = capsys.readouterr().out
    assert "disk: 1 syncs of" in shown
    assert "shared_memory" not in shown
    assert [line.split()[0] for line in shown.split("p95")[1].splitlines()[1:7]] == list(bench.PARTS)


class IdleAfterTheFirst:
    """A sync that works once, and from then on only says so."""

    def __init__(self, real: WeightSync) -> None:
        self.real = real
        self.report: SyncReport | None = None
        self.num_idle = 0

    def sync(self, named_tensors: NamedTensors, version: int) -> SyncReport:
        if self.report is None:
            self.report = self.real.sync(named_tensors, version)
        else:
            self.num_idle += 1
        return self.report

    def verify(self, named_tensors: NamedTensors) -> int:
        return self.real.verify(named_tensors)

    def close(self) -> None:
        self.real.close()


@pytest.mark.parametrize("carrier", ["shared_memory", "disk"])
def test_a_sync_that_does_nothing_is_noticed(
    tiny_model: Path, shared_engine: str, monkeypatch: pytest.MonkeyPatch, carrier: Carrier
) -> None:
    """Verl 6688, sglang 14178: the figures of a sync that did not arrive are worth nothing."""
    made: list[IdleAfterTheFirst] = []

    def make_idle(section: SyncConfig, client: EngineClient, device: torch.device, folder: Path) -> IdleAfterTheFirst:
        made.append(IdleAfterTheFirst(make_sync(section, client, device, folder)))
        return made[-1]

    monkeypatch.setattr(bench, "make_sync", make_idle)
    config = load_config(
        None, [f"sync.carrier={carrier}"], {"model.name": str(tiny_model), "engine.url": shared_engine}
    )
    with pytest.raises(WeightSyncError, match="holds other weights than the trainer"):
        bench.sync_bench(config, PlainView(quiet=True), iters=2)
    assert [sync.num_idle for sync in made] == [1]
