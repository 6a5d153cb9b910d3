"""One file a metrics backend, imported only when `tracking.backends` names it."""

from pathlib import Path


def run_id_file(folder: Path, backend: str) -> Path:
    """Where a run folder keeps what a backend calls the run: a resumed run goes on as the same one."""
    return folder / f"{backend}.run-id"
