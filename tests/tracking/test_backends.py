"""Each backend for real: what was logged is read back from the disk or the port."""

import logging
import socket
import struct

import pytest
import requests

from nanorl.config import TrackingConfig
from nanorl.errors import TrackerError
from nanorl.tracking.trackers import open_trackers
from tests.tracking.examples import make_report

SETTINGS = {"train": {"lr": 6e-4, "betas": [0.9, 0.95]}, "run": {"dir": None}}
ODD = {"rollout/failed/HTTP 500: café!": 2.0}
"""A failure's cause comes from a user's code: backends must take any text in a name."""


def log_two_steps(folder, **options):
    """Two steps through everything that a run goes through."""
    notes: list[str] = []
    trackers = open_trackers(TrackingConfig(**options), folder, SETTINGS, notes.append)
    trackers.log(make_report(1, **ODD))
    trackers.log(make_report(2))
    trackers.close()
    assert notes == []


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_two_steps(tmp_path, backends=("tensorboard",))

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("rollout/reward/mean")] == [(1, 0.1), (2, 0.2)]
    assert [(e.step, e.value) for e in events.Scalars("rollout/failed/HTTP 500: café!")] == [(1, 2.0)]


def test_prometheus_as_a_run_opens_and_closes_it(tmp_path, caplog):
    pytest.importorskip("prometheus_client")
    caplog.set_level(logging.INFO, "nanorl")
    trackers = open_trackers(TrackingConfig(backends=("prometheus",), prometheus_port=0), tmp_path, {}, pytest.fail)
    url = caplog.text.split()[-1]

    assert requests.get(url, timeout=10).status_code == 200  # before the first step: an empty page
    trackers.log(make_report(1))
    while "nanorl_step" not in requests.get(url, timeout=10).text:
        pass  # the tracker works in the background; the test's timeout ends a wait in vain
    trackers.close()
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=10)


def test_prometheus_shows_the_latest_step():
    pytest.importorskip("prometheus_client")
    from nanorl.tracking.backends.prometheus import PrometheusTracker

    tracker = PrometheusTracker(0, "my run")
    try:
        tracker.log(make_report(1, **ODD))
        text = requests.get(f"http://127.0.0.1:{tracker.port}/metrics", timeout=10).text
        assert 'nanorl_rollout_reward_mean{run="my run"} 0.1\n' in text
        assert "nanorl_rollout_failed_HTTP_500__caf" in text
        tracker.log(make_report(2))
        text = requests.get(f"http://127.0.0.1:{tracker.port}/metrics", timeout=10).text
        assert 'nanorl_rollout_reward_mean{run="my run"} 0.2\n' in text
        assert 'nanorl_step{run="my run"} 2.0\n' in text
        assert "HTTP_500" not in text  # a metric of an earlier step only is no longer true
    finally:
        tracker.close()


def test_a_taken_prometheus_port_is_an_error_at_the_start(tmp_path):
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = TrackingConfig(backends=("prometheus",), prometheus_port=taken.getsockname()[1])
        with pytest.raises(TrackerError, match=r"prometheus can't be started: .*in use"):
            open_trackers(config, tmp_path, {}, print)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # MLflow's own
def test_mlflow_in_plain_files(tmp_path):
    MlflowClient = pytest.importorskip("mlflow.tracking").MlflowClient  # noqa: N806 (a class)

    folder = tmp_path / "run-7"
    folder.mkdir()
    log_two_steps(folder, backends=("mlflow",), project="arithmetic")

    client = MlflowClient(tracking_uri=str(folder / "mlruns"))
    experiment = client.get_experiment_by_name("arithmetic")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run-7"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.lr": "0.0006", "train.betas": "[0.9, 0.95]", "run.dir": "None"}
    history = client.get_metric_history(run.info.run_id, "rollout/reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.1), (2, 0.2)]
    assert run.data.metrics["rollout/failed/HTTP 500: café_"] == 2.0

    log_two_steps(folder, backends=("mlflow",), project="arithmetic")  # a resumed run is the same one
    (again,) = client.search_runs([experiment.experiment_id])
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:unclosed:ResourceWarning")  # wandb's own
def test_wandb_offline(tmp_path):
    Record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record  # noqa: N806 (a class)

    log_two_steps(tmp_path, backends=("wandb",))

    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(data) for data in leveldb_records(file.read_bytes())]
    history = [{"/".join(i.nested_key) or i.key: i.value_json for i in r.history.item} for r in records]
    steps = [(row["_step"], row["rollout/reward/mean"]) for row in history if "rollout/reward/mean" in row]
    assert steps == [("1", "0.1"), ("2", "0.2")]
    assert any('"lr":0.0006' in i.value_json for r in records for i in r.run.config.update if i.key == "train")

    log_two_steps(tmp_path, backends=("wandb",))  # a resumed run goes on under the same id
    ids = {folder.name.rpartition("-")[2] for folder in tmp_path.glob("wandb/offline-run-*")}
    assert ids == {(tmp_path / "wandb.run-id").read_text()}


def leveldb_records(data):
    """The records of a .wandb file, in LevelDB's log format: a header of 7 bytes, then blocks of 32 KiB."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:  # no record header fits: padding
            position += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        position += 7 + length
        parts += data[position - length : position]
        if kind in (1, 4):  # full, or the last part
            yield parts
            parts = b""


def test_wandb_online_without_a_key_is_an_error_not_a_question(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = TrackingConfig(backends=("wandb",), wandb_mode="online")

    with pytest.raises(TrackerError, match="wandb login"):
        open_trackers(config, tmp_path, {}, logging.warning)
