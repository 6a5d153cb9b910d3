"""The live view on a terminal: header, one row a step, and below them what is going on right now.

Rows are printed once and scroll away like any output; only the few lines below them are redrawn. So a run of any length
keeps every row, nothing has to fit on the screen, and a crash or Ctrl-C leaves whole lines behind.
"""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanorl.tracking.columns import GAP, columns_of, fitting
from nanorl.tracking.rollouts import Excerpt
from nanorl.tracking.view import LOG, Lanes, header_line, holds_numbers, step_line, table_text
from nanorl.types import StepReport

SPARKS = "▁▂▃▄▅▆▇█"

LANE_CELLS = {"": ("·", "dim"), "sample": ("█", "green"), "train": ("█", "cyan"), "sync": ("▒", "yellow")}
"""What a lane shows -> character and style."""


class RichView:
    """A `View` drawn with Rich; colors follow NO_COLOR, columns the terminal's width at each row."""

    def __init__(self, console: Console | None = None) -> None:
        """`console` is for tests and exports; by default the terminal."""
        self.console = console or Console(highlight=False)
        self._rewards: list[float] = []
        self._example: Excerpt | None = None
        self._lanes: Lanes = {}
        self._progress: tuple[str, int, int] | None = None
        self._status: Mapping[str, str] = {}
        self._since = time.monotonic()
        self._rows_below_titles = 0
        self._titles: tuple[str, ...] = ()
        self._live = self._new_live()

    def __enter__(self) -> Self:
        """Starts drawing."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draws a last time without the bar, and gives the cursor back."""
        self._stop()

    def header(self, facts: Mapping[str, str]) -> None:
        """A panel above everything; a line breaks between facts only."""
        LOG.info("%s", header_line(facts))
        lines = [Text()]
        for name, value in facts.items():
            fact = _facts({name: value})
            if lines[-1].cell_len and lines[-1].cell_len + 2 + fact.cell_len > self.console.width - 4:
                lines.append(Text())
            lines[-1] = lines[-1].append("  " if lines[-1].cell_len else "").append_text(fact)
        text = Text("\n").join(lines)
        text.overflow = "fold"
        self.console.print(Panel(text, title="nanorl", title_align="left", border_style="cyan", box=box.ROUNDED))

    def note(self, text: str) -> None:
        """A line above the live part."""
        LOG.info("%s", text)
        self.console.print(Text(printable(text), style="yellow" if text.startswith("warning") else "dim"))

    def progress(self, what: str, done: int, total: int) -> None:
        """The bar."""
        if not self._progress or self._progress[0] != what:
            self._since = time.monotonic()
        self._progress = (what, done, total)
        self._resume()

    def status(self, facts: Mapping[str, str]) -> None:
        """A table of one row in the bar's place."""
        self._progress, self._status = None, facts
        self._resume()

    def sample(self, example: Excerpt | None) -> None:
        """Two lines above the bar."""
        self._example = example

    def lanes(self, lanes: Lanes) -> None:
        """One line a lane above the bar, on one scale of time."""
        self._lanes = lanes

    def step(self, report: StepReport, steps: int) -> None:
        """A new row, under titles that come again once a screenful."""
        LOG.info("%s", step_line(report, steps))
        self._progress = None
        self._rewards.append(report.metrics.get("rollout/reward/mean", 0.0))
        first = max(len(f"{steps}/{steps}"), len("step"))
        columns = fitting(self.console.width, first, columns_of(report.metrics))
        titles = ("step".rjust(first), *(column.title.rjust(column.width) for column in columns))
        if titles != self._titles or self._rows_below_titles >= self.console.height - 8:
            self._titles, self._rows_below_titles = titles, 0
            self._row(titles, "bold cyan")
        self._rows_below_titles += 1
        self._row(
            (f"{report.step}/{steps}".rjust(first), *(c.text(report.metrics).rjust(c.width) for c in columns)), ""
        )

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table that stays, below everything so far."""
        LOG.info("%s", table_text(title, columns, rows))
        table = Table(box=box.ROUNDED, border_style="dim")
        for i, column in enumerate(columns):
            is_name = i == 0 and all(" " not in row[0] for row in rows)  # cut in the middle it would be another name
            table.add_column(Text(column), justify="right" if holds_numbers(rows, i) else "left", no_wrap=is_name)
        for row in rows:
            table.add_row(*map(Text, row))
        self._stop()
        self._rewards, self._example, self._lanes = (
            [],
            None,
            {},
        )  # they stay above the table; what comes next starts afresh
        self.console.print(Text(title, style="bold"))
        self.console.print(table)

    def render(self) -> RenderableType:
        """The lines that are redrawn."""
        parts: list[RenderableType] = []
        if self._rewards:
            parts.append(self._sparkline())
        if self._example:
            parts += self._example_lines(self._example)
        parts += lane_lines(self._lanes, max(8, self.console.width - 26))
        if self._progress:
            parts.append(self._bar(*self._progress))
        if self._status:
            parts.append(_status_table(self._status))
        return Group(*parts)

    def _new_live(self) -> Live:
        return Live(console=self.console, refresh_per_second=8, get_renderable=self.render)

    def _resume(self) -> None:
        if not self._live.is_started:  # a table has ended the former live part
            self._live = self._new_live()
            self._live.start()

    def _stop(self) -> None:
        self._progress = None
        self._live.stop()

    def _row(self, cells: Sequence[str], style: str) -> None:
        self.console.print(Text((" " * GAP).join(cells), style=style), no_wrap=True, overflow="crop")

    def _sparkline(self) -> Text:
        rewards = self._rewards[-max(8, self.console.width - 26) :]
        low, high = min(rewards), max(rewards)
        scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
        bars = "".join(SPARKS[round((reward - low) * scale)] for reward in rewards)
        text = Text(no_wrap=True, overflow="crop")
        return text.append("reward  ", "dim").append(bars, "green").append(f"  {low:.3f} to {high:.3f}", "dim")

    def _example_lines(self, example: Excerpt) -> list[Text]:
        """`prompt  ...` and `0.200  ...`, each cut to the width."""
        reward = "-" if example.reward is None else f"{example.reward:.3f}"
        rows = (("prompt", "dim", example.prompt), (reward, "bold", example.response))
        return [
            Text(no_wrap=True, overflow="ellipsis").append(name.ljust(8), style).append(one_line(text))
            for name, style, text in rows
        ]

    def _bar(self, what: str, done: int, total: int) -> Table:
        grid = Table.grid(padding=(0, 1))
        elapsed = f"{time.monotonic() - self._since:.0f} s"
        count = f"{done}/{total}" if total else ""
        width = min(30, max(4, self.console.width - len(what) - len(count) - len(elapsed) - 4))
        bar = ProgressBar(total=max(total, 1), completed=done, width=width, pulse=total == 0)
        grid.add_row(Text(what, no_wrap=True), bar, Text(count), Text(elapsed, style="dim"))
        return grid


def _status_table(facts: Mapping[str, str]) -> Table:
    table = Table(box=box.ROUNDED, border_style="dim")
    for name in facts:
        table.add_column(Text(name, style="dim"), justify="right")
    table.add_row(*(Text(printable(value), style="bold") for value in facts.values()))
    return table


def _facts(facts: Mapping[str, str]) -> Text:
    parts = [Text.assemble((f"{name} ", "dim"), (printable(value), "bold")) for name, value in facts.items()]
    return Text("  ").join(parts)


def lane_lines(lanes: Lanes, width: int) -> list[Text]:
    """`engine   ████··████  4.2 s` and so on: what filled most of each character's time, a dot where nothing did."""
    spans = [span for lane in lanes.values() for _, span in lane]
    if not spans:
        return []
    start, end = min(a for a, _ in spans), max(b for _, b in spans)
    step = max((end - start) / width, 1e-9)
    lines: list[Text] = []
    for name, lane in lanes.items():
        cells = [_busiest(lane, start + i * step, start + (i + 1) * step) for i in range(width)]
        line = Text(no_wrap=True, overflow="crop").append(name.ljust(9), "dim")
        for what in cells:
            line.append(*LANE_CELLS[what])
        lines.append(line.append(f"  {end - start:.1f} s", "dim"))
    return lines


def _busiest(lane: Sequence[tuple[str, tuple[float, float]]], start: float, end: float) -> str:
    """What took the most of [start, end); nothing where it took less than half."""
    shares = {"": (end - start) / 2}
    for what, (a, b) in lane:
        shares[what] = shares.get(what, 0.0) + max(0.0, min(b, end) - max(a, start))
    return max(shares, key=lambda what: shares[what])


def printable(text: str) -> str:
    """The text without what could move the cursor: a model may write any escape sequence."""
    return "".join(char if char.isprintable() or char == "\n" else "·" for char in text)


def one_line(text: str) -> str:
    """Printable, with line breaks shown as a sign."""
    return printable(text.strip()).replace("\n", "⏎")
