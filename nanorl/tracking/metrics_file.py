"""metrics.jsonl: one JSON object a step, the record that everything else about a run's numbers is drawn from."""

import logging
from pathlib import Path

import msgspec

from nanorl.errors import CheckpointError
from nanorl.tracking.run_folder import write_atomically
from nanorl.types import StepReport


class JsonlTracker:
    """metrics.jsonl: one object a step, written at once, so that a killed run keeps every finished step.

    What the disk didn't take stays in memory and goes out with the next step. Numbers that are not finite are `null`.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        """Appends to `path`."""
        self._file = path.open("ab", buffering=0)
        self._pending = b""

    def log(self, report: StepReport) -> None:
        """Writes one line. Raises: OSError where the disk refuses; nothing is lost by that yet."""
        line = {"step": report.step, "weight_version": report.weight_version, **report.metrics}
        self._pending += msgspec.json.encode(line) + b"\n"
        self._flush()

    def close(self) -> None:
        """Tries once more, then closes the file."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        while self._pending:
            self._pending = self._pending[self._file.write(self._pending) :]


def read_metrics(path: Path) -> list[StepReport]:
    """The steps of a metrics.jsonl. A torn last line, which a killed run leaves, is left out.

    Raises:
        CheckpointError: there is no such file, or another line is damaged.
    """
    try:
        *lines, last = path.read_bytes().split(b"\n")  # whole lines end with a newline: `last` is empty or torn
    except OSError as error:
        raise CheckpointError(f"Expected the metrics of a run at {path}: {error.strerror}.") from None
    if last:
        logging.getLogger(__name__).warning(
            "%s ends in the middle of a line: a killed run; that step is left out", path
        )
    reports: list[StepReport] = []
    for number, line in enumerate(lines, 1):
        try:
            values = msgspec.json.decode(line, type=dict[str, float | None])
            step, version = int(values.pop("step") or 0), int(values.pop("weight_version") or 0)
        except (msgspec.DecodeError, KeyError) as error:
            raise CheckpointError(
                f"{path}, line {number}: expected the metrics of one step as a JSON object: {error}."
            ) from None
        metrics = {name: value for name, value in values.items() if value is not None}
        reports.append(StepReport(step=step, weight_version=version, metrics=metrics))
    return reports


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drops what came after `last_step`, and a torn last line: what a run does that goes on from a checkpoint.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    reports = read_metrics(path)
    lines = path.read_bytes().split(b"\n")
    kept = [line + b"\n" for report, line in zip(reports, lines, strict=False) if report.step <= last_step]
    write_atomically(path, b"".join(kept))
