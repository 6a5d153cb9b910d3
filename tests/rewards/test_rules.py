"""The arithmetic reward: strict about the tag, and fast."""

import time

import pytest

from nanorl.rewards.rules import grade_arithmetic
from nanorl.types import FinishReason, Prompt

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "What is (6 * 9) + 3?"},), label="57")


def parts(text: str, finish_reason: FinishReason = "stop") -> tuple[float, float]:
    result = grade_arithmetic(PROMPT, text, finish_reason)
    assert result.value == pytest.approx(result.parts["correct"] + 0.2 * result.parts["format"])
    return result.parts["correct"], result.parts["format"]


@pytest.mark.parametrize(
    "text", ["<answer>57</answer>", "6 * 9 = 54, 54 + 3 = 57. <answer>57</answer>", "<answer> 57 </answer>"]
)
def test_a_right_tagged_answer_earns_both(text: str):
    assert parts(text) == (1.0, 1.0)


@pytest.mark.parametrize(
    "text", ["<answer>58</answer>", "57 <answer>5</answer>", "<answer></answer>", "<answer>-57</answer>"]
)
def test_a_wrong_tagged_answer_earns_the_format(text: str):
    assert parts(text) == (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "57",
        "The answer is 57.",
        "<answer>57",
        "57</answer>",
        "<answer>57</answer>.",
        "<answer>57</answer> ",
        "<answer>57</answer>\n",
        "<answer>57</answer><|im_end|>",
        "<answer>57</answer><answer>57</answer>",
        "<answer>58</answer> or <answer>57</answer>",
        "<answer><answer>57</answer>",
        "</answer><answer>57</answer>",
        "<answer><b>57</b></answer>",
        "<ANSWER>57</ANSWER>",
    ],
)
def test_anything_but_one_pair_at_the_very_end_earns_nothing(text: str):
    assert parts(text) == (0.0, 0.0)


@pytest.mark.parametrize("finish_reason", ["length", "abort", "error"])
def test_a_response_that_did_not_stop_by_itself_earns_nothing(finish_reason: FinishReason):
    assert parts("<answer>57</answer>", finish_reason) == (0.0, 0.0)


def test_a_prompt_without_a_label_has_no_right_answer():
    unlabelled = Prompt(id="p", messages=PROMPT.messages)
    assert grade_arithmetic(unlabelled, "<answer>None</answer>", "stop").parts == {"correct": 0.0, "format": 1.0}


def test_a_step_s_512_samples_take_milliseconds():
    text = "6 * 9 = 54, 54 + 3 = 57. <answer>57</answer>"
    start = time.process_time()
    for _ in range(512):
        grade_arithmetic(PROMPT, text, "stop")
    assert time.process_time() - start < 0.1, "about 1 ms on an idle machine"
