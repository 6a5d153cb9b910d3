"""Shift by one, ragged batches, and the cut into micro-batches."""

from dataclasses import replace

import pytest
import torch

from nanorl.errors import BatchError
from nanorl.train.batch import make_batch, micro_batches
from nanorl.types import Completion, Sample, Status, VersionSpan


def sample(prompt_len: int, response_len: int, advantage: float = 1.0, index: int = 0) -> Sample:
    """Prompt ids count from 10, response ids from 100, logprobs are -(i + 1) / 10."""
    completion = Completion(
        token_ids=tuple(range(100, 100 + response_len)),
        logprobs=tuple(-(i + 1) / 10 for i in range(response_len)),
        weight_versions=(VersionSpan(0, 0, response_len),) if response_len else (),
        finish_reason="stop",
    )
    made = Sample.from_completion("g", index, tuple(range(10, 10 + prompt_len)), completion)
    return replace(made, advantage=advantage)


def test_response_sits_at_prompt_minus_one() -> None:
    """Contract 2: [P-1 : P+R-1] of the prediction space, exactly R long."""
    batch = make_batch([sample(3, 2, advantage=0.5)])
    assert batch.input_ids.tolist() == [[10, 11, 12, 100]]
    assert batch.target_ids.tolist() == [[11, 12, 100, 101]]
    assert batch.loss_mask.tolist() == [[False, False, True, True]]
    assert batch.target_ids[0, 2:4].tolist() == [100, 101]
    assert batch.advantages.tolist() == [[0.0, 0.0, 0.5, 0.5]]
    assert batch.rollout_logprobs[0].tolist() == pytest.approx([0.0, 0.0, -0.1, -0.2])


def test_ragged_rows_equal_one_by_one() -> None:
    """trl 3681: [P=2,R=3] and [P=5,R=1] in one batch must be what each is alone, padding apart."""
    samples = [sample(2, 3), sample(5, 1, advantage=-2.0)]
    batch = make_batch(samples)
    for row, single in enumerate(samples):
        alone = make_batch([single])
        width = alone.input_ids.shape[1]
        for name in set(alone.__slots__) - {"old_logprobs"}:
            padded = getattr(batch, name)[row]
            assert torch.equal(padded[:width], getattr(alone, name)[0]), name
            assert not padded[width:].any(), name


def test_masks_come_from_positions() -> None:
    """A sampled token that equals pad or eos is still trained (AReaL 846)."""
    completion = Completion(
        token_ids=(0, 2, 2), logprobs=(-1.0, -1.0, -1.0), weight_versions=(VersionSpan(0, 0, 3),), finish_reason="stop"
    )
    batch = make_batch([Sample.from_completion("g", 0, (2, 0), completion)])
    assert batch.loss_mask.tolist() == [[False, True, True, True]]


def test_logprobs_stay_float32() -> None:
    """slime 245: -0.1 in bf16 is -0.10009765625."""
    batch = make_batch([sample(2, 2)])
    assert batch.rollout_logprobs.dtype == torch.float32
    assert batch.rollout_logprobs[0, 1].item() == pytest.approx(-0.1, abs=1e-8)


def test_micro_batches_hold_every_sample_once_within_budget() -> None:
    samples = [sample(4, r, index=i) for i, r in enumerate([1, 9, 3, 3, 50, 2, 7, 1])]
    batches = list(micro_batches(samples, max_tokens=40))
    sizes = sorted(int(row.sum()) for batch in batches for row in batch.loss_mask)
    assert sizes == sorted(s.num_sampled for s in samples)
    assert all(b.input_ids.numel() <= 40 or len(b.input_ids) == 1 for b in batches)
    assert len(batches) > 1


def test_no_samples_and_single_tokens_are_refused() -> None:
    with pytest.raises(BatchError, match="at least one sample"):
        make_batch([])
    with pytest.raises(BatchError, match="two tokens"):
        make_batch([sample(1, 0)])


def test_every_sampled_token_of_every_turn_trains_and_no_other() -> None:
    """SkyRL 1507: with environment tokens between two turns, each sampled token has the advantage, no other has one."""
    mask = (False, False, True, True, False, False, True)
    two_turns = Sample(
        group_id="g",
        index=0,
        token_ids=(1, 2, 10, 11, 20, 21, 30),
        loss_mask=mask,
        rollout_logprobs=tuple(-0.5 if sampled else 0.0 for sampled in mask),
        weight_versions=(VersionSpan(0, 2, 4), VersionSpan(0, 6, 7)),
        status=Status.COMPLETED,
        finish_reason="stop",
        advantage=2.0,
    )
    batch = make_batch([two_turns])
    assert batch.advantages.tolist() == [[2.0 if sampled else 0.0 for sampled in mask[1:]]]
    assert batch.loss_mask.tolist() == [list(mask[1:])]
