"""The built-in reward as a service would give it: 200 ms a sample."""

import time

from nanorl.rewards.rules import RewardResult, grade_arithmetic
from nanorl.types import FinishReason, Prompt


def grade(prompt: Prompt, text: str, finish_reason: FinishReason) -> RewardResult:
    """Waits, then grades."""
    time.sleep(0.2)
    return grade_arithmetic(prompt, text, finish_reason)
