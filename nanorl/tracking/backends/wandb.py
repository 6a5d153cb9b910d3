"""Weights & Biases, offline unless asked: `wandb sync RUN/wandb/offline-run-*` sends an offline run later."""

# pyright: standard, reportMissingImports=false
# The package is an extra.

import importlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nanorl.errors import TrackerError
from nanorl.tracking.backends import run_id_file
from nanorl.types import StepReport

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # before the import: an offline run sends nothing anywhere
wandb: Any = importlib.import_module("wandb")


class WandbTracker:
    """One W&B run for a run folder, also over a resume. It gets numbers and settings: no code, no console output."""

    name = "wandb"

    def __init__(
        self, folder: Path, project: str, mode: Literal["online", "offline"], settings: Mapping[str, Any]
    ) -> None:
        """Raises: TrackerError for the online mode without an API key, which wandb would ask for at the terminal."""
        if mode == "online" and not wandb.api.api_key:
            raise TrackerError("wandb_mode=online needs an API key: run `wandb login` once, or set WANDB_API_KEY")
        id_file = run_id_file(folder, self.name)
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="ascii")
        self._run = wandb.init(
            id=id_file.read_text(encoding="ascii"),
            resume="allow" if mode == "online" else None,  # `wandb sync` joins offline runs of one id
            project=project,
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )

    def log(self, report: StepReport) -> None:
        """One history row."""
        self._run.log({**report.metrics, "weight_version": report.weight_version}, step=report.step)

    def close(self) -> None:
        """Finishes the run; online this waits for the upload."""
        self._run.finish()
