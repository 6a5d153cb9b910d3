"""The asynchronous loop, whole: real engine process, real sync under running requests, on a random tiny model."""

import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from nanorl.config import Config
from nanorl.config_load import load_config
from nanorl.errors import ConfigError, RewardError
from nanorl.loops.cores import shared_cores
from nanorl.loops.resume import saved_config
from nanorl.loops.train import TrainResult, train
from nanorl.loops.train_async import train_async
from nanorl.tracking.view import PlainView
from nanorl.types import StepReport
from tests.loops.test_train import groups_of, make_config, metrics_of, without_times

QUIET = PlainView(quiet=True)


def run_async(model: Path, run_dir: Path, engine: str, *sets: str) -> TrainResult:
    return train_async(make_config(model, run_dir, f"engine.url={engine}", *sets), QUIET)


def test_max_staleness_0_gives_the_numbers_of_the_synchronous_loop(
    tiny_model: Path, shared_engine: str, tmp_path: Path
) -> None:
    """Contract 8: to the bit, metrics and rollouts."""
    train(make_config(tiny_model, tmp_path / "sync", f"engine.url={shared_engine}", "run.steps=3"), QUIET)
    run_async(tiny_model, tmp_path / "async", shared_engine, "run.steps=3", "overlap.max_staleness=0")
    rows = without_times(metrics_of(tmp_path / "sync"))
    assert len(rows) == 3
    assert without_times(metrics_of(tmp_path / "async")) == rows
    for step in (1, 2, 3):
        assert groups_of(tmp_path / "async", step) == groups_of(tmp_path / "sync", step)


@pytest.mark.parametrize("mode", ["retract", "drain"])
def test_staleness_keeps_the_bound_in_every_step(
    tiny_model: Path, shared_engine: str, tmp_path: Path, mode: str
) -> None:
    """Contracts 7 and 8: every token has its version, none is older than max_staleness, the numbers logged are those
    of the samples that trained (trl 5353, slime 2234); both sides agree on the tokens of the trainer's own version.
    """
    sets = ["run.steps=8", "rollout.max_new_tokens=40", f"overlap.in_flight_update={mode}", "algo.correction=tis"]
    run_async(tiny_model, tmp_path / "run", shared_engine, *sets)
    rows = metrics_of(tmp_path / "run")
    assert len(rows) == 8
    spanning = 0
    for step, row in enumerate(rows, start=1):
        groups = groups_of(tmp_path / "run", step)
        trainer = row["weight_version"] - 1
        assert len(groups) == 4
        oldest = [min(span.version for s in group.samples for span in s.weight_versions) for group in groups]
        assert row["rollout/staleness/max"] == trainer - min(oldest) <= 2
        assert row["rollout/staleness/mean"] == sum(trainer - version for version in oldest) / 4
        assert sum(row[f"rollout/staleness/groups_{k}"] for k in range(3)) == 4
        # 4 train, and what waits or runs has the other slots.
        assert row["rollout/queue_depth"] + row["rollout/in_flight"] <= 12
        assert row.get("train/mismatch/max", 0.0) < 1e-4
        assert 0 < row["train/ess"] <= 1
        rewards = [s.reward for group in groups for s in group.samples if s.reward is not None]
        assert row["rollout/reward/mean"] == pytest.approx(sum(rewards) / 16)
        for sample in (s for group in groups for s in group.samples):
            assert sum(span.end - span.start for span in sample.weight_versions) == sample.num_sampled
            spanning += len(sample.weight_versions) > 1
    assert max(row["rollout/staleness/max"] for row in rows) >= 1
    if mode == "drain":
        assert spanning == 0


def test_prompts_come_in_order_and_none_twice(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    run_async(tiny_model, tmp_path / "run", shared_engine, "run.steps=6")
    ids = [group.prompt.id for step in range(1, 7) for group in groups_of(tmp_path / "run", step)]
    assert len(set(ids)) == len(ids) == 24


@pytest.mark.parametrize("stale", ["drop", "recycle"])
def test_overtaken_groups_are_dropped_or_recycled(
    tiny_model: Path, shared_engine: str, tmp_path: Path, stale: str
) -> None:
    """Consumption checks the bound that capacity alone can't hold for stragglers; what is thrown away is counted."""
    sets = ["run.steps=20", "overlap.max_staleness=1", f"overlap.stale={stale}", "reward.num_workers=4"]
    sets += ["reward.name=tests.loops.rewards:straggling", "run.eval_prompts=0", "rollout.group_size=2"]
    run_async(tiny_model, tmp_path / "run", shared_engine, *sets)
    rows = metrics_of(tmp_path / "run")
    counts = Counter({name: sum(row[f"rollout/stale_{name}"] for row in rows) for name in ("dropped", "recycled")})
    assert max(row["rollout/staleness/max"] for row in rows) <= 1
    assert counts["dropped" if stale == "drop" else "recycled"] > 0
    assert counts["recycled" if stale == "drop" else "dropped"] == 0
    ids = [group.prompt.id for step in range(1, 21) for group in groups_of(tmp_path / "run", step)]
    assert len(set(ids)) == len(ids) == 80


class EndsIn(PlainView):
    """Ctrl-C right after the given step was recorded."""

    def __init__(self, step: int) -> None:
        super().__init__(quiet=True)
        self.last = step

    def step(self, report: StepReport, steps: int) -> None:
        if report.step == self.last:
            raise KeyboardInterrupt


def resumed(folder: Path) -> Config:
    return load_config(None, (), {"run.resume": "latest"}, saved_config(str(folder)))


def test_resume_reissues_what_was_in_flight_once(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    """Prime-rl 3164: 3 steps, a death with groups ready and in flight, 5 more: each prompt once, none left out."""
    folder = tmp_path / "run"
    config = make_config(
        tiny_model, folder, f"engine.url={shared_engine}", "run.steps=8", "run.checkpoint_every=3", "run.eval_prompts=0"
    )
    with pytest.raises(KeyboardInterrupt):
        train_async(config, EndsIn(5))
    train_async(resumed(folder), QUIET)
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, 9))
    ids = [group.prompt.id for step in range(1, 9) for group in groups_of(folder, step)]
    run_async(tiny_model, tmp_path / "whole", shared_engine, "run.steps=8")
    whole = [group.prompt.id for step in range(1, 9) for group in groups_of(tmp_path / "whole", step)]
    assert sorted(ids) == sorted(whole)
    assert len(set(ids)) == 32


def test_a_run_begun_in_lockstep_goes_on_asynchronously(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(make_config(tiny_model, folder, f"engine.url={shared_engine}", "run.steps=2"), QUIET)
    config = load_config(None, ["run.steps=4"], {"run.resume": "latest"}, saved_config(str(folder)))
    train_async(config, QUIET)
    ids = [group.prompt.id for step in range(1, 5) for group in groups_of(folder, step)]
    assert len(set(ids)) == 16


@pytest.mark.parametrize("loop", [train, train_async])
def test_dynamic_sampling_trains_on_groups_with_spread_only(
    tiny_model: Path, shared_engine: str, tmp_path: Path, loop
) -> None:
    """DAPO: with two samples a group half have none; they are replaced, and counted."""
    sets = ["rollout.group_size=2", "rollout.dynamic_sampling=8", "run.steps=4", f"engine.url={shared_engine}"]
    loop(make_config(tiny_model, tmp_path / "run", *sets), QUIET)
    rows = metrics_of(tmp_path / "run")
    assert [row["rollout/zero_spread_groups"] for row in rows] == [0.0] * 4
    assert sum(row["rollout/filtered_groups"] for row in rows) > 0
    for step in range(1, 5):
        groups = groups_of(tmp_path / "run", step)
        assert len(groups) == 4
        assert all(len({s.reward for s in group.samples}) == 2 for group in groups)


@pytest.mark.parametrize("loop", [train, train_async])
def test_a_filter_that_rejects_everything_ends_the_run(
    tiny_model: Path, shared_engine: str, tmp_path: Path, loop
) -> None:
    sets = ["rollout.dynamic_sampling=2", "reward.name=tests.loops.rewards:constant", f"engine.url={shared_engine}"]
    with pytest.raises(RewardError, match=r"discarded \d+ groups.*all 0\.25"):
        loop(make_config(tiny_model, tmp_path / "run", *sets), QUIET)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["overlap.in_flight_update=in-place"], "old weights"),
        (["algo.clip_high=50"], "clipped ratio"),
        (["run.rollout_only=true"], "nothing to overlap"),
        (["engine.colocate=true"], "needs its memory"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_starts(tmp_path: Path, sets: list[str], message: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=message):
        train_async(make_config(tmp_path / "no-model", tmp_path / "run", *sets), QUIET)
    assert threading.active_count() == before
    assert not (tmp_path / "run").exists()


def test_nothing_is_left_of_a_run(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    run_async(tiny_model, tmp_path / "a", shared_engine)
    before = {thread.name for thread in threading.enumerate()}
    run_async(tiny_model, tmp_path / "b", shared_engine)
    assert {thread.name for thread in threading.enumerate()} == before


def test_both_sides_get_half_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the block for this process and whatever it starts; a user's own setting stays."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    with shared_cores("cpu"):
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (half, str(half))
    assert torch.get_num_threads() == before
    assert "OMP_NUM_THREADS" not in os.environ
    with shared_cores("cuda"):
        assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with shared_cores("cpu"):
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (before, "7")
