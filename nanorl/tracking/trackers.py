"""Where a run's numbers go: a small protocol, and the JSON Lines file that is always written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nanorl.types import StepReport


class Tracker(Protocol):
    """A sink of step reports."""

    def log(self, report: StepReport) -> None:
        """Called once a step, from the main thread."""
        ...

    def close(self) -> None:
        """Called once, at the end, also after an error."""
        ...


class JsonlTracker:
    """metrics.jsonl: one object a step, flushed at once, so that a killed run keeps every finished step."""

    def __init__(self, path: Path) -> None:
        """Appends to `path`."""
        self._file = path.open("a", encoding="utf-8")

    def log(self, report: StepReport) -> None:
        """Writes one line."""
        line = {"step": report.step, "weight_version": report.weight_version, **report.metrics}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, report: StepReport) -> None:
        """Hands the report to each."""
        for tracker in self._trackers:
            tracker.log(report)

    def close(self) -> None:
        """Closes each."""
        for tracker in self._trackers:
            tracker.close()
