"""Built-in rewards: trusted, fast, pure functions of prompt and text."""

import re
from dataclasses import dataclass, field

from nanorl.types import FinishReason, Prompt

FORMAT_WEIGHT = 0.2
"""What a well-formed answer is worth beside a right one: enough to be learned, too little to be farmed."""

_FINAL_ANSWER = re.compile(r"<answer>([^<>]*)</answer>\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A grade: one number and what it is made of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Named components for the log, such as `{"correct": 1.0, "format": 1.0}`."""


def grade_arithmetic(prompt: Prompt, text: str, finish_reason: FinishReason) -> RewardResult:
    """Grade: correct + 0.2 * format.

    format: the text holds exactly one `<answer>...</answer>` pair, ends with it, and stopped by itself.
    correct: format, and what stands between the tags is the label. The work before the tags is not looked at.
    """
    answer = _final_answer(text) if finish_reason == "stop" else None
    well_formed = float(answer is not None)
    correct = float(answer is not None and answer == prompt.label)
    return RewardResult(value=correct + FORMAT_WEIGHT * well_formed, parts={"correct": correct, "format": well_formed})


def _final_answer(text: str) -> str | None:
    match = _FINAL_ANSWER.search(text)
    one_pair = text.count("<answer>") == text.count("</answer>") == 1
    return match[1].strip() if match and one_pair else None
