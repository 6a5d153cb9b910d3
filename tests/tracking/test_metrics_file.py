"""metrics.jsonl: every finished step is in it, whatever happens to the process or the disk."""

import json
import resource
import subprocess
import sys

import pytest

from nanorl.errors import CheckpointError
from nanorl.tracking.metrics_file import JsonlTracker, read_metrics, truncate_metrics
from tests.tracking.examples import make_report


def write(path, *reports):
    tracker = JsonlTracker(path)
    for report in reports:
        tracker.log(report)
    tracker.close()


def test_reports_come_back_exactly(tmp_path):
    reports = [make_report(1), make_report(2)]
    write(tmp_path / "m", *reports)

    assert read_metrics(tmp_path / "m") == reports


def test_a_step_is_on_the_disk_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path / "m")
    tracker.log(make_report(1))

    assert json.loads((tmp_path / "m").read_text())["rollout/reward/mean"] == 0.1
    tracker.close()


def test_numbers_that_are_not_finite_are_null_and_read_as_absent(tmp_path):
    write(tmp_path / "m", make_report(1, **{"train/pg_loss": float("nan")}))

    assert '"train/pg_loss":null' in (tmp_path / "m").read_text()
    assert "train/pg_loss" not in read_metrics(tmp_path / "m")[0].metrics


def test_a_torn_last_line_of_a_killed_run_is_left_out(tmp_path, caplog):
    write(tmp_path / "m", make_report(1), make_report(2))
    with (tmp_path / "m").open("ab") as file:
        file.write(b'{"step": 3, "weight_ver')

    assert [report.step for report in read_metrics(tmp_path / "m")] == [1, 2]
    assert "ends in the middle of a line" in caplog.text


@pytest.mark.parametrize("line", ["not json", '{"reward": 1}', "[1]", '{"step": 1, "weight_version": 1, "x": "text"}'])
def test_another_damaged_line_is_an_error_with_its_number(tmp_path, line):
    write(tmp_path / "m", make_report(1))
    with (tmp_path / "m").open("a") as file:
        file.write(f"{line}\n")

    with pytest.raises(CheckpointError, match="line 2: expected the metrics of one step"):
        read_metrics(tmp_path / "m")


def test_no_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"metrics of a run at .*/m"):
        read_metrics(tmp_path / "m")


def test_truncating_keeps_the_bytes_of_earlier_steps(tmp_path):
    path = tmp_path / "m"
    write(path, make_report(1), make_report(2))
    kept = path.read_bytes()
    write(path, make_report(3))
    with path.open("ab") as file:
        file.write(b'{"step": 4,')

    truncate_metrics(path, 2)

    assert path.read_bytes() == kept


FULL_THEN_FREE = """
import resource, sys
from pathlib import Path
from nanorl.tracking.metrics_file import JsonlTracker
from tests.tracking.examples import make_report
tracker, failures = JsonlTracker(Path(sys.argv[1])), 0
for step in range(1, 6):
    limit = 300 if step in (2, 3) else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        tracker.log(make_report(step))
    except OSError:
        failures += 1
tracker.close()
print(failures)
"""


def test_what_a_full_disk_did_not_take_is_written_when_there_is_space_again(tmp_path):
    """The limit of 300 bytes cuts the second line in two."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("file sizes are limited here")
    command = [sys.executable, "-c", FULL_THEN_FREE, str(tmp_path / "m")]

    failures = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    assert failures == "2"
    assert read_metrics(tmp_path / "m") == [make_report(step) for step in range(1, 6)]
