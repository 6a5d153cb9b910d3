"""What a person sees of a command: plain lines where the output is no terminal, a live Rich view where it is."""

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from nanorl.tracking.columns import STEP_COLUMNS
from nanorl.types import StepReport


class View(Protocol):
    """One command's output, used as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def header(self, facts: Mapping[str, str]) -> None:
        """Which model, engine, device, dtype and run folder were taken."""
        ...

    def note(self, text: str) -> None:
        """One line that stays."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """How far something long is; replaces the former one."""
        ...

    def step(self, report: StepReport, steps: int) -> None:
        """A finished step."""
        ...

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A finished table."""
        ...


class PlainView:
    """One line a fact and a step, for logs and pipes; progress only when it begins and in quarters."""

    def __init__(self, *, quiet: bool = False) -> None:
        """`quiet` leaves only tables and warnings' text: no header, no progress, no steps."""
        self.quiet = quiet
        self._last: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        """Nothing to open."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to close."""

    def header(self, facts: Mapping[str, str]) -> None:
        """`nanorl  model=tiny  engine=...`."""
        self._line("nanorl  " + "  ".join(f"{name}={value}" for name, value in facts.items()))

    def note(self, text: str) -> None:
        """The line itself."""
        self._line(text)

    def progress(self, what: str, done: int, total: int) -> None:
        """A line at the start, then one a quarter, for what takes more than a few units."""
        quarter = 4 * done // total if total else 0
        if total >= 100 and self._last != (what, quarter) and done < total:
            self._last = (what, quarter)
            self._line(f"{what} {done}/{total}")

    def step(self, report: StepReport, steps: int) -> None:
        """`step 3/6  reward 0.812  ...`."""
        values = "  ".join(f"{column.title} {column.text(report.metrics)}" for column in STEP_COLUMNS)
        self._line(f"step {report.step}/{steps}  {values}")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Aligned columns without borders."""
        cells = [list(columns), *[list(row) for row in rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        text = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells)
        print(f"{title}\n{text}", flush=True)

    def _line(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)


def make_view(*, quiet: bool = False) -> View:
    """A live view on a terminal, plain lines elsewhere or with `quiet`."""
    if quiet or not sys.stdout.isatty():
        return PlainView(quiet=quiet)
    from nanorl.tracking.live import RichView  # only a terminal pays for it

    return RichView()
