"""What a person reads of a probe: five tables of 80 columns and a verdict."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest

from rich.cells import cell_len, set_cell_size

from nanorl.loops.probe_checks import ProbeResult
from nanorl.tokens.drift import DriftReport, RoundTrip
from nanorl.tokens.probe import Finding, Harm, TemplateReport
from nanorl.tracking.view import View

NUM_EXAMPLES = 3
WIDTH = 22
"""Cells of an example's column."""

KINDS = ("growth", "prompt", "turn")
HARM = {Harm.NONE: "harmless", Harm.SEVERAL_TURNS: "several turns", Harm.EVERYTHING: "everything"}


def show(result: ProbeResult, view: View) -> None:
    """All tables, the verdict last."""
    view.table(
        "Drift: would the ids survive decoding and encoding? (nanorl never re-encodes)",
        ("sequences", "number", "drift", "share", "text lost too"),
        [_drift_row(report) for report in result.drift],
    )
    examples = _examples(result.drift)
    if examples:
        columns = ("sampled ids", "text", "re-encoded ids")
        view.table("Drifted sequences, from the shortest of each kind", columns, [_example_row(e) for e in examples])
    view.table(
        "Slices and engine",
        ("check", "tried", "wrong"),
        [(check.statement, str(check.num_checked), str(len(check.faults))) for check in result.checks],
    )
    for fault in [fault for check in result.checks for fault in check.faults][:NUM_EXAMPLES]:
        view.note(f"  wrong: {fault}")
    _show_template(result.template, view)
    view.table("Verdict", ("training on", "verdict", "because"), _wrapped(_verdict_rows(result), (13, 7, 50)))


def _drift_row(report: DriftReport) -> Sequence[str]:
    num_drifted = len(report.drifted)
    return report.kind, str(report.num_sequences), str(num_drifted), f"{report.share:.1%}", str(report.num_text_lost)


def _examples(reports: Iterable[DriftReport]) -> list[RoundTrip]:
    """Three in all, one of each kind first: the model's own where there are any."""
    ranked = [(rank, example) for report in reports for rank, example in enumerate(report.examples)]
    return [example for _, example in sorted(ranked, key=lambda pair: pair[0])][:NUM_EXAMPLES]


def _example_row(trip: RoundTrip) -> Sequence[str]:
    """Both lists from just before the first difference on."""
    pairs = zip(trip.token_ids, trip.reencoded_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    return _ids(trip.token_ids, first), _cut(repr(trip.text)), _ids(trip.reencoded_ids, first)


def _ids(token_ids: Sequence[int], first: int) -> str:
    """As many whole ids as fit: half of one would be another."""
    start = max(0, first - 1) if len(token_ids) > 4 else 0
    text = ("… " if start else "") + " ".join(map(str, token_ids[start:]))
    return text if len(text) <= WIDTH else text[: WIDTH - 1].rpartition(" ")[0] + " …"


def _cut(text: str) -> str:
    return text if cell_len(text) <= WIDTH else set_cell_size(text, WIDTH - 1).rstrip() + "…"


def _show_template(report: TemplateReport, view: View) -> None:
    view.table(
        "Template: renderings that are no prefix of the longer one / compared",
        ("conversation", "messages", "k, k+1", "prompt", "prompt + turn"),
        [
            (
                each.conversation.name,
                str(len(each.conversation.messages)),
                *(_share(each.count(kind)) for kind in KINDS),
            )
            for each in report.conversations
        ],
    )
    if report.findings:
        rows = [_cause_row(group) for group in _by_cause(report.findings)]
        view.table("Causes", ("cause", "where first", "forbids"), _wrapped(rows, (31, 26, 13)))


def _share(counts: tuple[int, int]) -> str:
    return f"{counts[0]} / {counts[1]}"


def _by_cause(findings: Sequence[Finding]) -> list[list[Finding]]:
    """The worst first; of one cause the worst place first."""
    ranked = sorted(findings, key=lambda finding: (finding.cause, -finding.harm))
    groups = [list(group) for _, group in groupby(ranked, lambda finding: finding.cause)]
    return sorted(groups, key=lambda group: -group[0].harm)


def _cause_row(findings: Sequence[Finding]) -> Sequence[str]:
    """The first place, and how many conversations show the same."""
    first = findings[0]
    place = [first.conversation or "every prompt"]
    if first.turn is not None:
        place.append(f"message {first.turn}")
    if first.token is not None:
        place.append(f"token {first.token}")
    others = len({finding.conversation for finding in findings}) - 1
    return first.cause, ", ".join(place) + (f" (and {others} more)" if others else ""), HARM[first.harm]


def _wrapped(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[Sequence[str]]:
    """Long cells go on in rows below: plain output has no other way to stay within 80 columns."""
    wrapped: list[Sequence[str]] = []
    for row in rows:
        lines = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)]
        wrapped += zip_longest(*lines, fillvalue="")
    return wrapped


def _verdict_rows(result: ProbeResult) -> list[Sequence[str]]:
    broken = [f"failed: {check.statement}" for check in result.checks if not check.passed]
    single = [*broken, *result.template.causes(Harm.EVERYTHING)]
    several = [*broken, *result.template.causes(Harm.SEVERAL_TURNS)]
    verdicts: Mapping[bool, str] = {True: "SAFE", False: "UNSAFE"}
    return [
        (
            "single turns",
            verdicts[result.single_turn_safe],
            "; ".join(single) or "prompts render once, ids are appended",
        ),
        ("several turns", verdicts[result.multi_turn_safe], "; ".join(several) or "each prompt extends the one before"),
    ]
