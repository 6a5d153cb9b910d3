"""The run folder: never two runs in one, never another's files lost, always found again."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanorl.errors import CheckpointError, ConfigError, EngineError
from nanorl.tracking.run_folder import RUNS, create_run_folder, find_run, reopen_run_folder, write_atomically


def create(path=None, *, overwrite=False):
    return create_run_folder(path and str(path), "some/tiny", overwrite=overwrite, model_path="/models/tiny")


def test_the_default_folder_is_named_for_time_and_model_and_latest_leads_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with create() as first, create() as second:  # within one second
        assert first.path != second.path
        assert first.path.parent == RUNS
        assert "-tiny" in first.path.name
        assert not (RUNS / "latest").exists()  # no step is done yet
        second.point_latest()
        assert (RUNS / "latest").readlink() == Path(second.path.name)
        assert find_run("latest").path.resolve() == second.path.resolve()
        assert find_run(first.path.name).path == first.path


def test_a_folder_elsewhere_moves_no_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with create(tmp_path / "mine") as folder:
        folder.point_latest()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine"]


def end(folder, error):
    with pytest.raises(type(error)), folder:
        raise error


@pytest.mark.parametrize("ending", [ConfigError("no such reward"), KeyboardInterrupt()])
def test_a_start_that_fails_leaves_nothing(tmp_path, ending):
    folder = create(tmp_path / "run")
    folder.rollouts.mkdir()
    folder.metrics.touch()
    end(folder, ending)
    assert list(tmp_path.iterdir()) == []


def test_what_explains_a_failed_start_stays_and_blocks_nothing(tmp_path):
    folder = create(tmp_path / "run")
    folder.engine_log.write_text("out of memory")
    end(folder, EngineError("the engine died"))
    assert folder.engine_log.read_text() == "out of memory"

    again = create(tmp_path / "run")  # no --overwrite: nothing was trained
    assert not again.engine_log.exists()
    end(again, RuntimeError("a bug"))
    assert "a bug" in again.log.read_text()


def test_a_run_that_has_started_stays_however_it_ends(tmp_path):
    folder = create(tmp_path / "run")
    folder.keep()
    end(folder, KeyboardInterrupt())
    assert "the run ended by KeyboardInterrupt" in folder.log.read_text()


def test_versions_say_what_decides_the_numbers(tmp_path):
    with create(tmp_path / "run") as folder:
        found = json.loads(folder.versions.read_text())
    assert {"nanorl", "python", "msgspec", "model_path"} <= found.keys()


def test_a_used_folder_is_refused_without_overwrite(tmp_path):
    """prime-rl 2304: a fresh run in a used folder would mix old rollouts in."""
    with create(tmp_path / "run") as folder:
        folder.metrics.write_text("old")

    with pytest.raises(ConfigError, match="is used already"):
        create(tmp_path / "run")
    assert folder.metrics.read_text() == "old"


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(tmp_path):
    with create(tmp_path / "run") as folder:
        folder.metrics.write_text("old")
        for name in (
            "rollouts/step-00001.jsonl",
            "rollouts/step-00002.part",
            "tensorboard/events.1",
            "checkpoints/1/w",
        ):
            (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            (folder.path / name).write_text("old")
        for name in ("notes.txt", "rollouts/mine.txt"):
            (folder.path / name).write_text("mine")

    with create(tmp_path / "run", overwrite=True) as folder:
        left = sorted(str(p.relative_to(folder.path)) for p in folder.path.rglob("*") if p.is_file())
    assert left == ["notes.txt", "rollouts/mine.txt", "run.lock", "run.log", "versions.json"]


def test_overwrite_refuses_a_folder_that_no_run_made(tmp_path):
    (tmp_path / "config.json").write_text("somebody's")

    with pytest.raises(ConfigError, match="no run made it"):
        create(tmp_path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        create(tmp_path / "run", overwrite=True)


@pytest.mark.parametrize("path", ["/dev/full/run", "/proc/run"])
def test_a_place_that_can_not_be_written_is_a_clear_error(path):
    with pytest.raises(CheckpointError, match=f"Can't write to the run folder {path}: .*Choose another --run-dir"):
        create(path)


OWN = """
import sys, time
from nanorl.tracking.run_folder import create_run_folder
with create_run_folder(sys.argv[1], "tiny", overwrite=False) as folder:
    folder.metrics.write_text("mine")
    print("owned", flush=True)
    time.sleep(60)
"""


def test_a_live_run_keeps_its_folder_until_it_is_gone_however_it_goes(tmp_path):
    """verl 6246: two runs must not share what one run owns; a killed one must not block the next."""
    owner = subprocess.Popen([sys.executable, "-c", OWN, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        for take in (lambda: create(tmp_path / "run", overwrite=True), lambda: reopen_run_folder(tmp_path / "run")):
            with pytest.raises(ConfigError, match=rf"belongs to a live run \(process {owner.pid}\)"):
                take()
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == "mine"
        owner.send_signal(signal.SIGKILL)

    with reopen_run_folder(tmp_path / "run") as folder:
        assert folder.metrics.read_text() == "mine"
        assert (folder.path / "run.lock").read_text() == f"{os.getpid()}\n"


def test_the_log_has_what_was_shown_and_the_traceback_of_the_end(tmp_path):
    with create(tmp_path / "run") as folder:
        logging.getLogger("nanorl.engine").warning("the engine is slow")
    with pytest.raises(ZeroDivisionError), reopen_run_folder(folder.path):
        raise ZeroDivisionError

    text = folder.log.read_text()
    assert "WARNING the engine is slow" in text
    assert "the run ended by ZeroDivisionError\nTraceback" in text
    logging.getLogger("nanorl").warning("after the end")
    assert folder.log.read_text() == text


def test_a_full_disk_does_not_print_a_traceback_for_every_line_of_the_log(tmp_path, capfd):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").touch()
    with create(tmp_path / "run") as folder:
        pass
    folder.log.unlink()
    folder.log.symlink_to("/dev/full")
    with reopen_run_folder(folder.path):
        logging.getLogger("nanorl").info("lost")
    assert capfd.readouterr() == ("", "")


def test_no_such_run_names_those_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"got 'nope'.*There is no run in runs/ yet"):
        find_run("nope")
    with create() as folder, pytest.raises(CheckpointError, match=f"Runs in runs/: {folder.path.name}"):
        find_run("nope")


def test_an_atomic_write_leaves_the_old_file_where_it_fails(tmp_path):
    path = tmp_path / "config.json"
    write_atomically(path, b"old")
    (tmp_path / ".config.json.part").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
