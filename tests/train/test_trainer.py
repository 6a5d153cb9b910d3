"""The trainer on a real tiny model: logprobs, gradients independent of the cut, and steps that must not happen."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from nanorl.config import AlgoConfig, TrainConfig
from nanorl.errors import ModelError
from nanorl.train.batch import make_batch
from nanorl.train.model import Policy, load_policy
from nanorl.train.trainer import Trainer
from nanorl.types import Completion, Sample, VersionSpan
from tests.tiny_models import build_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def on_policy_samples(
    policy: Policy, lengths: Sequence[int], advantages: Sequence[float], seed: int = 0
) -> list[Sample]:
    """Random tokens with the policy's own logprobs, as an engine with the same weights would report them."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i, (length, advantage) in enumerate(zip(lengths, advantages, strict=True)):
        ids = torch.randint(3, 200, (4 + length,), generator=generator).tolist()
        zeros = Completion(
            token_ids=tuple(ids[4:]),
            logprobs=(0.0,) * length,
            weight_versions=(VersionSpan(0, 0, length),),
            finish_reason="stop",
        )
        sample = Sample.from_completion("g", i, ids[:4], zeros)
        with torch.no_grad():
            scores = policy.score(make_batch([sample])).logprobs[0, 3:]
        samples.append(replace(sample, rollout_logprobs=(0.0,) * 4 + tuple(scores.tolist()), advantage=advantage))
    return samples


def make_trainer(folder: Path, tmp_path: Path, dtype: torch.dtype = torch.float32, **changes: object) -> Trainer:
    train = {k: v for k, v in changes.items() if k in TrainConfig.__struct_fields__}
    algo = {k: v for k, v in changes.items() if k in AlgoConfig.__struct_fields__}
    policy = load_policy(folder, CPU, temperature=1.0)
    policy.model.to(dtype)
    return Trainer(
        policy,
        TrainConfig(**{"lr": 1e-3, "num_minibatches": 1} | train),  # pyright: ignore[reportArgumentType]
        AlgoConfig(**{"constant_length": 16} | algo),  # pyright: ignore[reportArgumentType]
        seed=0,
        dump_dir=tmp_path,
    )


def gradients(trainer: Trainer, samples: Sequence[Sample]) -> torch.Tensor:
    """The gradient that a step would apply: kept, before clipping, by an optimizer that doesn't move."""
    kept: list[torch.Tensor] = []
    trainer.train = msgspec.structs.replace(trainer.train, max_grad_norm=1e9)
    trainer.optimizer.register_step_pre_hook(
        lambda *_: kept.append(torch.cat([p.grad.flatten().clone() for p in trainer.parameters if p.grad is not None]))
    )
    trainer.step(samples)
    (gradient,) = kept
    return gradient


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_of_logits_over_temperature(folder: Path, temperature: float) -> None:
    """slime 557: the same definition as a plain float64 forward pass, at every temperature."""
    policy = load_policy(folder, CPU, temperature)
    (sample,) = on_policy_samples(policy, [6], [1.0])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([sample.token_ids[:-1]])).logits[0]
    expected = torch.log_softmax(logits / temperature, -1)[range(3, 9), list(sample.token_ids[4:])]
    assert sample.rollout_logprobs[4:] == pytest.approx(expected.tolist(), abs=1e-5)


def test_padded_rows_equal_rows_alone(folder: Path) -> None:
    """SkyRL 747: a row padded by a longer neighbour has the logprobs it has alone."""
    policy = load_policy(folder, CPU, 1.0)
    samples = on_policy_samples(policy, [2, 30, 9], [1.0] * 3)
    with torch.no_grad():
        together = policy.score(make_batch(samples)).logprobs
    for row, sample in enumerate(samples):
        assert together[row, 3 : 3 + sample.num_sampled].tolist() == pytest.approx(
            sample.rollout_logprobs[4:], abs=1e-5
        )


@pytest.mark.parametrize("reduction", ["token", "sample", "constant"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_gradients_do_not_depend_on_micro_batches(
    folder: Path, tmp_path: Path, reduction: str, dtype: torch.dtype, tolerance: float
) -> None:
    """prime-rl 2562, verl 6957, SkyRL 1296: samples of 1, 2, 3 and 50 tokens as 1x4, 2x2 and 4x1 micro-batches."""
    found = []
    for budget in (10_000, 120, 1):
        trainer = make_trainer(folder, tmp_path, dtype, micro_batch_tokens=budget, reduction=reduction)
        found.append(gradients(trainer, on_policy_samples(trainer.policy, [1, 2, 3, 50], [1.0, -0.5, 2.0, -1.0])))
    scale = found[0].norm()
    assert scale > 1e-6
    for other in found[1:]:
        assert (found[0] - other).norm() / scale < tolerance


def test_zero_advantage_samples_change_nothing_but_the_denominator(folder: Path, tmp_path: Path) -> None:
    """They are left out of the forward pass; the gradient must be what computing them would give."""
    trainer = make_trainer(folder, tmp_path, torch.float64)
    samples = on_policy_samples(trainer.policy, [4, 6], [1.0, -1.0])
    (extra,) = on_policy_samples(trainer.policy, [10], [0.0], seed=1)
    without = gradients(make_trainer(folder, tmp_path, torch.float64), samples)
    with_extra = gradients(make_trainer(folder, tmp_path, torch.float64), [*samples, extra])
    assert torch.allclose(with_extra * 20 / 10, without, rtol=1e-9)


def test_one_step_raises_good_and_lowers_bad_samples(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder, tmp_path)
    samples = on_policy_samples(trainer.policy, [5, 5], [1.0, -1.0])
    metrics = trainer.step(samples)
    with torch.no_grad():
        after = trainer.policy.score(make_batch(samples)).logprobs.sum(-1).tolist()
    assert after[0] > sum(samples[0].rollout_logprobs)
    assert after[1] < sum(samples[1].rollout_logprobs)
    assert metrics["train/updates"] == 1


def test_first_minibatch_is_on_policy(folder: Path, tmp_path: Path) -> None:
    """verl 4708: eval mode for good, so the ratio is 1, nothing is clipped, and two passes agree to the bit."""
    trainer = make_trainer(folder, tmp_path)
    samples = on_policy_samples(trainer.policy, [5, 9], [1.0, -1.0])
    batch = make_batch(samples)
    assert torch.equal(trainer.policy.score(batch).logprobs, trainer.policy.score(batch).logprobs)
    metrics = trainer.step(samples)
    assert metrics["train/mismatch/max"] < 1e-5
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/pg_loss"] == pytest.approx((-5 + 9) / 14, abs=1e-4)


def test_a_wrong_temperature_shows_as_mismatch(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder, tmp_path)
    samples = on_policy_samples(trainer.policy, [5, 9], [1.0, -1.0])
    trainer.policy.temperature = 0.5
    assert trainer.step(samples)["train/mismatch/mean"] > 0.1


def test_nothing_to_learn_makes_no_step(folder: Path, tmp_path: Path) -> None:
    """OpenRLHF 182: an all-zero step, an empty completion, no sample at all: weights the same, counted."""
    trainer = make_trainer(folder, tmp_path)
    before = [p.clone() for p in trainer.parameters]
    empty = Completion(token_ids=(), logprobs=(), weight_versions=(), finish_reason="length")
    zeros = [*on_policy_samples(trainer.policy, [3, 3], [0.0, 0.0]), Sample.from_completion("g", 2, (1, 2, 3), empty)]
    for samples in (zeros, []):
        metrics = trainer.step(samples)
        assert metrics["train/updates"] == 0
        assert metrics["train/empty_minibatches"] == 1
        assert metrics["train/pg_loss"] == 0.0
        assert metrics["train/grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))


def test_non_finite_gradient_skips_the_step_and_keeps_the_batch(folder: Path, tmp_path: Path) -> None:
    """Contract 10: counted, saved, weights untouched, and the next step trains again."""
    trainer = make_trainer(folder, tmp_path / "dumps")
    samples = on_policy_samples(trainer.policy, [4, 4], [1.0, -1.0])
    before = [p.clone() for p in trainer.parameters]
    hook = trainer.parameters[0].register_hook(lambda grad: grad * float("nan"))
    metrics = trainer.step(samples)
    hook.remove()
    assert metrics["train/nonfinite_minibatches"] == 1
    assert metrics["train/updates"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
    (dump,) = (tmp_path / "dumps").iterdir()
    ids = sorted(tuple(json.loads(line)["token_ids"]) for line in dump.read_text().splitlines())
    assert ids == sorted(sample.token_ids for sample in samples)
    assert trainer.step(samples)["train/updates"] == 1


def test_minibatches_split_the_step_and_warm_up_raises_lr(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder, tmp_path, num_minibatches=4, warmup_steps=8)
    samples = on_policy_samples(trainer.policy, [3] * 8, [1.0, -1.0] * 4)
    seen: list[tuple[int, int]] = []
    metrics = trainer.step(samples, lambda done, total: seen.append((done, total)))
    assert metrics["train/updates"] == 4
    assert seen == [(0, 8), (2, 8), (4, 8), (6, 8), (8, 8)]
    assert metrics["train/lr"] == pytest.approx(1e-3 * 5 / 8)
    assert metrics["train/num_tokens"] == 24


def test_a_folder_without_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="could not load"):
        load_policy(tmp_path, CPU, 1.0)


def shifted_behaviour(samples: Sequence[Sample], shifts: Sequence[float], odd: float = 0.0) -> list[Sample]:
    """As if another policy had sampled: rollout logprobs lower by its shift, at odd positions by `odd` too."""
    moved: list[Sample] = []
    for sample, shift in zip(samples, shifts, strict=True):
        logprobs = [lp - shift - odd * (i % 2) for i, lp in enumerate(sample.rollout_logprobs)]
        logprobs = [lp if m else 0.0 for lp, m in zip(logprobs, sample.loss_mask, strict=True)]
        moved.append(replace(sample, rollout_logprobs=tuple(logprobs)))
    return moved


def test_decoupled_loss_is_the_weighted_one_in_closed_form(folder: Path, tmp_path: Path) -> None:
    """The ratio to the proximal policy is 1 before the first update, so the loss is -mean(w A), and w is bounded."""
    trainer = make_trainer(folder, tmp_path, correction="tis", tis_cap=1.5)
    samples = shifted_behaviour(on_policy_samples(trainer.policy, [4, 4], [1.0, -1.0]), [0.2, 0.9])
    metrics = trainer.step(samples)
    w = [2.718281828**0.2, 1.5]
    assert metrics["train/pg_loss"] == pytest.approx((-w[0] + w[1]) / 2, abs=1e-4)
    assert metrics["train/weight/clipped_share"] == 0.5
    assert metrics["train/weight/mean"] == pytest.approx(sum(w) / 2, abs=1e-4)
    assert metrics["train/ess"] == pytest.approx(sum(w) ** 2 / (2 * (w[0] ** 2 + w[1] ** 2)), abs=1e-4)
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)


def test_old_logprobs_are_those_before_the_first_update(folder: Path, tmp_path: Path) -> None:
    """The second minibatch's ratio is against the step's beginning: not 1, though w = 1 for on-policy samples."""
    trainer = make_trainer(folder, tmp_path, correction="icepop", num_minibatches=2, lr=1e-2)
    samples = on_policy_samples(trainer.policy, [6, 6], [1.0, 1.0])
    metrics = trainer.step(samples)
    assert metrics["train/weight/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/ess"] == pytest.approx(1.0, abs=1e-5)
    assert abs(metrics["train/ratio"] - 1.0) > 1e-3


CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"correction": "tis"},
    {"correction": "tis", "tis_cap": 1.1},
    {"correction": "mis"},
    {"correction": "mis", "correction_level": "geometric"},
    {"correction": "mis", "correction_level": "token"},
    {"correction": "mis", "correction_mode": "truncate"},
    {"correction": "mis", "correction_level": "token", "mask_low": 0.7},
    {"correction": "icepop"},
    {"correction": "icepop", "mask_low": 0.9},
]


def test_every_correction_setting_changes_the_gradient(folder: Path, tmp_path: Path) -> None:
    """What can be set has an effect: ten settings, ten different gradients."""
    seen: list[torch.Tensor] = []
    for changes in CORRECTIONS:
        trainer = make_trainer(folder, tmp_path, **changes)
        samples = on_policy_samples(trainer.policy, [3, 4, 5, 6, 7], [1.0, -1.0, 0.5, -0.5, 0.7])
        seen.append(gradients(trainer, shifted_behaviour(samples, [0.15, -0.2, 0.5, -0.8, 0.6], odd=0.2)))
    for i, first in enumerate(seen):
        assert all(not torch.allclose(first, other, atol=1e-7) for other in seen[:i]), CORRECTIONS[i]


def test_tokens_of_older_weights_show_no_mismatch(folder: Path, tmp_path: Path) -> None:
    """Contract 7: of a sample that spans two versions only the newer tokens compare trainer and engine."""
    trainer = make_trainer(folder, tmp_path)
    (sample,) = on_policy_samples(trainer.policy, [6], [1.0])
    logprobs = tuple(lp - 0.5 if 4 <= i < 7 else lp for i, lp in enumerate(sample.rollout_logprobs))
    spans = (VersionSpan(3, 4, 7), VersionSpan(4, 7, 10))
    sample = replace(sample, rollout_logprobs=logprobs, weight_versions=spans)
    metrics = trainer.step([sample], version=4)
    assert metrics["train/mismatch/max"] < 1e-5
    assert metrics["train/drift/mean"] == pytest.approx(0.25, abs=1e-4)
    assert "train/mismatch/mean" not in make_trainer(folder, tmp_path).step([sample], version=9)
