"""Scalars as TensorBoard event files, written without torch: `tensorboard --logdir RUN/tensorboard`."""

# pyright: standard, reportMissingImports=false, reportAttributeAccessIssue=false
# The package is an extra, and its messages have no types.

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from nanorl.types import StepReport


class TensorBoardTracker:
    """One scalar a metric, under the metric's own name: TensorBoard groups by the part before the slash."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        """Event files go into `folder`; a resumed run adds one."""
        self._writer = EventFileWriter(str(folder))

    def log(self, report: StepReport) -> None:
        """Writes the step through to the disk."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in report.metrics.items()]
        self._writer.add_event(Event(step=report.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
