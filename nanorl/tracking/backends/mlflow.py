"""MLflow: into files in the run folder, or to a tracking server."""

# pyright: standard, reportMissingImports=false
# The package is an extra.

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanorl.tracking.backends import run_id_file
from nanorl.types import StepReport

# MLflow 3 refuses plain files unless told that they are meant. They need no database and lie in the run folder.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

PARAMS_A_REQUEST = 100
"""MLflow's limit."""


class MlflowTracker:
    """One MLflow run for a run folder, also over a resume, with the first configuration as its parameters."""

    name = "mlflow"

    def __init__(self, uri: str, experiment: str, folder: Path, settings: Mapping[str, Any]) -> None:
        """`uri` is a folder or a server's address; `folder`, the run's, gives the name and keeps the id."""
        self._client = MlflowClient(tracking_uri=uri)
        id_file = run_id_file(folder, self.name)
        if id_file.exists():
            self._run_id = id_file.read_text(encoding="ascii")
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        self._run_id = self._client.create_run(experiment_id, run_name=folder.name).info.run_id
        params = [Param(key, value) for key, value in _flat(settings)]
        for start in range(0, len(params), PARAMS_A_REQUEST):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_A_REQUEST])
        id_file.write_text(self._run_id, encoding="ascii")

    def log(self, report: StepReport) -> None:
        """One batch of metrics a step."""
        now = int(time.time() * 1000)
        metrics = [Metric(_allowed(name), value, now, report.step) for name, value in report.metrics.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._run_id)


def _allowed(name: str) -> str:
    """The name in the letters that MLflow takes."""
    return re.sub(r"[^\w\-./ :]", "_", name)


def _flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """`section.key`, value pairs."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield f"{path}{key}", str(value)
