"""Recorded rollouts as a source: the same losses without an engine; and rollouts alone, without training."""

from pathlib import Path

import pytest

from nanorl.engine.client import EngineClient
from nanorl.errors import CheckpointError
from nanorl.loops.replay import replay
from nanorl.loops.saved import replayed_config
from nanorl.loops.train import train
from nanorl.tracking.rollouts import rollout_path
from nanorl.tracking.view import PlainView
from tests.loops.commands import nanorl, own_children
from tests.loops.test_train import groups_of, make_config, metrics_of, without_times


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, shared_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of training, some of whose grades failed."""
    folder = tmp_path_factory.mktemp("runs") / "recorded"
    sets = [
        "run.steps=3",
        "rollout.group_size=8",
        "reward.name=tests.loops.rewards:sometimes_broken",
        "rollout.max_retries=0",
    ]
    train(make_config(tiny_model, folder, *sets, f"engine.url={shared_engine}"), PlainView(quiet=True))
    return folder


def test_replayed_losses_are_the_recorded_ones_to_the_bit(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trl 5353, slime 2234: what was written is what trained."""
    children = own_children()
    assert nanorl("train", "--replay", str(recorded), "--run-dir", str(tmp_path / "again")) == 0
    assert own_children() == children
    assert "3 of 3 losses are the recorded ones to the bit" in capsys.readouterr().out
    for theirs, ours in zip(metrics_of(recorded), metrics_of(tmp_path / "again"), strict=True):
        trained = {name: value for name, value in theirs.items() if name.startswith("train/")}
        assert trained["train/updates"] == 2
        assert theirs["rollout/num_failed"] > 0
        assert {name: ours[name] for name in trained} == trained
        assert not any(name.startswith("sync/") for name in ours)
        assert groups_of(tmp_path / "again", ours["step"]) == groups_of(recorded, ours["step"])


def test_other_settings_make_something_else_of_the_same_samples(recorded: Path, tmp_path: Path) -> None:
    run = str(recorded)
    assert nanorl("train", "--replay", run, "--run-dir", str(tmp_path / "b"), "--lr", "0.01", "--steps", "2", "-q") == 0
    theirs, ours = metrics_of(recorded), metrics_of(tmp_path / "b")
    assert len(ours) == 2
    assert ours[1]["rollout/reward/mean"] == theirs[1]["rollout/reward/mean"]
    assert ours[1]["train/pg_loss"] != theirs[1]["train/pg_loss"]


def test_a_run_that_lacks_a_step_is_refused(recorded: Path, tmp_path: Path) -> None:
    hidden = rollout_path(recorded / "rollouts", 1).rename(tmp_path / "hidden")
    try:
        with pytest.raises(CheckpointError, match=r"rollouts from step 1 on in .*got steps \[2, 3\]"):
            replay(replayed_config(str(recorded)), PlainView(quiet=True))
    finally:
        hidden.rename(rollout_path(recorded / "rollouts", 1))


def test_rollout_only_trains_and_syncs_nothing(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    sets = ["run.steps=2", "run.rollout_only=true", f"engine.url={shared_engine}"]
    result = train(make_config(tiny_model, tmp_path / "only", *sets), PlainView(quiet=True))
    assert result.after == result.before
    with EngineClient(shared_engine) as client:
        assert client.model_info().version == 1  # the sync before the first sample
    rows = metrics_of(tmp_path / "only")
    assert [row["weight_version"] for row in rows] == [1, 1]
    assert not (tmp_path / "only" / "checkpoints").exists()
    assert not any(name.startswith(("train/", "sync/")) for row in rows for name in row)
    for step in (1, 2):
        samples = [sample for group in groups_of(tmp_path / "only", step) for sample in group.samples]
        assert len(samples) == 16
        assert {span.version for sample in samples for span in sample.weight_versions} == {1}
        assert any(sample.advantage for sample in samples)  # graded: a replay can train on it

    config = make_config(tiny_model, tmp_path / "trained", "run.steps=1", f"engine.url={shared_engine}")
    train(config, PlainView(quiet=True))
    (replayed, *_) = replay(replayed_config(str(tmp_path / "only")), PlainView(quiet=True))
    (trained,) = without_times(metrics_of(tmp_path / "trained"))
    assert replayed.metrics["train/pg_loss"] == trained["train/pg_loss"]
