"""A reward function as users write them, most often wrong. The prompt's label says what it does."""

import os
import sys
import time
from typing import Any

from nanorl.rewards.hub import RewardResult
from nanorl.types import Prompt

NUMBER = 3

ANSWERS: dict[str | None, Any] = {
    "none": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "string": "1.0",
    "nan part": RewardResult(value=1.0, parts={"style": float("nan")}),
    "parts": RewardResult(value=0.5, parts={"style": 1, "pid": os.getpid()}),
}


def score(prompt: Prompt, text: str, finish_reason: str) -> Any:
    if prompt.label in ANSWERS:
        return ANSWERS[prompt.label]
    if prompt.label == "raise":
        raise ValueError("bad sample")
    if prompt.label == "die":
        os._exit(3)
    while prompt.label == "hang":
        time.sleep(0.01)
    while prompt.label == "spin":
        len(text)
    if prompt.label == "print":
        sys.stdout.write("a user's print must not end up in the pipe or on stdout\n")
        return True
    return len(text) + (finish_reason == "stop")


def echo_slowly(prompt: Prompt, text: str, finish_reason: str) -> float:
    time.sleep(0.05)
    return float(prompt.label or 0)
