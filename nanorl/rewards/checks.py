"""What a reward function may answer, checked the same way in this process and in the worker's."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Literal, cast

from nanorl.rewards.rules import RewardResult
from nanorl.types import FinishReason, Prompt

RewardFunction = Callable[[Prompt, str, FinishReason], RewardResult | float]
"""(prompt, response text without its stop token, how it ended) -> a finite number, or a RewardResult with parts."""

Cause = Literal["raised", "no_value", "not_a_number", "not_finite", "timeout", "died"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeItem:
    """One response to grade."""

    prompt: Prompt
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """Why there is no grade. Never a score: the sample is FAILED, masked, and counted under its cause."""

    cause: Cause
    message: str


def grade_safely(function: RewardFunction, item: GradeItem) -> RewardResult | RewardFailure:
    """Calls the function and checks its answer; whatever it raises or answers, this returns."""
    try:
        answer: object = function(item.prompt, item.text, item.finish_reason)
    except Exception as error:  # noqa: BLE001 (a user's function may raise anything, and one bad sample must not end the run)
        return RewardFailure(cause="raised", message=f"{type(error).__name__}: {error}")
    value, parts = (answer.value, answer.parts) if isinstance(answer, RewardResult) else (answer, {})
    for name, number in (("the reward", value), *parts.items()):
        failure = _check_number(name, number)
        if failure:
            return failure
    # numpy's scalars and plain ints become floats here: everything after this is JSON
    return RewardResult(
        value=float(cast("float", value)), parts={name: float(number) for name, number in parts.items()}
    )


def _check_number(name: str, value: object) -> RewardFailure | None:
    if value is None:
        return RewardFailure(
            cause="no_value", message=f"expected a number as {name}, got None: is there a return missing?"
        )
    if not isinstance(value, Real):
        return RewardFailure(
            cause="not_a_number", message=f"expected a number as {name}, got {type(value).__name__} {value!r:.80}"
        )
    if not isfinite(value):
        return RewardFailure(cause="not_finite", message=f"expected a finite number as {name}, got {value}")
    return None
