"""The server as a process: start, signals, a dying engine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.engine.embedded import generate_body

LONG = generate_body([1, 2, 3], max_new_tokens=450, n=32, ignore_eos=True)


class Child:
    """A server process on a socket that it inherits."""

    def __init__(self, folder: Path, program: list[str]) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.process = subprocess.Popen(
            [sys.executable, *program, "--model", str(folder), "--fd", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        listener.close()

    def wait_ready(self) -> None:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            try:
                requests.get(self.url + "/model_info", timeout=1)
            except requests.RequestException:
                assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
                time.sleep(0.05)
            else:
                return
        raise AssertionError("never ready")

    def wait_running(self) -> None:
        end = time.monotonic() + 20
        while requests.get(self.url + "/server_info", timeout=5).json()["num_running_reqs"] == 0:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def child(tiny_folder: Path, request: pytest.FixtureRequest) -> Iterator[Child]:
    program = getattr(request, "param", ["-m", "nanorl.engine.server"])
    child = Child(tiny_folder, program)
    try:
        child.wait_ready()
        yield child
    finally:
        child.process.kill()
        child.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_cleanly_with_requests_in_flight(child: Child, number: signal.Signals) -> None:
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(requests.post, child.url + "/generate", json=LONG, timeout=30)
        child.wait_running()
        start = time.monotonic()
        child.process.send_signal(number)
        assert child.process.wait(10) == 0
        assert time.monotonic() - start < 4.0  # 2 s on a machine that has nothing else to do
        answers = pending.result().json()
    assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}
    assert child.process.stderr is not None
    assert child.process.stderr.read() == ""


CRASHING = """
import sys
from nanorl.engine import core, server
def boom(self):
    raise RuntimeError("the model fell over")
core.EngineCore._decode = boom
code = server.main(sys.argv[1:])
sys.exit(code)
"""


@pytest.mark.parametrize("child", [["-c", CRASHING]], indirect=True)
def test_a_dying_engine_answers_everybody_and_exits(child: Child) -> None:
    """tinker-cookbook 945, slime 1632: nobody waits for ever for an engine that is dead."""
    with ThreadPoolExecutor(2) as pool:
        pending = [pool.submit(requests.post, child.url + "/generate", json=LONG, timeout=30) for _ in range(2)]
        for answer in pending:
            try:
                response = answer.result()
            except requests.ConnectionError:
                continue  # came when the server had stopped listening
            assert response.status_code == 500
            assert "the model fell over" in response.json()["error"]["message"]
    assert child.process.wait(10) == 1
    assert child.process.stderr is not None
    assert "RuntimeError: the model fell over" in child.process.stderr.read()


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanorl.engine.server", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_mistakes_exit_with_two(tiny_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run_server("--model", str(tiny_folder), "--port", port)
    assert result.returncode == 2
    assert f"Expected port {port}" in result.stderr
    (tmp_path / "config.json").write_text("{}")
    result = run_server("--model", str(tmp_path), "--port", "0")
    assert result.returncode == 2
    assert "error: Expected" in result.stderr
    assert "Traceback" not in result.stderr
    assert run_server("--modle", "x").returncode == 2
    assert os.environ.get("PATH")
