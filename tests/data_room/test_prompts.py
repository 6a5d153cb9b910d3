"""The stream: every prompt once an epoch, a position that can be saved."""

import json

import pytest

from nanorl.data.prompts import PromptStream
from nanorl.errors import CheckpointError, DataError
from nanorl.types import Prompt


def make_prompts(n: int, name: str = "p") -> list[Prompt]:
    return [Prompt(id=f"{name}{i}", messages=({"role": "user", "content": f"question {i}"},)) for i in range(n)]


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_an_epoch_hands_out_every_prompt_once_whatever_the_request_size():
    stream = PromptStream(make_prompts(10), seed=0)
    taken = ids(stream.next(4)) + ids(stream.next(6))
    assert sorted(taken) == sorted(ids(make_prompts(10)))


def test_epochs_are_shuffled_differently_and_a_request_may_cross_them():
    stream = PromptStream(make_prompts(20), seed=0)
    taken = ids(stream.next(47))
    first, second = taken[:20], taken[20:40]
    assert sorted(first) == sorted(second) == sorted(ids(make_prompts(20)))
    assert first != second
    assert len(set(taken[40:])) == 7


def test_a_request_larger_than_the_data_is_filled_from_several_epochs():
    assert sorted(ids(PromptStream(make_prompts(3), seed=1).next(9))) == sorted(ids(make_prompts(3)) * 3)


def test_the_seed_decides_the_order():
    orders = [ids(PromptStream(make_prompts(20), seed).next(20)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("before", [0, 3, 10, 17])
def test_a_saved_position_goes_on_exactly_there(before: int):
    """prime-rl 3164, verl 4156: a resumed run must not restart the data."""
    stream = PromptStream(make_prompts(10), seed=5)
    stream.next(before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = PromptStream(make_prompts(10), seed=99)
    resumed.load_state_dict(state)
    assert ids(resumed.next(25)) == ids(stream.next(25))


def test_a_position_in_other_data_is_refused():
    state = PromptStream(make_prompts(10), seed=0).state_dict()
    with pytest.raises(CheckpointError, match="other prompts"):
        PromptStream(make_prompts(11), seed=0).load_state_dict(state)


def test_heldout_prompts_are_the_same_every_time_and_never_streamed():
    stream = PromptStream(make_prompts(10), seed=0, heldout=make_prompts(4, "h"))
    assert ids(stream.heldout(3)) == ids(stream.heldout(3)) == ["h0", "h1", "h2"]
    assert len(stream.heldout(100)) == 4
    assert not any(name.startswith("h") for name in ids(stream.next(30)))


def test_no_prompts_and_repeated_ids_are_refused():
    with pytest.raises(DataError, match="at least one"):
        PromptStream([], seed=0)
    with pytest.raises(DataError, match="'p1' appears twice"):
        PromptStream(make_prompts(3), seed=0, heldout=make_prompts(2)[1:])
