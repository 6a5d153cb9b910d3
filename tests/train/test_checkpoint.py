"""Checkpoints: exact, atomic, checked, and an ordinary Hugging Face folder."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nanorl.errors import CheckpointError
from nanorl.train.checkpoint import TrainState, checkpoint_path, list_checkpoints, load_checkpoint, save_checkpoint
from nanorl.train.trainer import Trainer
from tests.tiny_models import build_tiny_model
from tests.train.test_trainer import make_trainer, on_policy_samples


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)


def trained(folder: Path, tmp_path: Path, steps: int) -> Trainer:
    trainer = make_trainer(folder, tmp_path, num_minibatches=2, warmup_steps=5)
    go_on(trainer, range(steps))
    return trainer


def go_on(trainer: Trainer, steps: range) -> list[dict[str, float]]:
    """Steps on samples that depend on the step only."""
    samples = [on_policy_samples(trainer.policy, [5, 3, 8, 2], [1.0, -1.0, 0.5, -0.5], seed=i) for i in steps]
    return [trainer.step(s) for s in samples]


def save(trainer: Trainer, folder: Path, target: Path, step: int, keep: int = 2) -> Path:
    state = TrainState(step=step, weight_version=step + 1, data={"epoch": 0, "position": 8 * step})
    return save_checkpoint(target, trainer, folder, state, keep=keep)


def test_three_and_three_equal_six(folder: Path, tmp_path: Path) -> None:
    """prime-rl 3164, verl 4156: parameters, optimizer, warm-up, minibatch order and metrics, bit for bit."""
    whole = trained(folder, tmp_path, 3)
    path = save(whole, folder, tmp_path / "checkpoints", 3)
    expected = go_on(whole, range(3, 6))
    resumed = make_trainer(folder, tmp_path, num_minibatches=2, warmup_steps=5)
    state = load_checkpoint(path, resumed)
    assert (state.step, state.weight_version, state.data) == (3, 4, {"epoch": 0, "position": 24})
    assert go_on(resumed, range(3, 6)) == expected
    for ours, theirs in zip(resumed.parameters, whole.parameters, strict=True):
        assert torch.equal(ours, theirs)
        for key, value in whole.optimizer.state[theirs].items():
            assert torch.equal(resumed.optimizer.state[ours][key], value)


def test_it_loads_with_transformers(folder: Path, tmp_path: Path) -> None:
    """vllm 51665, prime-rl 1765: the head stays tied, or untied, as it was."""
    trainer = trained(folder, tmp_path, 1)
    path = save(trainer, folder, tmp_path / "checkpoints", 1)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, trainer.policy.model(input_ids=ids).logits)
    head, embedding = model.get_parameter("lm_head.weight"), model.get_parameter("model.embed_tokens.weight")
    assert (head is embedding) == AutoConfig.from_pretrained(folder).tie_word_embeddings
    assert (
        AutoTokenizer.from_pretrained(path)("abc")["input_ids"]
        == AutoTokenizer.from_pretrained(folder)("abc")["input_ids"]
    )


def test_only_the_newest_stay_and_a_half_written_one_does_not_count(folder: Path, tmp_path: Path) -> None:
    trainer = trained(folder, tmp_path, 0)
    target = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        save(trainer, folder, target, step)
    assert list_checkpoints(target) == [2, 3]
    (target / ".step-00009.partial").mkdir()
    (target / "step-00009").mkdir()
    assert list_checkpoints(target) == [2, 3]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "state"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_damage_is_noticed(folder: Path, tmp_path: Path, damage: str, name: str) -> None:
    trainer = trained(folder, tmp_path, 1)
    path = save(trainer, folder, tmp_path / "checkpoints", 1)
    file = path / ("state.json" if damage == "state" else name)
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "flip":
        content[-5] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"damaged|complete checkpoint"):
        load_checkpoint(path, make_trainer(folder, tmp_path))


def test_another_models_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    path = save(trained(folder, tmp_path, 0), folder, tmp_path / "checkpoints", 1)
    other = build_tiny_model(tmp_path / "other", hidden_size=32)
    with pytest.raises(CheckpointError, match="doesn't fit"):
        load_checkpoint(path, make_trainer(other, tmp_path))
    with pytest.raises(CheckpointError, match="complete checkpoint"):
        load_checkpoint(checkpoint_path(tmp_path, 7), make_trainer(other, tmp_path))
