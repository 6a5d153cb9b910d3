"""Faults that an asynchronous run must survive or name, each with the real engine: nothing hangs, nothing is lost."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanorl.errors import EngineError, RewardError
from nanorl.loops.build import Run, build
from nanorl.loops.overlap import Overlap
from nanorl.loops.train import turn
from nanorl.loops.train_async import train_async
from nanorl.rollout.single_turn import SingleTurn
from nanorl.tracking.view import PlainView
from nanorl.train.checkpoint import list_checkpoints
from nanorl.types import Prompt, Status, StepReport
from tests.loops.commands import descendants, own_children, running, wait_gone
from tests.loops.test_train import groups_of, make_config, metrics_of

QUIET = PlainView(quiet=True)


def test_failing_rewards_are_masked_counted_and_sampled_again(
    tiny_model: Path, shared_engine: str, tmp_path: Path
) -> None:
    """ms-swift 8123: raises, NaN, None by turns. The run goes on; what still fails after its retries is no 0."""
    sets = ["reward.name=tests.loops.rewards:sometimes_broken", "rollout.max_retries=1", "run.steps=4"]
    train_async(make_config(tiny_model, tmp_path / "run", f"engine.url={shared_engine}", *sets), QUIET)
    rows = metrics_of(tmp_path / "run")
    assert len(rows) == 4
    assert sum(row["rollout/num_failed"] for row in rows) > 0
    samples = [s for step in range(1, 5) for group in groups_of(tmp_path / "run", step) for s in group.samples]
    failed = [s for s in samples if s.status is Status.FAILED]
    assert failed
    assert all(s.reward is None and s.advantage == 0.0 for s in failed)


def test_a_reward_that_hangs_fails_its_samples_only(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    sets = ["reward.name=tests.loops.rewards:sometimes_hanging", "reward.timeout_s=0.2", "rollout.max_retries=0"]
    sets += ["run.steps=3", "run.eval_prompts=0"]
    train_async(make_config(tiny_model, tmp_path / "run", f"engine.url={shared_engine}", *sets), QUIET)
    rows = metrics_of(tmp_path / "run")
    assert sum(row.get("rollout/failed/timeout", 0) for row in rows) > 0
    assert all(row["train/updates"] > 0 for row in rows)


def test_a_reward_that_always_fails_ends_the_run_with_the_reason(
    tiny_model: Path, shared_engine: str, tmp_path: Path
) -> None:
    sets = ["reward.name=tests.loops.rewards:always_broken", "run.eval_prompts=0", f"engine.url={shared_engine}"]
    with pytest.raises(RewardError, match="planted"):
        train_async(make_config(tiny_model, tmp_path / "run", *sets), QUIET)


class During(PlainView):
    """Does something once, as soon as the given step is recorded."""

    def __init__(self, step: int, action) -> None:
        super().__init__(quiet=True)
        self.last, self.action = step, action

    def step(self, report: StepReport, steps: int) -> None:
        if report.step == self.last:
            self.action()


@pytest.fixture
def own_run(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[Run, During]]:
    """A run with an engine of its own, which a test may hurt, after two steps."""
    view = During(2, lambda: None)
    sets = ["run.steps=1000", "run.eval_prompts=0", "overlap.stall_timeout_s=2", "rollout.max_new_tokens=100"]
    sets += ["engine.max_restarts=0"]
    with build(make_config(tiny_model, tmp_path / "run", *sets), view) as run:
        yield run, view


def engine_pid(run: Run) -> int:
    """The process that holds the model: the last in the line guard, engine."""
    assert run.engine.process is not None
    pid = run.engine.process.pid
    assert pid is not None
    return [pid, *descendants(pid)][-1]


def test_a_killed_engine_is_started_again_and_no_prompt_is_lost(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slime 1632: kill -9 while requests run. What was in flight is sampled anew, by the weights of then."""
    view = During(2, lambda: None)
    sets = ["run.steps=6", "run.eval_prompts=0", "overlap.max_staleness=1", "overlap.stale=recycle"]
    with build(make_config(tiny_model, tmp_path / "run", *sets), view) as run:
        view.action = lambda: os.kill(engine_pid(run), signal.SIGKILL)
        handed_out: list[str] = []
        following = run.prompts.next

        def noted(n: int) -> list[Prompt]:
            prompts = following(n)
            handed_out.extend(prompt.id for prompt in prompts)
            return prompts

        monkeypatch.setattr(run.prompts, "next", noted)
        with Overlap(run) as source:
            result = turn(run, source)
        assert run.recovery.num_restarts == 1
        assert run.client.model_info().version == run.version == 7
    assert [report.metrics["engine/num_restarts"] for report in result.reports][-1] == 1
    assert all(report.metrics.get("train/mismatch/max", 0.0) < 1e-4 for report in result.reports)
    used = [group.prompt.id for step in range(1, 7) for group in groups_of(tmp_path / "run", step)]
    assert sorted(used) == sorted(handed_out)


def test_a_killed_engine_is_named_where_it_may_not_be_started_again(own_run: tuple[Run, During]) -> None:
    run, view = own_run
    view.action = lambda: os.kill(engine_pid(run), signal.SIGKILL)
    start = time.monotonic()
    with Overlap(run) as source, pytest.raises(EngineError, match=r"(?i)engine.*(died|ended|exit|killed|gone)"):
        turn(run, source)
    assert run.done_steps >= 2
    assert time.monotonic() - start < 20


def test_an_engine_killed_before_a_sync_is_named(own_run: tuple[Run, During]) -> None:
    """The sync's own error would speak of a refused connection."""
    run, _ = own_run
    with Overlap(run) as source:
        source.take(1)
        os.kill(engine_pid(run), signal.SIGKILL)
        with pytest.raises(EngineError, match=r"(?i)engine.*(died|ended|exit|killed|gone)"):
            source.sync()


def take_all(source: Overlap) -> None:
    """Uses up what is ready, as a trainer would, and more."""
    for step in range(2, 20):
        source.worker.synced()
        source.take(step)


def test_a_hung_engine_is_named_by_the_watchdog(own_run: tuple[Run, During]) -> None:
    """Miles 868: SIGSTOP closes no connection. What is waited for stands in the error."""
    run, _ = own_run
    pid = engine_pid(run)
    with Overlap(run) as source:
        source.take(1)
        os.kill(pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(EngineError, match=r"No group finished .* in flight \(\d+ requests at the engine"):
                take_all(source)
            assert time.monotonic() - start < 10
        finally:
            os.kill(pid, signal.SIGCONT)


class Bug(Exception):  # noqa: N818
    """A mistake in our own code, somewhere in the producer."""


def test_the_producers_traceback_reaches_the_main_thread(
    tiny_model: Path, shared_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tinker-cookbook 945, NeMo-RL 3488: with the line where it happened, not a wait for ever."""
    real = SingleTurn._grade
    calls = 0

    async def faulty(self, prompts, samples):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise Bug("planted in the producer")
        return await real(self, prompts, samples)

    config = make_config(
        tiny_model, tmp_path / "run", f"engine.url={shared_engine}", "run.eval_prompts=0", "run.steps=50"
    )
    monkeypatch.setattr(SingleTurn, "_grade", faulty)
    start = time.monotonic()
    with pytest.raises(Bug) as caught:
        train_async(config, QUIET)
    assert time.monotonic() - start < 20
    text = "".join(traceback.format_exception(caught.value))
    assert "in faulty" in text
    assert "single_turn.py" in text


def test_a_sync_while_64_requests_run(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    """sglang 33783, AReaL 140: none is lost, and each token has the weights that sampled it: rescored, they agree."""
    sets = ["rollout.prompts_per_step=32", "rollout.group_size=2", "rollout.max_new_tokens=120", "run.eval_prompts=0"]
    config = make_config(tiny_model, tmp_path / "run", f"engine.url={shared_engine}", *sets, "run.steps=3")
    with build(config, QUIET) as run, Overlap(run) as source:
        source.worker.start()
        most = 0
        while most < 64:
            most = max(most, sum(run.client.queue_lengths().values()))
        reports = [run.sync_weights() for _ in range(3)]
        assert [report.version for report in reports] == [2, 3, 4]
        groups = source.worker.take(run.version - 1, lambda: None, lambda done, total: None).groups
        samples = [sample for group in groups for sample in group.samples]
        assert len(samples) == 64
        assert all(sample.is_valid for sample in samples)
        spanning = [s for s in samples if len(s.weight_versions) > 1]
        assert spanning
        # All versions are the same weights here: old keys and values would not show, a lost or repeated token would.
        for sample in spanning[:8]:
            (scored,) = run.client.score([sample.token_ids], [sample.response_start], 1.0)
            assert scored == pytest.approx(list(sample.rollout_logprobs[sample.response_start :]), abs=1e-4)


@pytest.mark.parametrize(
    "sets",
    [
        ["reward.name=tests.loops.rewards:breathing", "rollout.max_new_tokens=4"],
        ["rollout.max_new_tokens=4", "train.micro_batch_tokens=16", "train.num_minibatches=4"],
    ],
    ids=["slow-producer", "slow-consumer"],
)
def test_either_side_may_be_the_slower(tiny_model: Path, shared_engine: str, tmp_path: Path, sets: list[str]) -> None:
    """The bound holds, whoever waits."""
    train_async(make_config(tiny_model, tmp_path / "run", f"engine.url={shared_engine}", "run.steps=6", *sets), QUIET)
    rows = metrics_of(tmp_path / "run")
    assert max(row["rollout/staleness/max"] for row in rows) <= 2
    assert all(row["rollout/queue_depth"] + row["rollout/in_flight"] <= 12 for row in rows)


def test_ctrl_c_leaves_a_checkpoint_and_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    """AReaL 622: within 10 s no child is left; the steps that were done are kept, and the run goes on from there."""
    words = ["train-async", "--model", str(tiny_model), "--run-dir", str(tmp_path / "run"), "--steps", "100000"]
    small = ["rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=12", "run.eval_prompts=0"]
    small += ["reward.name=tests.loops.rewards:breathing", "run.checkpoint_every=5000"]
    words += [word for setting in small for word in ("--set", setting)]
    with running(tmp_path / "out", *words) as command:
        command.wait_for(lambda: "step 4/" in command.output, "four steps")
        left = descendants(command.process.pid)
        command.press_ctrl_c()
        assert command.process.wait(10) == 130
        wait_gone(left, within_s=10.0)
        assert "Traceback" not in command.output
    (step,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert step >= 4
    assert step == len(metrics_of(tmp_path / "run"))


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    """The first one is held back until the step is whole; the second one cuts it."""
    from nanorl.loops.interrupts import deferred

    ends: list[float] = []

    def held_back(work_s: float) -> None:
        with deferred(patience_s=0.2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(work_s)
            ends.append(work_s)

    with pytest.raises(KeyboardInterrupt):
        held_back(0.0)
    assert ends == [0.0], "the block was finished"
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        held_back(10.0)
    assert ends == [0.0]
    assert time.monotonic() - start < 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_soak_run_keeps_memory_threads_and_children(tiny_model: Path, tmp_path: Path) -> None:
    """1,000 steps: what 200 steps need is what 1,000 need."""
    seen: list[tuple[int, int, int]] = []

    class Watching(PlainView):
        def step(self, report: StepReport, steps: int) -> None:
            if report.step % 200 == 0:
                seen.append((_resident_mb(), threading.active_count(), len(own_children())))

    sets = ["run.steps=1000", "run.eval_prompts=0", "run.checkpoint_every=0", "rollout.max_new_tokens=4"]
    before = own_children()
    train_async(make_config(tiny_model, tmp_path / "run", *sets), Watching(quiet=True))
    assert len(seen) == 5
    assert seen[-1][0] - seen[0][0] < 40, seen
    assert len({(threads, children) for _, threads, children in seen}) == 1, seen
    assert own_children() == before


def _resident_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20
