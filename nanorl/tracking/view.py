"""What a person sees of a command: plain lines where the output is no terminal, a live Rich view where it is."""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from nanorl.tracking.columns import columns_of
from nanorl.tracking.rollouts import Excerpt
from nanorl.types import StepReport

LOG = logging.getLogger("nanorl")
"""Whatever a view shows is logged too: a run folder's run.log listens here."""

SILENCE_S = 10.0
"""After so long without a line a plain view shows progress."""


Lanes = Mapping[str, Sequence[tuple[str, tuple[float, float]]]]
"""Lane -> (what was done, (from, to)) in seconds, in order of time."""


class View(Protocol):
    """One command's output, used as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def header(self, facts: Mapping[str, str]) -> None:
        """Which model, engine, device, dtype and run folder were taken."""
        ...

    def note(self, text: str) -> None:
        """One line that stays."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """How far something long is; replaces the former one. A total of 0: nobody knows."""
        ...

    def status(self, facts: Mapping[str, str]) -> None:
        """How something endless stands, a server for one; replaces the former status and any progress."""
        ...

    def sample(self, example: Excerpt | None) -> None:
        """What the policy wrote last."""
        ...

    def lanes(self, lanes: Lanes) -> None:
        """Who was at work when, over the last steps."""
        ...

    def step(self, report: StepReport, steps: int) -> None:
        """A finished step."""
        ...

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A finished table."""
        ...


class PlainView:
    """One line a fact and a step, for logs and pipes; progress only where nothing else was said for a while."""

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet` leaves only tables, and notes that begin with `warning`."""
        self.quiet = quiet
        self._last_line = time.monotonic()
        self._last_status, self._status_at = "", -SILENCE_S

    def __enter__(self) -> Self:
        """Nothing to open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def header(self, facts: Mapping[str, str]) -> None:
        """`nanorl  model=tiny  engine=...`."""
        self._line(header_line(facts))

    def note(self, text: str) -> None:
        """The line itself."""
        self._line(text, shown=not self.quiet or text.startswith("warning"))

    def progress(self, what: str, done: int, total: int) -> None:
        """A sign of life every ten seconds: short steps stay one line each."""
        if not self.quiet and total and time.monotonic() - self._last_line > SILENCE_S:
            self._print(f"{what} {done}/{total}")

    def status(self, facts: Mapping[str, str]) -> None:
        """A line where something changed, every ten seconds at most: a log has no use for the same one each second."""
        line = "  ".join(f"{name} {value}" for name, value in facts.items())
        if not self.quiet and line != self._last_status and time.monotonic() - self._status_at > SILENCE_S:
            self._last_status, self._status_at = line, time.monotonic()
            self._print(line)

    def sample(self, example: Excerpt | None) -> None:
        """Nothing: one line a step; the run folder has every sample."""

    def lanes(self, lanes: Lanes) -> None:
        """Nothing: the shares of idle time are metrics."""

    def step(self, report: StepReport, steps: int) -> None:
        """`step 3/6  reward 0.812  ...`."""
        self._line(step_line(report, steps))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Aligned columns without borders."""
        self._line(table_text(title, columns, rows), shown=True)

    def _line(self, text: str, *, shown: bool | None = None) -> None:
        LOG.info("%s", text)
        if not self.quiet if shown is None else shown:
            self._print(text)

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(text, flush=True)  # noqa: T201 the one place that prints


def make_view(*, quiet: bool = False) -> View:
    """A live view on a terminal that can draw one, plain lines elsewhere or with `quiet`."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    if quiet or not sys.stdout.isatty() or not is_utf8 or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return PlainView(quiet=quiet)
    from nanorl.tracking.live import RichView  # only a terminal pays for it

    return RichView()


def header_line(facts: Mapping[str, str]) -> str:
    """The header on one line."""
    return "nanorl  " + "  ".join(f"{name}={value}" for name, value in facts.items())


def step_line(report: StepReport, steps: int) -> str:
    """A step on one line, every column of it."""
    values = "  ".join(f"{column.title} {column.text(report.metrics)}" for column in columns_of(report.metrics))
    return f"step {report.step}/{steps}  {values}"


def table_text(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as aligned text: words to the left, numbers to the right."""
    cells = [list(columns), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    align = [str.rjust if holds_numbers(rows, i) else str.ljust for i in range(len(columns))]
    lines = ["  ".join(put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)) for row in cells]
    return "\n".join([title, *map(str.rstrip, lines)])


def holds_numbers(rows: Sequence[Sequence[str]], column: int) -> bool:
    """Whether a column belongs to the right: not the first, with more digits than letters, no lists of numbers."""
    cells = [row[column] for row in rows]
    text = "".join(cells)
    is_list = any(len(cell.split()) > 3 for cell in cells)  # `0 / 5` is none
    return column > 0 and not is_list and sum(map(str.isalpha, text)) <= sum(map(str.isdigit, text))
