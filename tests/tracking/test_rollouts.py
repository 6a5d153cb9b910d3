"""Rollout files: exact both ways, off the hot path, and no disk stops training."""

import datetime
import json
import random
import time

import pytest

from nanorl.errors import CheckpointError
from nanorl.tracking.rollouts import (
    RolloutWriter,
    excerpt,
    read_rollouts,
    rollout_path,
    rollout_steps,
    truncate_rollouts,
)
from nanorl.types import Group, Prompt
from tests.tracking.examples import decode, make_groups, make_sample


def write(folder, groups_by_step, decode=decode):
    notes: list[str] = []
    writer = RolloutWriter(folder, decode, notes.append)
    for step, groups in groups_by_step.items():
        writer.write(step, groups)
    writer.close()
    return notes, writer


def test_groups_come_back_equal_to_the_last_bit(tmp_path):
    groups = make_groups()
    write(tmp_path, {7: groups})

    records = read_rollouts(tmp_path, 7)

    assert [record.group for record in records] == groups  # floats compare by value: -0.0 aside, equal is the same bits
    assert type(records[0].samples[0].weight_versions[0]).__name__ == "VersionSpan"
    assert records[1].texts[0] == decode(groups[1].samples[0].token_ids[4:])


def test_awkward_floats_keep_their_bits(tmp_path):
    values = (-0.1, -1e-45, -1.1754943508222875e-38, -2.220446049250313e-16, -123456.789, -1e22)
    sample = make_sample("p", 0, random.Random(0))
    length = 4 + len(values)
    awkward = sample.__class__(
        group_id="p",
        index=0,
        token_ids=tuple(range(length)),
        loss_mask=(False,) * 4 + (True,) * len(values),
        rollout_logprobs=(0.0,) * 4 + values,
        weight_versions=(),
        status=sample.status,
        finish_reason="stop",
        reward=0.1 + 0.2,
    )
    group = Group(prompt=Prompt(id="p", messages=()), samples=(awkward,))
    write(tmp_path, {1: [group]})

    back = read_rollouts(tmp_path, 1)[0].samples[0]

    assert [value.hex() for value in back.rollout_logprobs[4:]] == [value.hex() for value in values]
    assert back.reward == 0.30000000000000004


def test_a_file_is_json_that_other_tools_read(tmp_path):
    write(tmp_path, {1: make_groups()})

    line = json.loads(rollout_path(tmp_path, 1).read_text(encoding="utf-8").splitlines()[0])

    assert rollout_path(tmp_path, 1).name == "step-00001.jsonl"
    assert line["prompt"]["id"] == "p0"
    assert line["samples"][2] | {"token_ids": [], "loss_mask": [], "rollout_logprobs": [], "weight_versions": []} == {
        "group_id": "p0",
        "index": 2,
        "token_ids": [],
        "loss_mask": [],
        "rollout_logprobs": [],
        "weight_versions": [],
        "status": "FAILED",
        "finish_reason": "error",
        "reward": None,
        "reward_parts": {},
        "advantage": 0.0,
        "metadata": {"cause": "timeout", "error": "took 10 s"},
    }


def test_metadata_that_json_has_no_word_for_is_kept_as_text(tmp_path):
    prompt = Prompt(id="p", messages=(), metadata={"day": datetime.date(2024, 2, 29), "odd": {1, 2} and range(3)})
    notes, _ = write(tmp_path, {1: [Group(prompt=prompt, samples=())]})

    assert notes == []
    assert read_rollouts(tmp_path, 1)[0].prompt.metadata == {"day": "2024-02-29", "odd": "range(0, 3)"}


def test_writing_does_not_wait_for_the_disk(tmp_path):
    def slow(token_ids):
        time.sleep(0.02)
        return decode(token_ids)

    writer = RolloutWriter(tmp_path, slow, pytest.fail)
    start = time.perf_counter()
    writer.write(1, make_groups())  # 12 samples: 0.24 s of decoding
    assert time.perf_counter() - start < 0.1
    writer.close()
    assert rollout_steps(tmp_path) == [1]


def test_a_full_disk_is_reported_once_and_the_next_steps_are_written(tmp_path):
    """The disk is really full for the steps that go to /dev/full."""
    for step in (2, 3):
        rollout_path(tmp_path, step).with_suffix(".part").symlink_to("/dev/full")

    notes, writer = write(tmp_path, {step: make_groups() for step in (1, 2, 3, 4)})

    assert rollout_steps(tmp_path) == [1, 4]
    assert len(read_rollouts(tmp_path, 4)) == 4
    assert writer.num_failed == 2
    assert len(notes) == 2
    assert "rollouts failed, training goes on: OSError: [Errno 28] No space left" in notes[0]
    assert notes[1] == "rollouts: 2 items were lost in all"
    assert not list(tmp_path.glob("*.part"))


def test_an_unknown_step_names_those_there_are(tmp_path):
    write(tmp_path, {step: make_groups() for step in (1, 2, 3, 9)})

    with pytest.raises(CheckpointError, match=r"No rollouts of step 5 .*: there are 1-3, 9\."):
        read_rollouts(tmp_path, 5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-40],
        lambda text: text.replace('"loss_mask":[false', '"loss_mask":[true', 1),
        lambda text: text.replace('"COMPLETED"', '"DONE"', 1),
    ],
    ids=["cut", "contradicts itself", "unknown status"],
)
def test_a_damaged_file_names_file_and_line(tmp_path, damage):
    write(tmp_path, {1: make_groups()})
    path = rollout_path(tmp_path, 1)
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")

    with pytest.raises(CheckpointError, match=r"step-00001\.jsonl, line \d"):
        read_rollouts(tmp_path, 1)


def test_truncating_drops_later_steps_only(tmp_path):
    write(tmp_path, {step: make_groups() for step in (1, 2, 3)})

    truncate_rollouts(tmp_path, 2)

    assert rollout_steps(tmp_path) == [1, 2]


def test_the_excerpt_is_of_a_graded_sample():
    groups = make_groups(rewards=(None, 0.5))

    example = excerpt(groups, decode)

    assert example is not None
    assert example.prompt.startswith("What is 0 + 1?")
    assert example.response == decode(groups[0].samples[1].token_ids[4:])
    assert example.reward == 0.5
    assert excerpt(make_groups(rewards=(None,)), decode) is None
