"""`nanorl train` as a process that is stopped or killed: nothing is left of it, whenever that comes."""

import signal
import socket
import time
from pathlib import Path

import pytest

from nanorl.config_load import load_config
from nanorl.loops.train import train
from nanorl.tracking.view import PlainView
from tests.loops.commands import Command, descendants, running, wait_gone
from tests.loops.test_train import metrics_of, without_times

ENDINGS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]


def words_of(model: Path, run_dir: Path, *sets: str) -> list[str]:
    """A run whose grading takes a minute: 128 samples of half a second, on two workers."""
    small = ["rollout.max_new_tokens=4", "run.eval_prompts=0", "reward.name=tests.loops.rewards:slow", *sets]
    words = ["train", "--model", str(model), "--run-dir", str(run_dir), "--prompts-per-step", "32", "--group-size", "4"]
    return [*words, *(word for setting in small for word in ("--set", setting))]


def end(command: Command, number: signal.Signals, code: int, left: list[int]) -> None:
    """Sends the signal as it would come; the command and what it started are gone within 10 s."""
    if number == signal.SIGINT:
        command.press_ctrl_c()
    else:
        command.process.send_signal(number)
    assert command.process.wait(10) == code
    wait_gone(left, within_s=10.0)
    assert "Traceback" not in command.output


@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_nothing_outlives_a_run_that_ends_in_its_rollout(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """AReaL 622, prime-rl 2158: engine, guard and reward workers gone and the port free within 10 s."""
    marker = tmp_path / "marker"
    words = words_of(tiny_model, tmp_path / "run")
    with running(tmp_path / "out", *words, env={"NANORL_TEST_MARKER": str(marker)}) as command:
        command.wait_for(marker.exists, "rollout")
        left = descendants(command.process.pid)
        assert len(left) >= 3  # guard, engine, at least one reward worker
        port = int(command.output.split("(own) http://127.0.0.1:")[1].split()[0])
        end(command, number, code, left)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    if number != signal.SIGKILL:
        assert "the run ended by" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_nothing_outlives_a_run_whose_engine_is_still_starting(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """AReaL 622, prime-rl 2158."""
    with running(tmp_path / "out", *words_of(tiny_model, tmp_path / "run", "reward.name=arithmetic")) as command:
        command.wait_for(lambda: len(descendants(command.process.pid)) >= 2, "guard and engine")
        left = descendants(command.process.pid)
        assert "(own)" not in command.output  # it did not answer yet
        end(command, number, code, left)


def test_two_runs_at_once_do_not_disturb_each_other(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    """Verl 6246: shared memory, sockets, ports, state files. Each gives what a run alone gives, on its own engine."""
    settings = ["rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=12", "train.lr=1e-3"]
    settings += ["run.steps=4", "run.eval_prompts=4", "reward.name=tests.loops.rewards:even_length"]
    flags = {"model.name": str(tiny_model), "run.dir": str(tmp_path / "alone"), "engine.url": shared_engine}
    train(load_config(None, settings, flags), PlainView(quiet=True))

    words = ["train", "--model", str(tiny_model), *(word for setting in settings for word in ("--set", setting))]
    with (
        running(tmp_path / "a.out", *words, "--run-dir", str(tmp_path / "a")) as a,
        running(tmp_path / "b.out", *words, "--run-dir", str(tmp_path / "b")) as b,
    ):
        assert (a.process.wait(60), b.process.wait(60)) == (0, 0), a.output + b.output
    alone = without_times(metrics_of(tmp_path / "alone"))
    assert len(alone) == 4
    assert without_times(metrics_of(tmp_path / "a")) == alone
    assert without_times(metrics_of(tmp_path / "b")) == alone
    urls = [command.output.split("(own) ")[1].split()[0] for command in (a, b)]
    assert urls[0] != urls[1]


@pytest.mark.parametrize(("number", "code"), ENDINGS[:2])
def test_a_signal_while_torch_is_imported_ends_the_command_at_once(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Torch and transformers swallow a KeyboardInterrupt that comes among their imports, or turn it into an error."""
    words = ["serve", "--model", "tiny-random", "--port", "0"]
    with running(tmp_path / "out", *words, env={"PYTHONVERBOSE": "1"}) as command:
        command.wait_for(lambda: "import 'torch._C'" in command.output, "import of torch")
        command.process.send_signal(number)
        start = time.monotonic()
        assert command.process.wait(10) == code
    assert time.monotonic() - start < 2
    assert "Traceback" not in command.output
