"""Whole commands against either engine, started by somebody else: train, resume, sync-bench and the two checks."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanorl.config_load import load_config
from nanorl.engine.client import EngineClient
from nanorl.loops.resume import saved_config
from nanorl.loops.train import train
from nanorl.tracking.view import PlainView
from tests.engines import EITHER_ENGINE, RunningEngine, running_engine
from tests.loops.commands import nanorl
from tests.loops.test_train import groups_of, make_config, metrics_of


@pytest.fixture(scope="module", params=EITHER_ENGINE)
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[RunningEngine]:
    with running_engine(request.param, tiny_model) as running:
        yield running


def gate_of(engine: RunningEngine) -> float:
    """Nats, in fp32."""
    return 1e-5 if engine.is_embedded else 1e-4


def test_train_as_a_command(engine: RunningEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole loop: the engine's logprobs are the trainer's at each step, so each sync has arrived."""
    words = ["train", "--steps", "2", "--model", str(engine.model), "--engine-url", engine.url]
    words += ["--run-dir", str(tmp_path / "run"), "--prompts-per-step", "4", "--group-size", "4", "--lr", "1e-2"]
    sets = ["rollout.max_new_tokens=12", "run.eval_prompts=4", "reward.name=tests.loops.rewards:even_length"]
    assert nanorl(*words, *(word for setting in [*sets, "sync.full_check=true"] for word in ("--set", setting))) == 0
    rows = metrics_of(tmp_path / "run")
    assert [row["weight_version"] for row in rows] == [2, 3]
    assert all(0 < row["train/mismatch/max"] < gate_of(engine) for row in rows)
    assert all(row["train/updates"] > 0 for row in rows)
    with EngineClient(engine.url) as client:
        assert client.model_info().version == 3
    assert f"{'torch' if engine.is_embedded else 'sglang'} (given) {engine.url}" in capsys.readouterr().out


def test_resumed_weights_are_in_the_engine_before_the_first_sample(engine: RunningEngine, tmp_path: Path) -> None:
    """prime-rl 3004, slime 1695: the engine held the last run's weights."""
    sets = ["train.lr=1e-2", "run.steps=1", f"engine.url={engine.url}"]
    train(make_config(engine.model, tmp_path / "run", *sets), PlainView(quiet=True))
    train(make_config(engine.model, tmp_path / "other", *sets, "run.seed=5"), PlainView(quiet=True))
    config = load_config(None, ["run.steps=2"], {"run.resume": "latest"}, saved_config(str(tmp_path / "run")))
    train(config, PlainView(quiet=True))
    row = metrics_of(tmp_path / "run")[1]
    assert row["weight_version"] == 3
    assert 0 < row["train/mismatch/max"] < gate_of(engine)
    versions = {span.version for g in groups_of(tmp_path / "run", 2) for s in g.samples for span in s.weight_versions}
    assert versions == {2}


def test_sync_bench(engine: RunningEngine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sync-bench", "--iters", "2", "--json", "--model", str(engine.model), "--engine-url", engine.url]
    assert nanorl(*words) == 0
    results = json.loads(capsys.readouterr().out)
    assert [(result["carrier"], result["num_syncs"]) for result in results] == [("shared_memory", 2), ("disk", 2)]
    assert all(result["parts_ms"]["send"]["median"] > 0 for result in results)


def test_check_parity(engine: RunningEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Before and after a real step and sync, sampled and rescored."""
    words = ["check-parity", "--model", str(engine.model), "--engine-url", engine.url, "--prompts", "4"]
    code = nanorl(*words, "--set", "rollout.max_new_tokens=12")
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert shown.count("holds: ") == 2


def test_probe_tito(engine: RunningEngine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["probe-tito", "--samples", "8", "--model", str(engine.model), "--engine-url", engine.url]
    code = nanorl(*words)
    assert code == 0, capsys.readouterr().out
