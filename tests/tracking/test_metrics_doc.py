"""docs/metrics.md is complete: no metric is logged that it doesn't explain."""

import re
from pathlib import Path

from nanorl.tracking.columns import OVERLAP_COLUMNS, STEP_COLUMNS
from nanorl.weight_sync.base import SyncReport

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def logged_names():
    """Every name in the sources that looks like a metric's, `{...}` of an f-string as `<...>`."""
    for path in (ROOT / "nanorl").rglob("*.py"):
        if path.parent.name == "tracking":
            continue  # what is shown proves nothing about what is logged
        yield from re.findall(r'"((?:rollout|train|time|engine)/[\w/{}]+)"', path.read_text(encoding="utf-8"))
    parts = ("version", "num_bytes", "num_tensors", "copy_ms", "serialize_ms", "pause_ms", "begin_ms", "send_ms")
    report = SyncReport(**dict.fromkeys((*parts, "end_ms", "flush_ms", "continue_ms", "verify_ms"), 1))
    yield from report.metrics()


def test_every_metric_is_explained():
    names = set(logged_names())

    assert len(names) > 30
    fixed = {name for name in names if "{" not in name}
    assert {name for name in fixed if f"`{name}`" not in DOCUMENT} == set()
    assert {name.split("{")[0] for name in names - fixed} == {
        "rollout/",
        "rollout/failed/",
        "rollout/staleness/groups_",
    }
    assert "`rollout/<part>/mean`" in DOCUMENT
    assert "`rollout/failed/<cause>`" in DOCUMENT
    assert "`rollout/staleness/groups_<k>`" in DOCUMENT


def test_every_column_is_a_metric():
    assert {column.metric for column in STEP_COLUMNS + OVERLAP_COLUMNS} <= set(logged_names())
