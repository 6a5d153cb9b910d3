"""Reward functions for the loop's tests, named by path as a user's are."""

import os
import time
from pathlib import Path

from nanorl.types import FinishReason, Prompt


def even_length(prompt: Prompt, text: str, finish_reason: FinishReason) -> float:
    """A spread within almost every group, whatever a random model writes."""
    return float(len(text) % 2 == 0)


def sometimes_broken(prompt: Prompt, text: str, finish_reason: FinishReason) -> float:
    """Fails in each way, depending on the text only."""
    kind = sum(text.encode()) % 5
    if kind == 1:
        raise ValueError("planted")
    if kind == 2:
        return float("nan")
    if kind == 3:
        return None  # pyright: ignore[reportReturnType]
    return float(kind)


def always_broken(prompt: Prompt, text: str, finish_reason: FinishReason) -> float:
    """Never an answer."""
    raise ValueError("planted")


def slow(prompt: Prompt, text: str, finish_reason: FinishReason) -> float:
    """Keeps a run in its rollout, and says so."""
    marker = os.environ.get("NANORL_TEST_MARKER")
    if marker:
        with Path(marker).open("a") as file:
            file.write("x")
    time.sleep(0.5)
    return 1.0


def straggling(prompt: Prompt, text: str, finish_reason: FinishReason) -> float:
    """One problem in eight takes most of a second: its group is overtaken."""
    if sum(prompt.id.encode()) % 8 == 0:
        time.sleep(0.7)
    return float(len(text) % 2 == 0)


def constant(prompt: Prompt, text: str, finish_reason: FinishReason) -> float:
    """No group has any spread."""
    return 0.25


def breathing(prompt: Prompt, text: str, finish_reason: FinishReason) -> float:
    """A grader that takes longer than training does."""
    time.sleep(0.02)
    return float(len(text) % 2 == 0)


def sometimes_hanging(prompt: Prompt, text: str, finish_reason: FinishReason) -> float:
    """One text in sixteen is never graded."""
    while sum(text.encode()) % 16 == 0:
        time.sleep(0.01)
    return float(len(text) % 2 == 0)
