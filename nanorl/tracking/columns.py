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

GAP = 2
"""Spaces between columns."""


def fitting(width: int, first: int) -> tuple[Column, ...]:
    """The columns that fit into `width` characters beside a step column of `first`; the least important go first."""
    chosen = sorted(STEP_COLUMNS, key=lambda column: column.rank)
    while chosen and first + sum(column.width + GAP for column in chosen) > width:
        chosen.pop()
    return tuple(column for column in STEP_COLUMNS if column in chosen)
