"""An engine that dies or hangs in the middle of a run: the run's own comes back, anybody else's ends the run, kept."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nanorl.config import Config
from nanorl.config_load import load_config
from nanorl.engine.client import EngineClient
from nanorl.engine.generation import GenerationClient
from nanorl.engine.launcher import EngineProcess, embedded_engine
from nanorl.engine.protocol import SamplingParams, WeightUpdateFromTensor
from nanorl.errors import EngineError, WeightSyncError
from nanorl.loops import build as build_room
from nanorl.loops import recovery
from nanorl.loops.resume import saved_config
from nanorl.loops.train import train
from nanorl.tracking.view import PlainView
from nanorl.types import Completion
from tests.loops.commands import own_children
from tests.loops.test_train import make_config, metrics_of, without_times

STEPS = 4


def signal_engine(url: str, number: signal.Signals) -> None:
    with EngineClient(url) as client:
        os.kill(client.server_info()["process_id"], number)


class FatalGeneration(GenerationClient):
    """At each of these requests the engine gets a signal while it generates."""

    at: Sequence[int] = ()
    number = signal.SIGKILL
    num_requests = 0

    async def generate_batch(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        asked = asyncio.create_task(super().generate_batch(prompt_ids, sampling))
        type(self).num_requests += 1
        if self.num_requests in self.at:
            await asyncio.sleep(0.01)  # the request is on its way
            await asyncio.to_thread(signal_engine, self.url, self.number)
        return await asked


class FatalUpdate(EngineClient):
    """At each of these syncs the engine dies with the session open and the old weights in it."""

    at: Sequence[int] = ()
    num_updates = 0

    def update_from_tensor(self, update: WeightUpdateFromTensor, *, timeout_s: float | None = None) -> None:
        type(self).num_updates += 1
        if self.num_updates in self.at:
            signal_engine(self.url, signal.SIGKILL)
        super().update_from_tensor(update, timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test says when; the counts start anew."""
    for name, kind in (("GenerationClient", FatalGeneration), ("EngineClient", FatalUpdate)):
        monkeypatch.setattr(build_room, name, kind)
        monkeypatch.setattr(kind, "at", ())
    monkeypatch.setattr(FatalGeneration, "num_requests", 0)
    monkeypatch.setattr(FatalUpdate, "num_updates", 0)


def config_of(model: Path, run_dir: Path, *sets: str) -> Config:
    return make_config(model, run_dir, f"run.steps={STEPS}", "run.eval_prompts=0", *sets)


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path, shared_engine: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run alone comes to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(config_of(tiny_model, folder, f"engine.url={shared_engine}"), PlainView(quiet=True))
    return numbers(folder)


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """Everything but times and restarts."""
    return [
        {name: value for name, value in row.items() if name != "engine/num_restarts"}
        for row in without_times(metrics_of(run_dir))
    ]


def test_an_own_engine_that_dies_while_it_samples_and_while_it_is_synced(
    tiny_model: Path, tmp_path: Path, undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime 1632, miles 868: started again, given the weights again, asked again; the numbers are the same."""
    monkeypatch.setattr(FatalGeneration, "at", (2,))
    monkeypatch.setattr(FatalUpdate, "at", (5,))  # first sync, step 1, its repetition for step 2, step 2, step 3
    children = own_children()
    train(config_of(tiny_model, tmp_path / "run"), PlainView(quiet=True))
    assert own_children() == children
    assert [row["engine/num_restarts"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2, 2]
    assert numbers(tmp_path / "run") == undisturbed
    log = (tmp_path / "run" / "run.log").read_text()
    assert "killed, most likely for lack of memory" in log
    assert "restart 1 of at most 3" in log


def test_an_own_engine_that_hangs(
    tiny_model: Path, tmp_path: Path, undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime 1632, miles 868: it lives and answers nothing."""
    monkeypatch.setattr(FatalGeneration, "at", (2,))
    monkeypatch.setattr(FatalGeneration, "number", signal.SIGSTOP)
    monkeypatch.setattr(recovery, "HEALTH_S", 1.0)
    train(config_of(tiny_model, tmp_path / "run", "engine.request_timeout_s=5"), PlainView(quiet=True))
    assert [row["engine/num_restarts"] for row in metrics_of(tmp_path / "run")] == [0, 1, 1, 1]
    assert numbers(tmp_path / "run") == undisturbed


def test_restarts_are_bounded_and_the_run_is_kept(
    tiny_model: Path,
    shared_engine: str,
    tmp_path: Path,
    undisturbed: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FatalGeneration, "at", (3, 4))
    with pytest.raises(EngineError, match=r"(?s)killed.*started again 1 times.*kept as of step 2"):
        train(config_of(tiny_model, tmp_path / "run", "engine.max_restarts=1"), PlainView(quiet=True))
    resume(tmp_path / "run", shared_engine)
    assert numbers(tmp_path / "run") == undisturbed


def test_somebody_else_s_engine_that_dies_while_it_samples(
    tiny_model: Path,
    shared_engine: str,
    tmp_path: Path,
    undisturbed: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step that was not trained is sampled again after a resume, on the same prompts."""
    monkeypatch.setattr(FatalGeneration, "at", (3,))
    with EngineProcess(embedded_engine(tiny_model)) as engine:
        with pytest.raises(EngineError, match=r"(?s)/generate: no answer.*kept as of step 2.*--resume --run-dir"):
            train(config_of(tiny_model, tmp_path / "run", f"engine.url={engine.url}"), PlainView(quiet=True))
        assert numbers(tmp_path / "run") == undisturbed[:2]
    resume(tmp_path / "run", shared_engine)
    assert numbers(tmp_path / "run") == undisturbed


def test_somebody_else_s_engine_that_dies_in_a_sync(
    tiny_model: Path,
    shared_engine: str,
    tmp_path: Path,
    undisturbed: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was trained is kept, although no engine has it."""
    monkeypatch.setattr(FatalUpdate, "at", (3,))
    with (
        EngineProcess(embedded_engine(tiny_model)) as engine,
        pytest.raises((EngineError, WeightSyncError), match=r"(?s)kept as of step 2.*--resume --run-dir"),
    ):
        train(config_of(tiny_model, tmp_path / "run", f"engine.url={engine.url}"), PlainView(quiet=True))
    resume(tmp_path / "run", shared_engine)
    found = numbers(tmp_path / "run")
    missing = {name for name in undisturbed[1] if name not in found[1]}
    assert {name.partition("/")[0] for name in missing} == {"sync"}
    assert [row | {name: undisturbed[1][name] for name in missing} for row in found[1:2]] == undisturbed[1:2]
    assert [found[0], *found[2:]] == [undisturbed[0], *undisturbed[2:]]


def test_a_refusal_of_a_well_engine_is_no_reason_to_restart_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(EngineClient):
        def begin_weight_update(self) -> None:
            raise WeightSyncError("a session is open")

    monkeypatch.setattr(build_room, "EngineClient", Refusing)
    with pytest.raises(WeightSyncError, match="a session is open"):
        train(config_of(tiny_model, tmp_path / "run"), PlainView(quiet=True))
    assert "a session is open" in caplog.text
    assert "Starting it again" not in caplog.text


def resume(run_dir: Path, url: str) -> None:
    """Goes on from the newest checkpoint, with another engine, undisturbed."""
    FatalGeneration.at = FatalUpdate.at = ()
    config = load_config(None, [f"engine.url={url}"], {"run.resume": "latest"}, saved_config(str(run_dir)))
    train(config, PlainView(quiet=True))
