"""Several trackers as one: none of them, failing or hanging, stops training."""

import threading
import time

import pytest

from nanorl.config import TrackingConfig
from nanorl.config_load import load_config
from nanorl.errors import ConfigError, TrackerError
from nanorl.tracking import trackers as room
from nanorl.tracking.background import Background
from nanorl.tracking.metrics_file import JsonlTracker, read_metrics
from nanorl.tracking.trackers import BackgroundTracker, Trackers, open_trackers, require_backends
from nanorl.types import StepReport
from tests.tracking.examples import make_report


class Broken:
    """A backend whose server went away."""

    name = "broken"

    def log(self, report: StepReport) -> None:
        raise ConnectionError(f"gone before step {report.step}")

    def close(self) -> None:
        raise ConnectionError("still gone")


class Hanging:
    """A backend that waits for an answer that never comes."""

    name = "hanging"

    def __init__(self):
        self.release = threading.Event()

    def log(self, report: StepReport) -> None:
        if report.step:
            self.release.wait(30)

    def close(self) -> None:
        pass


def test_a_tracker_that_fails_is_shown_once_and_the_others_go_on(tmp_path):
    notes: list[str] = []
    trackers = Trackers([Broken(), JsonlTracker(tmp_path / "m")], notes.append)
    for step in (1, 2, 3):
        trackers.log(make_report(step))

    assert notes == ["warning: broken failed, training goes on: ConnectionError: gone before step 1"]
    assert trackers.num_failures == {"broken": 3}
    trackers.close()
    trackers.close()
    assert notes[1:] == ["warning: broken failed, training goes on: ConnectionError: still gone"]
    assert len(read_metrics(tmp_path / "m")) == 3


def test_in_the_background_failures_are_counted_and_shown_from_the_callers_thread():
    seen: list[tuple[str, str]] = []
    tracker = BackgroundTracker(Broken(), lambda text: seen.append((threading.current_thread().name, text)))
    for step in (1, 2, 3):
        tracker.log(make_report(step))
    tracker.close()

    assert seen == [
        ("MainThread", "warning: broken failed, training goes on: ConnectionError: gone before step 1"),
        ("MainThread", "broken: 4 items were lost in all"),  # three steps and the closing
    ]


def test_a_tracker_that_hangs_costs_no_time_and_only_its_own_steps():
    notes: list[str] = []
    hanging = Hanging()
    worker = Background("hanging", hanging.log, notes.append, patience_s=0.0, at_end=hanging.close)
    start = time.perf_counter()
    for step in range(1, 41):
        worker.put(make_report(step))
    worker.close(timeout_s=0.2)

    assert time.perf_counter() - start < 5
    assert notes[0] == "warning: hanging failed, training goes on: it is too slow, and its queue is full"
    assert worker.num_failed >= 23  # 16 fit into the queue, one is being handled
    hanging.release.set()


def test_an_unknown_backend_is_an_error_with_those_there_are():
    message = r"tracking.backends\[0\]: .*'tensorbord'.*Choices: tensorboard, wandb, mlflow, prometheus"
    with pytest.raises(ConfigError, match=message):
        load_config(sets=['tracking.backends=["tensorbord"]'])


def test_a_missing_package_names_the_extra_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setitem(room.MODULES, "wandb", "a_package_that_is_not_here")
    config = TrackingConfig(backends=("wandb",))

    for check in (lambda: require_backends(config), lambda: open_trackers(config, tmp_path, {}, print)):
        with pytest.raises(TrackerError, match="Install nanorl with the extra `wandb`"):
            check()
    assert list(tmp_path.iterdir()) == []


def test_without_backends_there_is_metrics_jsonl(tmp_path):
    trackers = open_trackers(TrackingConfig(), tmp_path, {}, pytest.fail)
    trackers.log(make_report(1))
    trackers.close()

    assert read_metrics(tmp_path / "metrics.jsonl") == [make_report(1)]
