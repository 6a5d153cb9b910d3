"""What the tiny model is shown before RL: answers to arithmetic, most of them right, few of them well formed.

The warm start must leave something to improve. It teaches the arithmetic, but hides it: the usual ending is untagged,
so that greedy decoding earns nothing, and a part of the tagged answers is guessed. RL then mostly chooses among
behaviours that the model already has; its arithmetic sets the ceiling.
"""

import random
import re
from typing import NamedTuple

from nanorl.data.arithmetic import Problem, is_heldout, problems_by_form, question

SLIPS = (1, 2, 3, 5, 8, 10, 11, 20)
"""How far off a wrong answer is."""
TAGGED, UNTAGGED, TAGGED_WRONG, GUESS = 0.30, 0.45, 0.07, 0.18
"""Shares of the four kinds of demonstration: they decide the accuracy and format that RL starts from."""


class Demonstration(NamedTuple):
    """One exchange: what the user asks and what the assistant is shown to say."""

    question: str
    answer: str


def draw_demonstrations(n: int, seed: int) -> list[Demonstration]:
    """Demonstrations over training problems only, the four forms equally often."""
    rng = random.Random(seed)
    forms = [[problem for problem in form if not is_heldout(problem)] for form in problems_by_form()]
    return [_demonstrate(rng.choice(rng.choice(forms)), rng) for _ in range(n)]


def work_out(problem: Problem) -> str:
    """The two steps in the problem's own order, e.g. `6 * 9 = 54, 3 + 54 = 57.`."""
    product = re.search(r"\((\d+) \* (\d+)\)", problem.expression)
    assert product, f"not an arithmetic problem: {problem.expression}"
    value = int(product[1]) * int(product[2])
    second = problem.expression.replace(product[0], str(value))
    return f"{product[1]} * {product[2]} = {value}, {second} = {problem.result}."


def _demonstrate(problem: Problem, rng: random.Random) -> Demonstration:
    kind = rng.choices(range(4), weights=(TAGGED, UNTAGGED, TAGGED_WRONG, GUESS))[0]
    right, wrong = _tag(problem.result), _tag(max(0, problem.result + rng.choice((-1, 1)) * rng.choice(SLIPS)))
    work = work_out(problem)
    answers = (f"{work} {right}", f"{work} The answer is {problem.result}.", f"{work} {wrong}", wrong)
    return Demonstration(question(problem.expression), answers[kind])


def _tag(number: int) -> str:
    return f"<answer>{number}</answer>"
