"""Servers are found by model, leases keep two trainers off one engine, and nothing of the dead stays."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nanorl.engine.launcher import EngineCommand, EngineProcess
from nanorl.engine.registry import acquire_lease, check_lease, find_server, live_servers, register_server, state_folder
from nanorl.errors import EngineError

SERVER = str(Path(__file__).with_name("small_server.py"))


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def in_another_process(code: str) -> str:
    imports = "import os, sys\nfrom nanorl.engine.registry import *\n"
    done = subprocess.run(
        [sys.executable, "-c", imports + code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, -9), done.stderr
    return done.stdout


def test_finds_a_live_server_of_the_same_model_only(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(model)
    assert find_server(str(model)) is None
    with EngineProcess(EngineCommand(argv=(sys.executable, SERVER, "serve", "{fd}"))) as engine:
        with register_server(engine.url, str(model), "torch"):
            assert find_server(str(model)) == engine.url
            assert find_server(str(tmp_path / "link")) == engine.url
            assert find_server(str(other)) is None
            assert in_another_process(f"print(find_server({str(model)!r}))").strip() == engine.url
        assert find_server(str(model)) is None


def test_a_registered_server_that_does_not_answer_is_not_used(tmp_path: Path) -> None:
    with register_server("http://127.0.0.1:9", str(tmp_path), "torch"):
        assert find_server(str(tmp_path)) is None


def test_files_of_dead_servers_are_removed(tmp_path: Path) -> None:
    in_another_process(
        f"held = register_server('http://127.0.0.1:9', {str(tmp_path)!r}, 'torch')\n"
        "held.__enter__()\nos.kill(os.getpid(), 9)"
    )
    (state_folder() / "servers" / "7.json").write_text("half writ")
    assert len(list((state_folder() / "servers").glob("*.json"))) == 2
    assert live_servers() == []
    assert list((state_folder() / "servers").glob("*.json")) == []


def test_second_run_is_refused_and_told_who_holds_the_engine() -> None:
    with acquire_lease("http://localhost:30000", "runs/first") as lease:
        said = in_another_process(
            "try:\n  acquire_lease('http://127.0.0.1:30000', 'runs/second').__enter__()\n"
            "except Exception as e: print(type(e).__name__, e)"
        )
        assert said.startswith("EngineError")
        assert "runs/first" in said
        assert "--take-over" in said
        with acquire_lease("http://127.0.0.1:30001", "runs/first"):
            pass
        check_lease(lease)
    assert (
        in_another_process("with acquire_lease('http://127.0.0.1:30000', 'runs/second'): print('mine')").strip()
        == "mine"
    )


def test_take_over_ends_the_first_lease_and_survives_its_release() -> None:
    with acquire_lease("http://127.0.0.1:30000", "runs/first") as first:
        second = acquire_lease("http://127.0.0.1:30000", "runs/second", take_over=True)
        held = second.__enter__()
        with pytest.raises(EngineError, match="taken over by runs/second"):
            check_lease(first)
    check_lease(held)
    second.__exit__(None, None, None)
    with pytest.raises(EngineError, match="removed the lease"):
        check_lease(held)


def test_lease_of_a_killed_run_is_free() -> None:
    in_another_process(
        "held = acquire_lease('http://127.0.0.1:30000', 'runs/dead')\nheld.__enter__()\nos.kill(os.getpid(), 9)"
    )
    (path,) = (state_folder() / "leases").glob("*.json")
    assert msgspec.json.decode(path.read_bytes())["owner"] == "runs/dead"
    with acquire_lease("http://127.0.0.1:30000", "runs/next") as lease:
        check_lease(lease)
