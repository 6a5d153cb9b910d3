"""Evaluation: the estimators against brute force and known values, the command, and `--eval-every`."""

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from nanorl.loops.evaluate import pass_at_k, wilson_interval
from nanorl.loops.train import train
from nanorl.tracking.view import PlainView
from tests.loops.commands import nanorl, own_children
from tests.loops.test_train import make_config, metrics_of, without_times


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(num_right: int, k: int) -> None:
    answers = [i < num_right for i in range(6)]
    assert pass_at_k(6, num_right, k) == pytest.approx(fmean(any(drawn) for drawn in combinations(answers, k)))


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (15, 148, 0.0624, 0.1605),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_the_interval_is_wilson_s(right: int, n: int, low: float, high: float) -> None:
    """The last two: Newcombe, Two-sided confidence intervals for the single proportion (1998), table I, method 3."""
    assert wilson_interval(right / n, n) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


def test_eval_answers_held_out_prompts(
    tiny_model: Path, shared_engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--model", str(tiny_model), "--engine-url", shared_engine, "--prompts", "6", "-k", "4"]
    words += ["--set", "rollout.max_new_tokens=8", "--set", "reward.name=tests.loops.rewards:even_length"]
    children = own_children()
    found: list[list[dict[str, Any]]] = []
    for _ in range(2):
        assert nanorl(*words, "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert own_children() == children
    scores = {score["name"]: score for score in found[0]}
    assert list(scores) == ["greedy", "avg@4", "pass@1", "pass@2", "pass@4"]
    assert all(score["num_prompts"] == 6 for score in found[0])
    assert all(0 <= score["low"] < score["value"] < score["high"] <= 1 for score in found[0][1:3])
    assert scores["avg@4"]["value"] == pytest.approx(scores["pass@1"]["value"])
    assert scores["pass@1"]["value"] < scores["pass@2"]["value"] <= scores["pass@4"]["value"]
    assert scores["greedy"]["value"] * 6 == pytest.approx(round(scores["greedy"]["value"] * 6))  # one answer a prompt

    assert nanorl(*words) == 0
    shown = capsys.readouterr().out
    assert "Held-out accuracy, 95 % confidence" in shown
    assert [line.split()[0] for line in shown.splitlines()[-5:]] == list(scores)

    assert nanorl(*words, "--temperature", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [scores["greedy"]]


def test_eval_every_adds_numbers_and_changes_none(tiny_model: Path, shared_engine: str, tmp_path: Path) -> None:
    """The last one is of the weights that the summary calls `after`: the same problems, the same noise."""
    sets = ["run.steps=4", f"engine.url={shared_engine}"]
    result = train(make_config(tiny_model, tmp_path / "with", *sets, "run.eval_every=2"), PlainView(quiet=True))
    train(make_config(tiny_model, tmp_path / "without", *sets), PlainView(quiet=True))
    rows = metrics_of(tmp_path / "with")
    evaluations = [{name: value for name, value in row.items() if name.startswith("eval/")} for row in rows]
    assert [bool(evaluation) for evaluation in evaluations] == [False, True, False, True]
    assert result.after is not None
    assert evaluations[3] == result.after.metrics()
    assert "eval/reward/mean" in evaluations[3]
    for row in rows:
        for name in evaluations[3]:
            row.pop(name, None)
    assert without_times(rows) == without_times(metrics_of(tmp_path / "without"))
