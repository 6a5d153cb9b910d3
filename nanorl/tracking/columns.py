"""Which metrics a person watches, and how each is written: one list for live table, plain lines and curves."""

from collections.abc import Mapping
from typing import NamedTuple


class Column(NamedTuple):
    """One column of the step table."""

    title: str
    metric: str
    """`room/name[/stat]`; a step without it shows a dash."""
    spec: str
    """Format specification."""
    width: int
    """Characters, fixed, so that rows stay aligned whatever comes."""
    rank: int
    """What a narrow terminal drops first: the highest."""

    def text(self, metrics: Mapping[str, float]) -> str:
        """The value as shown, in fewer digits where it would be wider than the column; in none where it still is."""
        value = metrics.get(self.metric)
        if value is None:
            return "-"
        texts = [format(value, spec) for spec in (self.spec, ".1e", ".0e")]
        return next((text for text in texts if len(text) <= self.width), "#" * self.width)


STEP_COLUMNS = (
    Column("reward", "rollout/reward/mean", ".3f", 6, 0),
    Column("accuracy", "rollout/correct/mean", ".3f", 8, 1),
    Column("format", "rollout/format/mean", ".3f", 6, 5),
    Column("pg loss", "train/pg_loss", "+.4f", 7, 8),
    Column("clip", "train/clip_fraction", ".3f", 5, 10),
    Column("entropy", "train/entropy", ".3f", 7, 9),
    Column("grad", "train/grad_norm", ".3f", 6, 3),
    Column("mismatch", "train/mismatch/mean", ".1e", 8, 4),
    Column("drift", "train/drift/mean", ".1e", 7, 11),
    Column("sync ms", "sync/total_ms", ".1f", 7, 6),
    Column("tok/s", "rollout/tokens_per_s", ",.0f", 7, 7),
    Column("step s", "time/step_s", ".2f", 6, 2),
)

OVERLAP_COLUMNS = (
    Column("queue", "rollout/queue_depth", ".0f", 5, 13),
    Column("flight", "rollout/in_flight", ".0f", 6, 12),
    Column("stale", "rollout/staleness/mean", ".2f", 5, 1),
    Column("max", "rollout/staleness/max", ".0f", 3, 4),
    Column("again", "rollout/stale_recycled", ".0f", 5, 14),
    Column("drop", "rollout/stale_dropped", ".0f", 4, 14),
    Column("wait", "time/trainer_wait_share", ".0%", 5, 3),
    Column("idle", "time/engine_idle_share", ".0%", 5, 3),
)
"""What train-async shows besides."""

GAP = 2
"""Spaces between columns."""


def columns_of(metrics: Mapping[str, float]) -> tuple[Column, ...]:
    """The columns of a loop that logs these metrics."""
    return STEP_COLUMNS + OVERLAP_COLUMNS if OVERLAP_COLUMNS[0].metric in metrics else STEP_COLUMNS


def fitting(width: int, first: int, columns: tuple[Column, ...] = STEP_COLUMNS) -> tuple[Column, ...]:
    """The columns that fit into `width` characters beside a step column of `first`; the least important go first."""
    chosen = sorted(columns, key=lambda column: column.rank)
    while chosen and first + sum(column.width + GAP for column in chosen) > width:
        chosen.pop()
    return tuple(column for column in columns if column in chosen)
