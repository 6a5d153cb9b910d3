"""Where a run's numbers go: metrics.jsonl always, other backends on request, none of them able to stop a run."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nanorl.config import TrackingConfig
from nanorl.errors import TrackerError
from nanorl.tracking.background import Background, Warn
from nanorl.tracking.metrics_file import JsonlTracker
from nanorl.types import StepReport

MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "prometheus": "prometheus_client"}
"""Backend, which is also the name of its extra -> the module it needs."""


LOG = logging.getLogger(__name__)


class Tracker(Protocol):
    """A sink of step reports."""

    @property
    def name(self) -> str:
        """What a warning calls it."""
        ...

    def log(self, report: StepReport) -> None:
        """Called once a step, in order."""
        ...

    def close(self) -> None:
        """Called once, at the end, also after an error."""
        ...


class BackgroundTracker:
    """A tracker on a thread of its own: one that hangs or fails costs its own numbers only."""

    def __init__(self, tracker: Tracker, warn: Warn) -> None:
        self.name = tracker.name
        self._worker = Background(tracker.name, tracker.log, warn, patience_s=0.0, at_end=tracker.close)

    def log(self, report: StepReport) -> None:
        """Queues the report; drops it where 16 are waiting already."""
        self._worker.put(report)

    def close(self) -> None:
        """Waits a minute at most."""
        self._worker.close()


class Trackers:
    """Several trackers as one that never raises: a failure is shown once a tracker, and counted."""

    def __init__(self, trackers: Sequence[Tracker], warn: Warn = LOG.warning) -> None:
        self._trackers = list(trackers)
        self._warn = warn
        self.num_failures: dict[str, int] = {}
        """Tracker -> how often it raised."""

    def log(self, report: StepReport) -> None:
        """Hands the report to each."""
        for tracker in self._trackers:
            try:
                tracker.log(report)
            except Exception as error:  # noqa: BLE001 the boundary: no tracker stops training
                self._failed(tracker, error)

    def close(self) -> None:
        """Closes each; may be called twice."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 the same boundary
                self.num_failures.pop(tracker.name, None)  # worth a second line: this time it is lost for good
                self._failed(tracker, error)

    def _failed(self, tracker: Tracker, error: Exception) -> None:
        self.num_failures[tracker.name] = self.num_failures.get(tracker.name, 0) + 1
        if self.num_failures[tracker.name] == 1:
            self._warn(f"warning: {tracker.name} failed, training goes on: {type(error).__name__}: {error}")


def require_backends(config: TrackingConfig) -> None:
    """Looks for the packages of the backends that were asked for, without importing them.

    Raises:
        TrackerError: one is not installed.
    """
    for name in config.backends:
        if importlib.util.find_spec(MODULES[name]) is None:
            raise TrackerError(
                f"tracking.backends has {name!r}, but the package {MODULES[name]!r} is not installed. "
                f"Install nanorl with the extra `{name}`, or leave the backend out."
            )


def open_trackers(config: TrackingConfig, folder: Path, settings: Mapping[str, Any], warn: Warn) -> Trackers:
    """metrics.jsonl in the run folder, and each backend of `config`.

    Args:
        config: which backends, and their options.
        folder: the run folder; its name names the run.
        settings: the run's resolved configuration, nested, for backends that show it.
        warn: shows a line to the person at the terminal.

    Raises:
        TrackerError: a backend isn't installed or can't be started.
    """
    require_backends(config)
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl")]
    for name in dict.fromkeys(config.backends):
        try:
            backend = _open(name, config, folder, settings)
        except Exception as error:  # the boundary: third-party code raises whatever it likes
            Trackers(trackers, warn).close()
            raise TrackerError(
                f"The tracker {name} can't be started: {error}. Fix it, or leave it out of tracking.backends."
            ) from error
        trackers.append(BackgroundTracker(backend, warn))
    return Trackers(trackers, warn)


def _open(name: str, config: TrackingConfig, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    """Imports one backend and starts it."""
    match name:
        case "tensorboard":
            from nanorl.tracking.backends.tensorboard import TensorBoardTracker

            return TensorBoardTracker(folder / "tensorboard")
        case "wandb":
            from nanorl.tracking.backends.wandb import WandbTracker

            return WandbTracker(folder, config.project, config.wandb_mode, settings)
        case "mlflow":
            from nanorl.tracking.backends.mlflow import MlflowTracker

            return MlflowTracker(config.mlflow_uri or str(folder / "mlruns"), config.project, folder, settings)
        case _:
            from nanorl.tracking.backends.prometheus import PrometheusTracker

            return PrometheusTracker(config.prometheus_port, folder.name)
