"""Grading by anybody's function: a fault has a name, and is never a score."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanorl.config import REWARDS, RewardConfig
from nanorl.errors import RewardError
from nanorl.rewards.hub import (
    BUILT_IN,
    GradeItem,
    Grader,
    InProcessGrader,
    RewardFailure,
    RewardResult,
    WorkerGrader,
    build_grader,
)
from nanorl.types import Prompt
from tests.rewards.user_rewards import score

FUNCTION = "tests.rewards.user_rewards:score"
IMPORTABLE_FAULTS = {
    "raise": "raised",
    "none": "no_value",
    "nan": "not_finite",
    "inf": "not_finite",
    "string": "not_a_number",
    "nan part": "not_finite",
}
KILLING_FAULTS = {"hang": "timeout", "spin": "timeout", "die": "died"}


def item(label: str, text: str = "abc") -> GradeItem:
    prompt = Prompt(id=label, messages=({"role": "user", "content": "?"},), label=label)
    return GradeItem(prompt=prompt, text=text, finish_reason="stop")


def grade(grader: Grader, *labels: str) -> list[RewardResult | RewardFailure]:
    return asyncio.run(grader.grade_all([item(label) for label in labels]))


def causes(results: list[RewardResult | RewardFailure]) -> list[str | None]:
    return [result.cause if isinstance(result, RewardFailure) else None for result in results]


@pytest.fixture
def worker() -> Iterator[WorkerGrader]:
    grader = WorkerGrader(FUNCTION, timeout_s=1.0, num_workers=2)
    yield grader
    grader.close()


@pytest.mark.parametrize(("label", "cause"), IMPORTABLE_FAULTS.items())
def test_a_fault_in_this_process_is_a_named_failure(label: str, cause: str):
    """ms-swift 8123, miles 1706, 3221"""
    results = grade(InProcessGrader(score), "fine", label, "fine")
    assert causes(results) == [None, cause, None]
    assert results[0] == RewardResult(value=4.0)


def test_every_fault_in_a_worker_is_a_named_failure_and_the_batch_goes_on(worker: WorkerGrader):
    """ms-swift 8123, miles 1706, 3221: never NaN, never silently 0, never for ever."""
    faults = IMPORTABLE_FAULTS | KILLING_FAULTS
    labels = [label for fault in faults for label in ("fine", fault)]
    start = time.monotonic()
    results = grade(worker, *labels)
    assert causes(results) == [cause for fault in faults.values() for cause in (None, fault)]
    assert all(result == RewardResult(value=4.0) for result in results[::2])
    assert time.monotonic() - start < 60
    assert causes(grade(worker, "fine", "fine", "fine")) == [None] * 3, "replaced workers serve the next batch"


def test_messages_say_what_happened(worker: WorkerGrader):
    raised, died, string = grade(worker, "raise", "die", "string")
    assert isinstance(raised, RewardFailure)
    assert "ValueError: bad sample" in raised.message
    assert isinstance(died, RewardFailure)
    assert "code 3" in died.message
    assert isinstance(string, RewardFailure)
    assert "str '1.0'" in string.message


def test_workers_grade_side_by_side_in_other_processes_and_keep_the_order(worker: WorkerGrader):
    items = [item("parts" if i % 2 else "fine", text="x" * i) for i in range(40)]
    results = asyncio.run(worker.grade_all(items))
    assert [r.value for r in results[::2] if isinstance(r, RewardResult)] == [float(i + 1) for i in range(0, 40, 2)]
    pids = {r.parts["pid"] for r in results[1::2] if isinstance(r, RewardResult)}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2


def test_grading_does_not_block_the_event_loop(worker: WorkerGrader):
    async def tick_while_grading() -> int:
        grading = asyncio.create_task(worker.grade_all([item("hang")]))
        ticks = 0
        while not grading.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return ticks

    assert asyncio.run(tick_while_grading()) >= 5


def test_a_print_does_not_disturb_the_answers(worker: WorkerGrader, capfd: pytest.CaptureFixture[str]):
    assert grade(worker, "print", "fine") == [RewardResult(value=1.0), RewardResult(value=4.0)]
    assert capfd.readouterr().out == ""


def test_an_empty_batch_is_no_work(worker: WorkerGrader):
    assert grade(worker) == []


def test_names_lead_to_graders():
    built_in = build_grader(RewardConfig(name="arithmetic"))
    assert isinstance(built_in, InProcessGrader)
    prompt = Prompt(id="p", messages=(), label="57")
    [result] = asyncio.run(
        built_in.grade_all([GradeItem(prompt=prompt, text="<answer>57</answer>", finish_reason="stop")])
    )
    assert result == RewardResult(value=1.2, parts={"correct": 1.0, "format": 1.0})
    assert set(BUILT_IN) == set(REWARDS)  # what the config lets pass has a function


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_such_module:f", "ModuleNotFoundError"),
        ("tests.rewards.user_rewards:no_such", "no_such"),
        ("tests.rewards.user_rewards:NUMBER", "Expected a function"),
    ],
)
def test_a_function_that_cant_be_had_is_an_error_before_training(path: str, complaint: str):
    with pytest.raises(RewardError, match=complaint):
        build_grader(RewardConfig(name=path))


def test_a_module_that_ends_the_process_on_import_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "exits.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RewardError, match="code 7"):
        WorkerGrader("exits:f", timeout_s=1.0)


def test_close_leaves_no_process(worker: WorkerGrader):
    pids = {r.parts["pid"] for r in grade(worker, *["parts"] * 8) if isinstance(r, RewardResult)}
    worker.close()
    assert pids
    assert not any(Path(f"/proc/{int(pid)}").exists() for pid in pids)


def test_a_killed_parent_leaves_no_worker_even_one_that_hangs():
    """AReaL 622, prime-rl 2158: the pipe's end is noticed while the user's function spins."""
    script = (
        "import asyncio, os\n"
        "from nanorl.rewards.hub import WorkerGrader\n"
        "from tests.rewards.test_hub import FUNCTION, item\n"
        "grader = WorkerGrader(FUNCTION, timeout_s=600.0, num_workers=1)\n"
        "[result] = asyncio.run(grader.grade_all([item('parts')]))\n"
        "print(int(result.parts['pid']), flush=True)\n"
        "asyncio.run(grader.grade_all([item('spin')]))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    worker_pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _is_running(worker_pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(worker_pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_close_in_the_middle_of_a_batch_ends_it():
    """AReaL 622: the batch's threads outlive the event loop; none may start a worker again or hold the process up."""
    grader = WorkerGrader(FUNCTION, timeout_s=60.0, num_workers=2)
    threads = threading.active_count()

    async def cut_off() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(grader.grade_all([item("hang") for _ in range(8)]), 0.3)
        grader.close()

    start = time.monotonic()
    asyncio.run(cut_off())  # waits for the threads
    assert time.monotonic() - start < 5.0
    assert threading.active_count() == threads
    assert all(worker._process.wait(5) is not None for worker in grader._workers)
    with pytest.raises(RewardError, match="closed"):
        asyncio.run(grader.grade_all([item("fine")]))


def test_batches_share_the_workers() -> None:
    """Groups finish out of order and are graded at once: each batch gets its own answers, and both run in parallel."""
    grader = WorkerGrader("tests.rewards.user_rewards:echo_slowly", timeout_s=10.0, num_workers=4)

    async def both() -> list[list[float]]:
        batches = [[item(str(10 * row + i)) for i in range(4)] for row in range(4)]
        answers = await asyncio.gather(*(grader.grade_all(batch) for batch in batches))
        return [[r.value for r in answer if isinstance(r, RewardResult)] for answer in answers]

    start = time.monotonic()
    assert asyncio.run(both()) == [[10 * row + i for i in range(4)] for row in range(4)]
    assert time.monotonic() - start < 16 * 0.05  # one after another they take that long
    grader.close()
