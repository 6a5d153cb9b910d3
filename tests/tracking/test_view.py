"""What a person sees: plain lines in a pipe, a live view on a terminal, and a terminal that works afterwards."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from nanorl.tracking.columns import GAP, OVERLAP_COLUMNS, STEP_COLUMNS, columns_of, fitting
from nanorl.tracking.live import RichView, lane_lines, one_line
from nanorl.tracking.rollouts import Excerpt
from nanorl.tracking.view import PlainView, make_view, step_line, table_text
from nanorl.types import StepReport
from tests.tracking.examples import make_report

FACTS = {
    "model": "tiny",
    "engine": "torch, own, http://127.0.0.1:41235",
    "device": "cpu",
    "run": "runs/2026-01-01-tiny",
}
EXTREMES = {"train/grad_norm": 1.5e9, "train/pg_loss": -123456.0, "sync/total_ms": 98765.4, "time/step_s": 86400.0}


def drive(view):
    """A run of three steps, one of them with absurd numbers."""
    with view:
        view.header(FACTS)
        view.note("[/no] markup")
        for step in (1, 2, 3):
            view.progress("sampling", 128, 512)
            view.sample(Excerpt("What is 2 + 3?\nQuick.", "\x1b[2J\x1b[31m 5 " + "so " * 200, 0.2))
            view.step(make_report(step, **(EXTREMES if step == 2 else {})), 3)
        view.table("Summary", ("", "early [x]", "late"), [("reward [/x]", "0.1", "0.3")])


def live(width):
    console = Console(file=io.StringIO(), width=width, height=30, force_terminal=True, highlight=False, record=True)
    view = RichView(console)
    drive(view)
    return view, console.export_text()


@pytest.mark.parametrize("width", [20, 30, 80, 140])
def test_the_live_view_never_wraps_a_row(width):
    _, text = live(width)

    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if re.match(r" *\d/3 ", line)]
    assert [row.split()[0] for row in rows] == ["1/3", "2/3", "3/3"]
    assert len({len(row) for row in rows}) == 1  # absurd numbers keep the columns aligned
    titles = next(line for line in lines if line.startswith("step "))
    assert len(titles) == len(rows[0])
    assert "reward" in titles
    assert ("drift" in titles) == (width == 140)
    assert "[x]" in text
    assert "[/no] markup" in text.replace("\n", " ")


def test_a_model_that_writes_escape_codes_does_not_move_the_cursor():
    view, text = live(80)

    assert "\x1b" not in text
    assert "·[2J·[31m 5 so so" in text
    example = [line for line in text.splitlines() if line.startswith("0.200 ")][-1]
    assert len(example) <= 80
    assert example.endswith("…")
    assert "What is 2 + 3?⏎Quick." in text
    assert view.console.file.getvalue().endswith("\n")  # pyright: ignore[reportAttributeAccessIssue]


def test_a_table_ends_the_live_part_and_progress_begins_a_new_one():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, record=True)
    with RichView(console) as view:
        view.step(make_report(1), 1)
        view.table("First", ("a",), [("1",)])
        view.progress("sampling", 3, 4)
        view.table("Second", ("a",), [("1",)])
        view.status({"running": "3", "KV": "12%"})
    text = console.export_text()
    assert text.index("reward  ") < text.index("First") < text.index("Second") < text.index("running")
    titles, _, values = [line.strip("│ ") for line in text.splitlines()[-4:-1]]
    assert (titles.split(), values.split()) == (["running", "│", "KV"], ["3", "│", "12%"])
    assert console.file.getvalue().count("\x1b[?25h") == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_log_gets_a_status_where_it_changed_and_not_each_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    view = PlainView()
    view.status({"running": "0", "weight version": "1"})
    view.status({"running": "3", "weight version": "1"})  # too soon
    monkeypatch.setattr("nanorl.tracking.view.SILENCE_S", 0.0)
    view.status({"running": "0", "weight version": "1"})  # nothing new
    view.status({"running": "4", "weight version": "1"})
    assert capsys.readouterr().out == "running 0  weight version 1\nrunning 4  weight version 1\n"
    quiet = PlainView(quiet=True)
    quiet.status({"running": "5"})
    assert capsys.readouterr().out == ""


def test_titles_come_again_once_a_screenful():
    console = Console(file=io.StringIO(), width=80, height=18, force_terminal=True, record=True)
    with RichView(console) as view:
        for step in range(1, 21):
            view.step(make_report(step), 20)
    assert console.export_text().count("accuracy") == 2


def test_a_step_without_any_metric_shows_dashes():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, record=True)
    with RichView(console) as view:
        view.step(StepReport(step=1, weight_version=2, metrics={}), 1)
    assert console.export_text().count(" -") == len(fitting(80, 4))


def test_columns_fit_any_width_and_drop_the_least_important_first():
    for width in range(20, 160):
        columns = fitting(width, 7)
        assert 7 + sum(column.width + GAP for column in columns) <= width
        assert [c for c in STEP_COLUMNS if c in columns] == list(columns)
    assert [column.title for column in fitting(30, 5)] == ["reward", "accuracy"]
    assert fitting(160, 7) == STEP_COLUMNS


@pytest.mark.parametrize(
    "value", [0.0, -0.99999, 123456.789, -1e300, 5e-324, float("nan"), float("inf"), float("-inf")]
)
def test_no_value_is_wider_than_its_column(value):
    for column in STEP_COLUMNS:
        assert len(column.text({column.metric: value})) <= column.width, column.title


def test_plain_lines_one_a_step(capsys):
    drive(PlainView())

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("nanorl  model=tiny  engine=torch")
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 3
    assert steps[0].startswith("step 1/3  reward 0.100  accuracy 0.333  format -")
    assert all(column.title in steps[0] for column in STEP_COLUMNS)
    assert "\x1b" not in "".join(lines)
    assert lines[-2:] == ["             early [x]  late", "reward [/x]        0.1   0.3"]


def test_plain_lines_show_progress_only_after_a_silence(capsys, monkeypatch):
    view = PlainView()
    view.progress("building the tiny model", 1, 1800)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("nanorl.tracking.view.SILENCE_S", 0.05)
    time.sleep(0.06)
    view.progress("building the tiny model", 900, 1800)
    view.progress("building the tiny model", 901, 1800)
    assert capsys.readouterr().out == "building the tiny model 900/1800\n"


def test_quiet_leaves_tables_and_warnings(capsys):
    view = PlainView(quiet=True)
    drive(view)
    view.note("warning: rollouts failed")

    assert capsys.readouterr().out.splitlines()[0] == "Summary"
    view.note("warning: once more")
    assert capsys.readouterr().out == "warning: once more\n"


def test_names_are_not_cut_and_lists_of_numbers_are_words():
    console = Console(file=io.StringIO(), width=40, force_terminal=True, record=True)
    with RichView(console) as view:
        view.table("Carriers", ("", "total ms", "bare copy ms", "share of limit"), [("shared_memory", "1", "2", "3")])
    assert "shared_memory" in console.export_text()
    assert table_text("Ids", ("a", "re-encoded"), [("x", "12 345 67 890")]).splitlines()[1] == "a  re-encoded"
    assert table_text("Ids", ("a", "compared"), [("x", "0 / 5")]).splitlines()[2] == "x     0 / 5"


def test_one_line_keeps_letters_of_every_script():
    assert one_line(" Überß 你好 🙂\n\tx\u202e ") == "Überß 你好 🙂⏎·x·"


@pytest.mark.usefixtures("capsys")
def test_no_terminal_or_a_dumb_one_gets_plain_lines(monkeypatch):
    assert isinstance(make_view(), PlainView)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_view(), RichView)
    assert isinstance(make_view(quiet=True), PlainView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view(), PlainView)


ENDLESS = """
import time
from nanorl.tracking.view import make_view
from tests.tracking.examples import make_report
with make_view() as view:
    view.step(make_report(1), 9)
    view.progress("sampling", 1, 4)
    print("READY", flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", "raise RuntimeError('boom')"])
def test_after_ctrl_c_or_a_crash_the_cursor_is_back_and_rows_stay(end):
    """On a real terminal of 80 columns, in a process of its own."""
    terminal, screen = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1"}
    command = [sys.executable, "-c", ENDLESS.format(end=end)]
    child = subprocess.Popen(command, stdin=screen, stdout=screen, stderr=screen, env=environment)
    os.close(screen)
    seen, interrupted, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # EIO: the child has closed its end
            break
        if b"READY" in seen and not interrupted and "sleep" in end:
            interrupted = True
            child.send_signal(signal.SIGINT)
    assert child.wait(timeout=30) != 0
    os.close(terminal)

    text = seen.decode()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # hidden once, shown once
    assert "1/9   0.100" in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)  # NO_COLOR
    assert ("KeyboardInterrupt" if "sleep" in end else "boom") in text.split("\x1b[?25h")[1]


OVERLAP = {
    "rollout/queue_depth": 8,
    "rollout/in_flight": 4,
    "rollout/staleness/mean": 1.5,
    "rollout/staleness/max": 2,
    "rollout/stale_recycled": 1,
    "rollout/stale_dropped": 0,
    "time/trainer_wait_share": 0.25,
    "time/engine_idle_share": 0.5,
}


def test_an_asynchronous_run_has_its_own_columns():
    """A synchronous run's table stays as it is: the columns follow from what is logged."""
    assert columns_of(make_report(1).metrics) == STEP_COLUMNS
    assert columns_of(make_report(1, **OVERLAP).metrics) == STEP_COLUMNS + OVERLAP_COLUMNS
    line = step_line(make_report(1, **OVERLAP), 3)
    assert "queue 8  flight 4  stale 1.50  max 2  again 1  drop 0  wait 25%  idle 50%" in line
    chosen = fitting(100, 7, STEP_COLUMNS + OVERLAP_COLUMNS)
    assert {"reward", "stale", "wait", "idle"} <= {column.title for column in chosen}


def test_two_lanes_show_who_was_at_work_when():
    """One scale of time for both: the engine samples on while the trainer trains, then has nothing to do."""
    lanes = {
        "engine": [("sample", (10.0, 14.0))],
        "trainer": [("train", (12.0, 15.0)), ("sync", (15.0, 16.0))],
    }
    engine, trainer = [line.plain for line in lane_lines(lanes, 12)]
    assert engine == "engine   " + "█" * 8 + "·" * 4 + "  6.0 s"
    assert trainer == "trainer  " + "·" * 4 + "█" * 6 + "▒" * 2 + "  6.0 s"
    assert lane_lines({}, 12) == []
    console = Console(file=io.StringIO(), width=60, height=30, force_terminal=True, highlight=False, record=True)
    with RichView(console) as view:
        view.lanes(lanes)
        view.step(make_report(1, **OVERLAP), 3)
        console.print(view.render())
    assert "engine   █" in console.export_text()
