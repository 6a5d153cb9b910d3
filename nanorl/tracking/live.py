"""The live view on a terminal: header, steps, a sparkline of the reward, and what is going on right now."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanorl.tracking.columns import STEP_COLUMNS, fitting
from nanorl.types import StepReport

SPARKS = "▁▂▃▄▅▆▇█"


class RichView:
    """A `View` drawn with Rich. The table keeps the newest steps that fit; all are in metrics.jsonl."""

    def __init__(self, console: Console | None = None) -> None:
        """`console` is for tests and exports; by default the terminal."""
        self.console = console or Console()
        self._reports: list[StepReport] = []
        self._steps = 0
        self._progress: tuple[str, int, int] | None = None
        self._live = Live(console=self.console, refresh_per_second=8, get_renderable=self.render, vertical_overflow="crop")

    def __enter__(self) -> Self:
        """Starts drawing."""
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Draws a last time and leaves the table on the screen."""
        self._progress = None
        self._live.stop()

    def header(self, facts: Mapping[str, str]) -> None:
        """A panel above everything."""
        text = Text("  ").join(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in facts.items())
        self.console.print(Panel(text, title="nanorl", title_align="left", border_style="cyan"))

    def note(self, text: str) -> None:
        """A line above the live part."""
        self.console.print(text, style="dim", markup=False, highlight=False)

    def progress(self, what: str, done: int, total: int) -> None:
        """The bar below the table."""
        self._progress = (what, done, total)

    def step(self, report: StepReport, steps: int) -> None:
        """A new row."""
        self._reports.append(report)
        self._steps = steps
        self._progress = None

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table that stays."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        if self._live.is_started:  # what was live stays above the table that sums it up
            self._progress = None
            self._live.stop()
        self.console.print(table)

    def render(self) -> RenderableType:
        """What is on the screen now."""
        parts: list[RenderableType] = []
        if self._reports:
            parts += [self._step_table(), self._sparkline()]
        if self._progress:
            parts.append(self._bar(*self._progress))
        return Group(*parts)

    def _step_table(self) -> Table:
        columns = fitting(STEP_COLUMNS, self.console.width)
        table = Table(border_style="dim", header_style="bold")
        table.add_column("step", justify="right")
        for column in columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        for report in self._reports[-max(4, self.console.height - 12) :]:
            table.add_row(f"{report.step}/{self._steps}", *(column.text(report.metrics) for column in columns))
        return table

    def _sparkline(self) -> Text:
        rewards = [r.metrics.get("rollout/reward/mean", 0.0) for r in self._reports][-(self.console.width - 20) :]
        low, high = min(rewards), max(rewards)
        scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
        return Text.assemble(
            ("reward ", "dim"), ("".join(SPARKS[int((r - low) * scale)] for r in rewards), "green"), f" {rewards[-1]:.3f}"
        )

    def _bar(self, what: str, done: int, total: int) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(what, ProgressBar(total=max(total, 1), completed=done, width=30, pulse=total == 0), f"{done}/{total}")
        return grid
