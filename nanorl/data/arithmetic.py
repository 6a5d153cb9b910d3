"""The built-in task: two-step arithmetic such as `(6 * 9) + 3`, a few thousand problems, made on the spot."""

import random
from functools import cache
from hashlib import md5
from typing import Literal, NamedTuple

from nanorl.data.prompts import PromptStream
from nanorl.types import Prompt

FACTORS = range(2, 10)
SMALL_TERMS = range(1, 10)
ROUND_TERMS = range(10, 100, 10)
LARGEST_RESULT = 99


class Problem(NamedTuple):
    """An expression, e.g. `(6 * 9) + 3`, and its value."""

    expression: str
    result: int


class ArithmeticTask(PromptStream):
    """Every training problem once an epoch; the held-out ones in a fixed order that doesn't depend on the seed."""

    def __init__(self, seed: int) -> None:
        heldout = [to_prompt(problem) for problem in all_problems("heldout")]
        random.Random("heldout").shuffle(heldout)  # a short evaluation must see all four forms
        super().__init__([to_prompt(problem) for problem in all_problems("train")], seed, heldout)


@cache
def all_problems(split: Literal["train", "heldout"]) -> tuple[Problem, ...]:
    """All problems of a split, in order; a tenth, chosen by hash, is held out from training of any kind."""
    return tuple(
        problem for form in problems_by_form() for problem in form if is_heldout(problem) == (split == "heldout")
    )


@cache
def problems_by_form() -> tuple[tuple[Problem, ...], ...]:
    """Both splits of `(a * b) + c`, `(a * b) - c`, `c + (a * b)`, `c - (a * b)`, results within 0..99."""
    pairs = [(a, b) for a in FACTORS for b in FACTORS]
    forms = (
        [Problem(f"({a} * {b}) + {c}", a * b + c) for a, b in pairs for c in SMALL_TERMS],
        [Problem(f"({a} * {b}) - {c}", a * b - c) for a, b in pairs for c in SMALL_TERMS],
        [Problem(f"{c} + ({a} * {b})", c + a * b) for a, b in pairs for c in SMALL_TERMS],
        [Problem(f"{c} - ({a} * {b})", c - a * b) for a, b in pairs for c in ROUND_TERMS],
    )
    return tuple(tuple(p for p in form if 0 <= p.result <= LARGEST_RESULT) for form in forms)


def is_heldout(problem: Problem) -> bool:
    """Whether the problem belongs to the held-out tenth; decided by its text alone, so it never changes."""
    return int(md5(problem.expression.encode(), usedforsecurity=False).hexdigest(), 16) % 10 == 0


def to_prompt(problem: Problem) -> Prompt:
    """The problem as a chat prompt, with its value as the label."""
    return Prompt(
        id=f"arithmetic/{problem.expression}",
        messages=({"role": "user", "content": question(problem.expression)},),
        label=str(problem.result),
        metadata={"expression": problem.expression},
    )


def question(expression: str) -> str:
    """What the user says."""
    return f"What is {expression}?"
