"""`nanorl plot`: a PNG of the curves."""

import sys

import pytest

from nanorl.errors import CheckpointError, ConfigError
from nanorl.loops.plot import plot
from nanorl.tracking.metrics_file import JsonlTracker
from nanorl.tracking.run_folder import create_run_folder
from tests.tracking.examples import make_report


def make_run(path, steps):
    with create_run_folder(str(path), "tiny", overwrite=False) as folder:
        tracker = JsonlTracker(folder.metrics)
        for step in range(1, steps + 1):
            tracker.log(make_report(step))
        tracker.close()
    return str(path)


def test_one_run_goes_into_its_own_folder(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    target = plot([make_run(tmp_path / "a", 5)])

    assert target == tmp_path / "a" / "curves.png"
    pixels = image.imread(target)
    assert pixels.shape[1] == 1632  # 4 panels of 3.4 inches at 120 dpi
    assert pixels.std() > 0.05  # something is drawn


def test_several_runs_and_a_killed_one(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [make_run(tmp_path / "a", 5), make_run(tmp_path / "b", 40)]
    with (tmp_path / "b" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 41, "weig')

    target = plot(runs, tmp_path / "both.png")
    alone = plot(runs[:1], tmp_path / "one.png")

    assert target.read_bytes()[:4] == b"\x89PNG"
    assert target.read_bytes() != alone.read_bytes()


def test_bad_input(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    run = make_run(tmp_path / "a", 2)
    with pytest.raises(CheckpointError, match="where no run is"):
        plot([run, str(tmp_path / "nothing")])
    with pytest.raises(CheckpointError, match="no finished step yet"):
        plot([make_run(tmp_path / "fresh", 0)])
    with pytest.raises(CheckpointError, match=r"Can't write .*picture\.xyz"):
        plot([run], tmp_path / "picture.xyz")
    with pytest.raises(CheckpointError, match=r"Can't write /nowhere/x\.png"):
        plot([run], tmp_path.__class__("/nowhere/x.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="extra `plot`"):
        plot([run])
