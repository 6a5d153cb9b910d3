"""What the tiny model is shown: the right mix, and no held-out problem."""

import re
from collections import Counter

from nanorl.data.arithmetic import Problem, all_problems, question
from nanorl.models.demonstrations import draw_demonstrations, work_out
from nanorl.rewards.rules import grade_arithmetic
from nanorl.types import Prompt

N = 4000
RESULTS = {question(expression): result for expression, result in all_problems("train")}


def test_only_training_problems_are_shown():
    assert {d.question for d in draw_demonstrations(N, seed=0)} <= set(RESULTS)


def test_the_shares_are_the_recipe_s_and_the_most_common_ending_is_untagged():
    kinds: Counter[str] = Counter()
    for shown, answer in draw_demonstrations(N, seed=0):
        prompt = Prompt(id="p", messages=(), label=str(RESULTS[shown]))
        parts = grade_arithmetic(prompt, answer, "stop").parts
        work = "work" if " = " in answer else "guess"
        kinds[f"{work}, {'tagged' if parts['format'] else 'untagged'}, {'right' if parts['correct'] else 'wrong'}"] += 1
    shares = {kind: round(count / N, 2) for kind, count in kinds.items()}
    # A wrong answer is floored at 0, so a few of them are right by accident.
    expected = {
        "work, tagged, right": 0.30,
        "work, untagged, wrong": 0.45,
        "work, tagged, wrong": 0.07,
        "guess, tagged, wrong": 0.18,
    }
    assert all(abs(shares[kind] - share) <= 0.03 for kind, share in expected.items()), shares


def test_the_four_forms_come_equally_often():
    forms = Counter(
        (shown[8] == "(", "+" in shown)
        for shown, _ in draw_demonstrations(N, seed=1)  # What is (a * b) + c?
    )
    assert all(abs(count / N - 0.25) < 0.03 for count in forms.values())
    assert len(forms) == 4


def test_the_work_is_true_arithmetic():
    assert work_out(Problem("3 + (6 * 9)", 57)) == "6 * 9 = 54, 3 + 54 = 57."
    for problem in all_problems("heldout"):
        for left, right in re.findall(r"([\d *+-]+) = (\d+)", work_out(problem)):
            assert eval(left) == int(right)


def test_the_seed_decides():
    assert draw_demonstrations(50, 0) == draw_demonstrations(50, 0) != draw_demonstrations(50, 1)
