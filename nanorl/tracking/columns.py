"""Which metrics a person watches, and how each is written: one list for the live table, the plain lines and the summary."""

from collections.abc import Mapping
from typing import NamedTuple


class Column(NamedTuple):
    """One column of the step table."""

    title: str
    metric: str
    """`room/name[/stat]`; a step without it shows a dash."""
    spec: str
    """Format specification."""
    rank: int
    """What a narrow terminal drops first: the highest."""

    def text(self, metrics: Mapping[str, float]) -> str:
        """The value as shown."""
        value = metrics.get(self.metric)
        return "-" if value is None else format(value, self.spec)


STEP_COLUMNS = (
    Column("reward", "rollout/reward/mean", ".3f", 0),
    Column("accuracy", "rollout/correct/mean", ".3f", 0),
    Column("format", "rollout/format/mean", ".3f", 1),
    Column("pg loss", "train/pg_loss", "+.4f", 3),
    Column("clip", "train/clip_fraction", ".3f", 5),
    Column("entropy", "train/entropy", ".3f", 4),
    Column("grad", "train/grad_norm", ".3f", 1),
    Column("mismatch", "train/mismatch/mean", ".1e", 2),
    Column("drift", "train/drift/mean", ".1e", 6),
    Column("sync ms", "sync/total_ms", ".1f", 1),
    Column("tok/s", "rollout/tokens_per_s", ",.0f", 3),
    Column("step s", "time/step_s", ".2f", 1),
)


def fitting(columns: tuple[Column, ...], width: int, first: int = 7) -> tuple[Column, ...]:
    """The columns that fit into `width` characters, least important dropped first, order kept.

    `first` is the width of the step column; each other takes its title or 8 characters, and three for its borders.
    """
    chosen = sorted(columns, key=lambda c: c.rank)
    while chosen and first + sum(max(len(c.title), 6) + 3 for c in chosen) + 1 > width:
        chosen.pop()
    return tuple(c for c in columns if c in chosen)
