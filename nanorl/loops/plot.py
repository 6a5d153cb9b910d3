"""`nanorl plot`: the curves of one run, or of several over each other, as a PNG."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from nanorl.errors import CheckpointError, ConfigError
from nanorl.tracking.columns import STEP_COLUMNS, Column
from nanorl.tracking.metrics_file import read_metrics
from nanorl.tracking.run_folder import find_run
from nanorl.types import StepReport

PANELS_A_ROW = 4


def plot(runs: Sequence[str], out: Path | None = None) -> Path:
    """Draws one panel for each column of the step table, one line a run.

    Args:
        runs: run folders, names of runs in `runs/`, or `latest`.
        out: the PNG; None: `curves.png` in the first run's folder.

    Returns:
        Where the PNG is.

    Raises:
        CheckpointError: a run isn't there, has no finished step, or the PNG can't be written.
        ConfigError: matplotlib isn't installed.
    """
    folders = [find_run(run) for run in runs]
    reports = [read_metrics(folder.metrics) for folder in folders]
    for folder, steps in zip(folders, reports, strict=True):
        if not steps:
            raise CheckpointError(f"The run {folder.path} has no finished step yet: nothing to plot.")
    target = out or folders[0].path / "curves.png"
    try:
        _draw([folder.path.resolve().name for folder in folders], reports, target)
    except ImportError:
        raise ConfigError("Plots need matplotlib: install nanorl with the extra `plot`.") from None
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib can't write
        raise CheckpointError(f"Can't write {target}: {error}") from None
    return target


def _draw(names: Sequence[str], reports: Sequence[Sequence[StepReport]], target: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    columns = [c for c in STEP_COLUMNS if any(c.metric in report.metrics for run in reports for report in run)]
    rows = max(1, ceil(len(columns) / PANELS_A_ROW))
    figure = Figure(figsize=(3.4 * PANELS_A_ROW, 2.5 * rows + 0.5), dpi=120, layout="constrained")
    panels = figure.subplots(rows, PANELS_A_ROW, squeeze=False).flat
    for panel, column in zip(panels, columns, strict=False):
        for run in reports:
            points = [(report.step, report.metrics[column.metric]) for report in run if column.metric in report.metrics]
            panel.plot(
                [step for step, _ in points], [value for _, value in points], marker="." if len(points) < 30 else ""
            )
        panel.set_title(f"{column.title}  ({column.metric})", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
        if _is_log(column, reports):
            panel.set_yscale("log")
    for panel in list(figure.axes)[len(columns) :]:
        panel.set_visible(False)
    if len(names) == 1:
        figure.suptitle(names[0], fontsize=10)
    else:
        figure.legend(
            figure.axes[0].get_lines(), names, loc="outside upper center", ncols=min(len(names), 4), fontsize=8
        )
    figure.savefig(target)


def _is_log(column: Column, reports: Sequence[Sequence[StepReport]]) -> bool:
    """Logprob differences span decades; a log axis needs values above 0."""
    values = [report.metrics.get(column.metric, 1.0) for run in reports for report in run]
    return column.title in ("mismatch", "drift") and min(values) > 0
