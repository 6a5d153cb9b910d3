"""The synchronous loop, whole: real engine process over HTTP, real sync, real gradients, on a random tiny model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nanorl.config import Config
from nanorl.config_load import load_config
from nanorl.engine.client import EngineClient
from nanorl.engine.launcher import EngineProcess, embedded_engine
from nanorl.engine.registry import acquire_lease, register_server
from nanorl.errors import ConfigError, DataError, EngineError, RewardError, WeightSyncError
from nanorl.loops.train import TrainResult, train
from nanorl.tracking.rollouts import read_rollouts
from nanorl.tracking.view import PlainView
from nanorl.types import Group, Status
from tests.tiny_models import build_tiny_model

TIMES = ("time/", "tokens_per_s", "_ms")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `nanorl serve` of this machine's user must not be found, nor may the tests leave leases behind."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def make_config(model: Path, run_dir: Path, *sets: str) -> Config:
    small = [
        "rollout.prompts_per_step=4",
        "rollout.group_size=4",
        "rollout.max_new_tokens=12",
        "train.num_minibatches=2",
        "train.lr=1e-3",
        "run.eval_prompts=4",
        "run.steps=2",
        "reward.name=tests.loops.rewards:even_length",
    ]
    return load_config(None, [*small, *sets], {"model.name": str(model), "run.dir": str(run_dir)})


def run(model: Path, run_dir: Path, *sets: str) -> TrainResult:
    return train(make_config(model, run_dir, *sets), PlainView(quiet=True))


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def groups_of(run_dir: Path, step: int) -> list[Group]:
    return [record.group for record in read_rollouts(run_dir / "rollouts", step)]


def without_times(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in rows]


def test_two_runs_with_one_seed_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    """Contract 9, first half; and the seed matters."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(model, tmp_path / name, "run.steps=3", f"run.seed={seed}")
    a, b, c = (without_times(metrics_of(tmp_path / name)) for name in "abc")
    assert len(a) == 3
    assert a == b
    assert a != c
    assert (tmp_path / "a" / "rollouts").is_dir()
    for step in (1, 2, 3):
        assert groups_of(tmp_path / "a", step) == groups_of(tmp_path / "b", step)


def test_every_step_trains_on_its_own_weights(model: Path, tmp_path: Path) -> None:
    """Contracts 1, 3, 6, 7: versions count syncs, every token is of the newest, trainer and engine agree on it."""
    result = run(model, tmp_path / "run", "run.steps=3", "sync.full_check=true", "rollout.temperature=1.3")
    for step, row in enumerate(metrics_of(tmp_path / "run"), start=1):
        assert row["weight_version"] == step + 1  # the sync before the first sample is version 1
        assert 0 < row["train/mismatch/max"] < 1e-4
        assert row["train/updates"] == 2
        assert row["train/grad_norm"] > 0
        assert row["sync/num_bytes"] > 0
        for group in groups_of(tmp_path / "run", step):
            for sample in group.samples:
                assert {span.version for span in sample.weight_versions} == {step}
                assert sum(span.end - span.start for span in sample.weight_versions) == sample.num_sampled
    assert result.before is not None
    assert result.after is not None
    assert result.before.num_prompts == 4


def test_logged_reward_is_the_one_that_trained(model: Path, tmp_path: Path) -> None:
    """trl 5353, slime 2234."""
    run(model, tmp_path / "run", "run.steps=1")
    (row,) = metrics_of(tmp_path / "run")
    samples = [s for group in groups_of(tmp_path / "run", 1) for s in group.samples]
    rewards = [s.reward for s in samples if s.reward is not None]
    assert len(rewards) == 16
    assert row["rollout/reward/mean"] == pytest.approx(sum(rewards) / 16)
    trained = sum(s.num_sampled for s in samples if s.advantage)
    assert row["train/num_tokens"] == trained > 0


def test_failed_grades_are_masked_and_counted_never_zero(model: Path, tmp_path: Path) -> None:
    """ms-swift 8123, miles 1706: without retries every kind of failure stays, by cause, out of mean and gradient."""
    run(
        model,
        tmp_path / "run",
        "run.steps=1",
        "reward.name=tests.loops.rewards:sometimes_broken",
        "rollout.max_retries=0",
    )
    (row,) = metrics_of(tmp_path / "run")
    samples = [s for group in groups_of(tmp_path / "run", 1) for s in group.samples]
    failed = [s for s in samples if s.status is Status.FAILED]
    assert {s.metadata["cause"] for s in failed} >= {"raised", "not_finite"}
    assert row["rollout/num_failed"] == len(failed) == sum(v for k, v in row.items() if k.startswith("rollout/failed/"))
    assert all(s.reward is None and s.advantage == 0.0 for s in failed)
    valid = [s.reward for s in samples if s.reward is not None]
    assert row["rollout/reward/mean"] == pytest.approx(sum(valid) / len(valid))


def test_failed_samples_are_sampled_again(model: Path, tmp_path: Path) -> None:
    run(
        model,
        tmp_path / "none",
        "run.steps=1",
        "reward.name=tests.loops.rewards:sometimes_broken",
        "rollout.max_retries=0",
    )
    run(
        model,
        tmp_path / "two",
        "run.steps=1",
        "reward.name=tests.loops.rewards:sometimes_broken",
        "rollout.max_retries=2",
    )
    without, with_retries = metrics_of(tmp_path / "none")[0], metrics_of(tmp_path / "two")[0]
    assert with_retries["rollout/num_failed"] < without["rollout/num_failed"]
    assert with_retries["rollout/num_samples"] == 16


def test_a_reward_that_never_answers_stops_the_run_with_its_reason(model: Path, tmp_path: Path) -> None:
    """A step without one valid sample teaches nothing, and neither would the next."""
    with pytest.raises(RewardError, match=r"All 16 samples failed.*planted"):
        run(model, tmp_path / "run", "run.eval_prompts=0", "reward.name=tests.loops.rewards:always_broken")


def test_a_running_server_is_found_synced_and_leased(model: Path, tmp_path: Path) -> None:
    """A server that another run has trained gives no false result: ours is synced first. One trainer at a time."""
    with EngineProcess(embedded_engine(model)) as process:
        run(model, tmp_path / "own", "run.steps=1")
        run(model, tmp_path / "dirty", "run.steps=2", "run.seed=7", f"engine.url={process.url}")
        run(model, tmp_path / "given", "run.steps=1", f"engine.url={process.url}")
        assert without_times(metrics_of(tmp_path / "given")) == without_times(metrics_of(tmp_path / "own"))
        with register_server(process.url, str(model), "torch"):
            run(model, tmp_path / "found", "run.steps=1")
        with EngineClient(process.url) as client:
            assert client.model_info().version == 2
        config = (tmp_path / "found" / "run.log").read_text()
        assert f"nanorl serve) {process.url}" in config
        with acquire_lease(process.url, "somebody"), pytest.raises(EngineError, match=r"somebody.*--take-over"):
            run(model, tmp_path / "refused", f"engine.url={process.url}")


def test_a_server_of_another_model_gets_nothing(model: Path, tmp_path: Path) -> None:
    other = build_tiny_model(tmp_path / "other", hidden_size=32)
    with EngineProcess(embedded_engine(other)) as process:
        with pytest.raises(WeightSyncError, match="another model"):
            run(model, tmp_path / "run", f"engine.url={process.url}")
        with EngineClient(process.url) as client:
            assert client.model_info().weight_version == "default"


def test_an_engine_that_dies_ends_the_run_with_its_log(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 10: killed from inside, in the middle of a run, and nothing hangs."""
    import os
    import signal

    from nanorl.loops import build

    original = build.Run.sync_weights

    def kill_after_second_sync(self: build.Run) -> Any:
        report = original(self)
        if report.version == 2:
            assert self.engine.process is not None
            (child,) = _children_of(self.engine.process.pid)
            os.kill(child, signal.SIGKILL)
        return report

    monkeypatch.setattr(build.Run, "sync_weights", kill_after_second_sync)
    with pytest.raises(EngineError, match="engine"):
        run(model, tmp_path / "run", "run.steps=3", "engine.max_restarts=0")
    assert len(metrics_of(tmp_path / "run")) == 1


def _children_of(pid: int | None) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("sets", "error", "message"),
    [
        (["engine.url=http://127.0.0.1:9"], EngineError, "127.0.0.1:9"),
        (["reward.name=nowhere"], Exception, "nowhere"),
        (["data.type=jsonl", "data.path=/nonexistent.jsonl"], DataError, "nonexistent"),
        (["tracking.backends=['tensorbored']"], ConfigError, "tensorbored"),
        (["model.device=cuda"], ConfigError, "no GPU"),
        (["engine.colocate=true"], ConfigError, "can't give its memory back.*--enable-memory-saver"),
    ],
)
def test_bad_input_is_refused_with_its_name(
    model: Path, tmp_path: Path, sets: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(model, tmp_path / "run", *sets)


def test_a_prompt_longer_than_the_context_is_refused(model: Path, tmp_path: Path) -> None:
    """prime-rl 1986, trl 3698: never cut in silence."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * length, "label": "1"}) + "\n" for length in (5, 2000, 9)))
    with pytest.raises(DataError, match="leaves no room"):
        run(model, tmp_path / "run", "data.type=jsonl", f"data.path={path}", "run.eval_prompts=0")
