"""Built once, whole or not at all."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanorl.errors import ModelError
from nanorl.models.cache import build_once, cache_folder

BUILD = """
import sys, time
from pathlib import Path
from nanorl.models.cache import build_once

def build(folder):
    (folder / "half").touch()
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(float(sys.argv[3]))
    (folder / "whole").touch()

build_once(Path(sys.argv[1]), build)
"""


def start(folder: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BUILD, str(folder), str(log), str(seconds)])


def write_whole(folder: Path) -> None:
    (folder / "whole").touch()


def test_the_cache_lies_under_xdg_cache_home_or_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "nanorl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "nanorl"


def test_what_is_there_is_not_built_again(tmp_path: Path):
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        write_whole(folder)

    for _ in range(3):
        assert (build_once(tmp_path / "deep" / "model", build) / "whole").exists()
    assert len(built) == 1


def test_two_processes_at_once_build_it_once(tmp_path: Path):
    log = tmp_path / "log"
    processes = [start(tmp_path / "model", log, 0.5) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert log.read_text() == "built\n"
    assert (tmp_path / "model" / "whole").exists()


def test_a_killed_build_leaves_nothing_that_looks_complete(tmp_path: Path):
    process = start(tmp_path / "model", tmp_path / "log", 600)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (tmp_path / "model").exists()
    assert list(tmp_path.glob(".model-*/half")), "the half-built folder is still there"
    build_once(tmp_path / "model", write_whole)
    assert (tmp_path / "model" / "whole").exists()
    assert not list(tmp_path.glob(".model-*")), "the next build removes it"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    def build(folder: Path) -> None:
        write_whole(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "model", build)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["model.lock"])


def test_a_cache_that_cant_be_written_is_a_model_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        build_once(tmp_path / "file" / "model", write_whole)
