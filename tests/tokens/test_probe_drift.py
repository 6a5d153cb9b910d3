"""Drift by hand on five merges, and the slices of prediction space with each fault planted."""

from typing import Any

import pytest

from nanorl.tokens import drift
from nanorl.tokens.shift import slice_faults
from tests.tokens.small_tokenizer import build_small_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> drift.Tokenizer:
    return build_small_tokenizer()


def ids(tokenizer: drift.Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.get_vocab()[token] for token in tokens]


def test_ids_that_the_encoder_would_merge_drift(tokenizer: drift.Tokenizer):
    """Trl 5242: the engine answers ids for "hell" and "o" where BPE merges "hello"; re-encoding would differ."""
    sampled = ids(tokenizer, "hell", "o")
    trip = drift.round_trip(tokenizer, sampled)
    assert trip.drifted
    assert trip.text == "hello"
    assert list(trip.reencoded_ids) == ids(tokenizer, "hello")
    assert trip.text_survives
    assert not trip.text_lost
    assert not drift.round_trip(tokenizer, ids(tokenizer, "hello", "<|im_end|>")).drifted


def test_bytes_that_are_no_text_are_lost(tokenizer: drift.Tokenizer):
    half = drift.encode(tokenizer, "é")[:1]
    trip = drift.round_trip(tokenizer, half)
    assert trip.text == drift.REPLACEMENT
    assert trip.drifted
    assert trip.text_lost
    assert len(trip.reencoded_ids) == 3  # U+FFFD in UTF-8: the byte that was sampled can't be told any more


def test_a_report_counts_and_shows_the_shortest(tokenizer: drift.Tokenizer):
    sequences = [
        ids(tokenizer, "h", "e", "l", "l", "o"),
        ids(tokenizer, "hello"),
        ids(tokenizer, "h", "e"),
        ids(tokenizer, "he", "ll", "o"),
    ]
    report = drift.measure_drift(tokenizer, "by hand", sequences, num_examples=2)
    assert report.drifted == (0, 2, 3)
    assert report.share == 0.75
    assert [len(example.token_ids) for example in report.examples] == [2, 3]
    assert drift.measure_drift(tokenizer, "nothing", []).share == 0.0


def test_pools_leave_out_marks_and_fragments(tokenizer: drift.Tokenizer):
    learned, printable = drift.learned_ids(tokenizer), drift.printable_ids(tokenizer)
    assert len(learned) == 256 + 5
    assert not set(learned) & set(tokenizer.added_tokens_decoder)
    texts = [drift.decode(tokenizer, [i]) for i in printable]
    assert "hello" in texts
    assert "\n " in texts
    assert drift.REPLACEMENT not in "".join(texts)
    assert "\x00" not in texts
    assert len(printable) == 95 + 3 + 5  # printable ASCII; newline, tab and return; the merges


def test_sequences_repeat_with_the_seed(tokenizer: drift.Tokenizer):
    pool = drift.learned_ids(tokenizer)
    assert drift.random_sequences(pool, 3, 8, 0) == drift.random_sequences(pool, 3, 8, 0)
    assert drift.random_sequences(pool, 3, 8, 0) != drift.random_sequences(pool, 3, 8, 1)
    spliced = drift.spliced_sequences(tokenizer, 4, 0)
    assert spliced == drift.spliced_sequences(tokenizer, 4, 0)
    assert [len(drift.decode(tokenizer, sequence)) for sequence in spliced] == [120] * 4


PROMPT, RESPONSE, LOGPROBS = [5, 6, 7], [8, 2], [-0.5, -0.25]
RIGHT: dict[str, Any] = {
    "target_ids": [6, 7, 8, 2, 0],
    "loss_mask": [False, False, True, True, False],
    "rollout_logprobs": [0.0, 0.0, -0.5, -0.25, 0.0],
}


def test_a_right_row_has_no_fault():
    assert slice_faults(PROMPT, RESPONSE, LOGPROBS, **RIGHT) == []
    empty = {"target_ids": [6, 7], "loss_mask": [False, False], "rollout_logprobs": [0.0, 0.0]}
    assert slice_faults(PROMPT, [], [], **empty) == []


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("loss_mask", [False, False, False, True, True], "the mask should be [2 : 4], 2 set; it is [3 : 5], 2 set"),
        ("loss_mask", [False, False, True, False, False], "the mask should be [2 : 4], 2 set; it is [2 : 3], 1 set"),
        ("loss_mask", [False, False, False, False, False], "the mask should be [2 : 4], 2 set; it is nothing"),
        ("target_ids", [5, 6, 7, 8, 2], "the targets in [2 : 4] are not the sampled ids"),
        ("target_ids", [5, 7, 8, 2, 0], "the targets before 2 are not the prompt's ids"),
        ("rollout_logprobs", [0.0, 0.0, -0.25, -0.5, 0.0], "the logprobs in [2 : 4] are not the engine's"),
        ("rollout_logprobs", [0.0, -0.5, -0.5, -0.25, 0.0], "there are logprobs outside [2 : 4]"),
    ],
)
def test_a_planted_shift_is_found(field: str, value: list[Any], expected: str):
    """Trl 3681: a slice that is off by one."""
    assert expected in slice_faults(PROMPT, RESPONSE, LOGPROBS, **{**RIGHT, field: value})
