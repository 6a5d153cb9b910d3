"""The types check themselves: what can't be right can't be made."""

from dataclasses import replace

import pytest

from nanorl.errors import BatchError
from nanorl.types import Completion, Group, Prompt, Sample, Status, VersionSpan


def completion(**changes: object) -> Completion:
    fields = {
        "token_ids": (7, 8, 2),
        "logprobs": (-0.1, -0.2, -0.3),
        "weight_versions": (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)),
        "finish_reason": "stop",
    }
    return Completion(**fields | changes)  # pyright: ignore[reportArgumentType]


def test_a_completion_is_appended_to_its_prompt_token_by_token() -> None:
    """Contract 1: the stored ids are the engine's, the stop token included (AReaL 846)."""
    sample = Sample.from_completion("p", 0, [5, 6], completion())
    assert sample.token_ids == (5, 6, 7, 8, 2)
    assert sample.loss_mask == (False, False, True, True, True)
    assert sample.rollout_logprobs == (0.0, 0.0, -0.1, -0.2, -0.3)
    assert sample.weight_versions == (VersionSpan(3, 2, 3), VersionSpan(4, 3, 5))
    assert (sample.oldest_version, sample.num_sampled, sample.response_start) == (3, 3, 2)


@pytest.mark.parametrize(
    ("finish", "status", "valid"),
    [
        ("stop", Status.COMPLETED, True),
        ("length", Status.TRUNCATED, True),
        ("abort", Status.ABORTED, False),
        ("error", Status.FAILED, False),
    ],
)
def test_status_follows_the_finish_reason(finish: str, status: Status, valid: bool) -> None:
    sample = Sample.from_completion("p", 0, [5], completion(finish_reason=finish))
    assert sample.status is status
    assert sample.is_valid is valid


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": (-0.1,)},
        {"weight_versions": (VersionSpan(0, 0, 2),)},
        {"weight_versions": (VersionSpan(0, 0, 2), VersionSpan(1, 1, 3))},
        {"weight_versions": (VersionSpan(0, 0, 4),)},
        {"weight_versions": ()},
    ],
    ids=["logprobs", "gap", "overlap", "beyond", "none"],
)
def test_a_completion_that_disagrees_with_itself_is_refused(changes: dict) -> None:
    with pytest.raises(BatchError):
        completion(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": (False, True)},
        {"rollout_logprobs": (0.0, -0.5, -0.1, -0.2, -0.3)},
        {"loss_mask": (True, False, True, True, True)},
        {"reward": float("nan")},
        {"reward": float("inf")},
        {"advantage": float("nan")},
        {"status": Status.FAILED, "reward": 0.0},
        {"weight_versions": (VersionSpan(0, 2, 9),)},
    ],
    ids=["length", "logprob-outside-mask", "first-token", "nan", "inf", "nan-advantage", "failed-with-reward", "span"],
)
def test_a_sample_that_disagrees_with_itself_is_refused(changes: dict) -> None:
    sample = Sample.from_completion("p", 0, [5, 6], completion())
    with pytest.raises(BatchError):
        replace(sample, **changes)


def test_failed_keeps_tokens_and_loses_the_reward() -> None:
    sample = replace(Sample.from_completion("p", 0, [5], completion()), reward=1.0, advantage=0.5)
    failed = sample.failed("timeout", "took 10 s")
    assert (failed.status, failed.reward, failed.advantage, failed.token_ids) == (
        Status.FAILED,
        None,
        0.0,
        sample.token_ids,
    )
    assert failed.metadata == {"cause": "timeout", "error": "took 10 s"}


def test_a_group_holds_samples_of_its_own_prompt_only() -> None:
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},))
    good, bad = (
        Sample.from_completion("p", 0, [5], completion()),
        Sample.from_completion("p", 1, [5], completion(finish_reason="abort")),
    )
    assert Group(prompt=prompt, samples=(good, bad)).valid == (good,)
    with pytest.raises(BatchError, match="prompt 'p'"):
        Group(prompt=prompt, samples=(Sample.from_completion("q", 0, [5], completion()),))
