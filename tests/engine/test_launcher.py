"""The launcher: no port race, no child left behind, a death that explains itself."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanorl.engine.client import EngineClient
from nanorl.engine.launcher import EngineCommand, EngineProcess, embedded_engine
from nanorl.engine.ports import listen_locally
from nanorl.errors import EngineError
from tests.tiny_models import build_tiny_model

SERVER = str(Path(__file__).with_name("small_server.py"))


def command(behaviour: str, port: int = 0) -> EngineCommand:
    return EngineCommand(argv=(sys.executable, SERVER, behaviour, "{fd}"), port=port)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        direct = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return direct + [deeper for child in direct for deeper in descendants(child)]
    return []


def wait_gone(pids: list[int], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, f"still running after {within_s} s: {[p for p in pids if is_running(p)]}"
        time.sleep(0.05)


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def test_answers_then_leaves_nothing(tmp_path: Path) -> None:
    with EngineProcess(command("serve"), log_path=tmp_path / "engine.log") as engine:
        assert EngineClient(engine.url).model_info().model_path == "small"
        assert engine.pid is not None
        pids = [engine.pid, *descendants(engine.pid)]
        assert len(pids) == 2
        engine.check_alive()
    wait_gone(pids, within_s=1.0)
    listen_locally(port_of(engine.url)).close()


def test_temporary_log_is_removed() -> None:
    with EngineProcess(command("serve")) as engine:
        assert engine.log_path.exists()
    assert not engine.log_path.exists()


def test_death_while_loading_is_told_at_once_with_cause_and_log(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"exit code 3: most likely not enough memory(.|\n)*Tried to allocate 2 GiB"):
        EngineProcess(command("die"), log_path=tmp_path / "engine.log", ready_timeout_s=60).start()
    assert time.monotonic() - start < 5.0


def test_no_answer_by_the_deadline(tmp_path: Path) -> None:
    engine = EngineProcess(command("never-answer"), log_path=tmp_path / "engine.log", ready_timeout_s=1.5)
    with pytest.raises(EngineError, match=r"did not get ready within 1\.5 s"):
        engine.start()
    assert engine.pid is None


def test_taken_port_names_port_and_holder() -> None:
    with listen_locally() as holder:
        port = holder.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port {port} .*process {os.getpid()} "):
            EngineProcess(command("serve", port)).start()


def test_command_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    engine = EngineProcess(command("stubborn"), log_path=tmp_path / "engine.log")
    engine.start()
    assert engine.pid is not None
    pids = [engine.pid, *descendants(engine.pid)]
    start = time.monotonic()
    engine.stop()
    assert 4.0 < time.monotonic() - start < 9.0
    wait_gone(pids, within_s=0.5)


def test_grandchildren_in_other_sessions_go_too(tmp_path: Path) -> None:
    """AReaL 622, prime-rl 2158: an engine's workers outlive it."""
    with EngineProcess(command("family"), log_path=tmp_path / "engine.log") as engine:
        grandchild = int(engine.log_path.read_text().split("grandchild ")[1].split()[0])
        while "it is up" not in engine.log_path.read_text():
            time.sleep(0.05)
        assert is_running(grandchild)
    wait_gone([grandchild], within_s=10.0)


def test_later_death_is_seen_and_restart_keeps_the_url(tmp_path: Path) -> None:
    with EngineProcess(command("serve"), log_path=tmp_path / "engine.log") as engine:
        url = engine.url
        assert engine.pid is not None
        os.kill(descendants(engine.pid)[0], signal.SIGKILL)
        end = time.monotonic() + 5
        while engine.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        with pytest.raises(EngineError, match=r"ended with exit code 137: it was killed"):
            engine.check_alive()
        with pytest.raises(EngineError, match="nothing listens there"):
            EngineClient(url).model_info()
        engine.restart()
        assert engine.url == url
        assert EngineClient(url).model_info().model_path == "small"


@pytest.mark.parametrize("killed", ["SIGKILL", "SIGTERM", "SIGINT", "guard"])
def test_nothing_outlives_the_parent(killed: str, tmp_path: Path) -> None:
    """AReaL 622, prime-rl 2158: after Ctrl-C or kill -9 of the parent no child is left and the port is free within 10
    s."""
    code = (
        "import os, sys, time\n"
        "from nanorl.engine.launcher import EngineCommand, EngineProcess\n"
        f"with EngineProcess(EngineCommand(argv=(sys.executable, {SERVER!r}, 'serve', '{{fd}}'))) as engine:\n"
        # A forked worker that outlives the parent holds the pipe to the guard open.
        "    worker = os.fork()\n"
        "    if worker == 0: time.sleep(8); os._exit(0)\n"
        "    print(engine.pid, engine.url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    guard_pid, url = parent.stdout.readline().split()
    pids = [int(guard_pid), *descendants(int(guard_pid))]
    assert len(pids) == 2
    if killed == "guard":
        os.kill(int(guard_pid), signal.SIGKILL)
    else:
        parent.send_signal(getattr(signal, killed))
    wait_gone(pids, within_s=10.0)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port_of(url))) != 0
    parent.kill()
    parent.wait()
    parent.stdout.close()


def test_embedded_engine_of_an_unknown_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"most likely the model can't be found"):
        EngineProcess(embedded_engine("/no/such/folder"), log_path=tmp_path / "engine.log", ready_timeout_s=60).start()


def test_embedded_engine_on_a_port_that_was_asked_for(tmp_path: Path) -> None:
    with listen_locally() as probe:
        port = probe.getsockname()[1]
    model = build_tiny_model(tmp_path / "model")
    with EngineProcess(embedded_engine(model, port=port), log_path=tmp_path / "engine.log") as engine:
        assert engine.url == f"http://127.0.0.1:{port}"
        assert EngineClient(engine.url).model_info().model_path == str(model)
        engine.restart()
        assert EngineClient(engine.url).model_info().version == 0
        pid = engine.pid
    assert pid is not None
    wait_gone([pid], within_s=1.0)
    listen_locally(port).close()
