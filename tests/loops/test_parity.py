"""check-parity on a real engine: it holds as it is; with a fault planted it fails and names the right suspect."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanorl.engine.launcher import EngineProcess, embedded_engine
from nanorl.engine.protocol import SamplingParams
from nanorl.loops import build as build_room
from nanorl.loops.build import Run, build
from nanorl.loops.parity import ParityResult, inspect
from nanorl.loops.parity_stats import Deltas, bf16_gate
from nanorl.rollout.single_turn import Sampler
from nanorl.tracking.view import PlainView
from nanorl.train.model import Policy, load_policy
from nanorl.types import Completion
from nanorl.weight_sync.base import NamedTensors, SyncReport, WeightSync
from tests.loops.commands import nanorl, own_children
from tests.loops.test_train import make_config

LAYER = "model.layers.{}.mlp.down_proj.weight"


@pytest.fixture
def run(tiny_model: Path, shared_engine: str, tmp_path: Path) -> Iterator[Run]:
    sets = ["reward.name=arithmetic", "rollout.max_new_tokens=24", "train.lr=1e-2", f"engine.url={shared_engine}"]
    with build(make_config(tiny_model, tmp_path / "run", *sets), PlainView(quiet=True)) as run:
        yield run


class FaultySync:
    """A sync that sends other values for some tensors than it was given; its check is given the right ones."""

    def __init__(self, real: WeightSync, instead: dict[str, torch.Tensor]) -> None:
        self.real = real
        self.instead = {name: tensor.clone() for name, tensor in instead.items()}

    def sync(self, named_tensors: NamedTensors, version: int) -> SyncReport:
        return self.real.sync([(name, self.instead.get(name, tensor)) for name, tensor in named_tensors], version)

    def verify(self, named_tensors: NamedTensors) -> int:
        return self.real.verify(named_tensors)

    def close(self) -> None:
        self.real.close()


class OldAnswers:
    """A sampler that gives the first answers again: by now their keys and values are of older weights."""

    def __init__(self, real: Sampler) -> None:
        self.real = real
        self.answers: list[list[Completion]] | None = None

    async def generate_batch(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        if self.answers is None:
            self.answers = await self.real.generate_batch(prompt_ids, sampling)
        return self.answers


def expect_suspect(result: ParityResult, word: str) -> str:
    """The fault was found, and by its name."""
    assert not result.holds
    assert result.suspect is not None
    assert result.suspect.startswith(f"{word}: "), result.suspect
    return result.suspect


def test_it_holds_before_and_after_a_step_and_a_sync(run: Run) -> None:
    """Contract 7."""
    result = inspect(run)
    assert result.suspect is None
    assert [comparison.title for comparison in result.comparisons] == ["as loaded", "after a step and a sync"]
    for comparison in result.comparisons:
        assert len(comparison.samples) == 16
        assert len(comparison.sampled.values) == sum(sample.num_sampled for sample in comparison.samples)
        assert comparison.sampled.max < 1e-5
        assert comparison.prefill.max < 1e-5
        assert comparison.sampled.ess == pytest.approx(1.0, abs=1e-6)
    assert run.trainer.num_updates == 2
    assert run.version == 2


@pytest.mark.parametrize("wrong", [0.7, 1.3])
def test_another_temperature_in_the_trainer(run: Run, wrong: float) -> None:
    """Slime 557, OpenRLHF 857, trl 4873."""
    run.trainer.policy.temperature = wrong
    suspect = expect_suspect(inspect(run), "temperature")
    assert f"the trainer computes at {wrong}, the engine's logprobs fit 1.0" in suspect
    assert run.trainer.policy.temperature == wrong  # what was tried is put back


def test_another_temperature_in_the_engine(run: Run) -> None:
    """Slime 557: about half a nat off, on sampling alone; the rescoring is at the temperature that was asked for."""
    run.rollout = replace(run.rollout, temperature=0.5)
    result = inspect(run)
    assert "the trainer computes at 1.0, the engine's logprobs fit 0.5" in expect_suspect(result, "temperature")
    assert result.comparisons[-1].sampled.mean > 0.1
    assert result.comparisons[-1].prefill.max < 1e-5


def test_weights_that_changed_after_the_sync(run: Run) -> None:
    """Prime-rl 3004, slime 1695: found in the first comparison, before another sync mends it."""
    with torch.no_grad():
        run.trainer.parameters[3].mul_(1.5)
    result = inspect(run)
    assert len(result.comparisons) == 1
    name = [name for name, parameter in run.trainer.policy.model.named_parameters()][3]
    assert name in expect_suspect(result, "weights")


@pytest.mark.parametrize("name", [LAYER.format(1), "model.norm.weight"])
def test_a_tensor_that_the_sync_skips(run: Run, name: str) -> None:
    run.sync = FaultySync(run.sync, {name: dict(run.trainer.named_tensors())[name]})
    result = inspect(run)
    suspect = expect_suspect(result, "weights")
    assert result.comparisons[0].holds  # nothing had been trained yet: the old values were the right ones
    assert name in suspect
    assert suspect.count("other bits") == 1


def test_two_layers_that_the_sync_swaps(run: Run) -> None:
    first, second = LAYER.format(0), LAYER.format(1)
    weights = dict(run.trainer.named_tensors())
    run.sync = FaultySync(run.sync, {first: weights[second], second: weights[first]})
    suspect = expect_suspect(inspect(run), "weights")
    assert first in suspect
    assert second in suspect
    assert suspect.count("other bits") == 2


def test_answers_from_old_keys_and_values(run: Run) -> None:
    """Contract 6: weights and temperature are right, the engine's rescoring agrees, and only sampling doesn't."""
    run.rollout = replace(run.rollout, sampler=OldAnswers(run.rollout.sampler))
    result = inspect(run)
    expect_suspect(result, "cache")
    assert result.comparisons[0].holds


def test_an_engine_of_another_dtype_and_the_gate_of_bf16(tiny_model: Path, tmp_path: Path) -> None:
    """Slime 245, and what bf16 is allowed: a trainer in bf16 agrees with it as far as its own rounding lets it."""
    with EngineProcess(embedded_engine(tiny_model, "--dtype", "bfloat16")) as engine:
        sets = ["reward.name=arithmetic", "rollout.max_new_tokens=24", f"engine.url={engine.url}"]
        with build(make_config(tiny_model, tmp_path / "fp32", *sets), PlainView(quiet=True)) as run:
            suspect = expect_suspect(inspect(run), "dtype")
            assert suspect == "dtype: the trainer computes in float32, the engine in bfloat16"
        bf16 = make_config(tiny_model, tmp_path / "bf16", *sets, "model.dtype=bfloat16")
        with build(bf16, PlainView(quiet=True)) as run:
            result = inspect(run)
            assert result.suspect is None
            assert {comparison.gate.statistic for comparison in result.comparisons} == {"mean"}
            assert all(1e-5 < comparison.sampled.mean < 0.03 for comparison in result.comparisons)


def test_the_gate_of_bf16_follows_the_model_s_own_noise() -> None:
    deltas = Deltas.between([[0.04, -0.04]], [[0.0, 0.0]])
    assert deltas.mean == pytest.approx(0.04)
    assert not bf16_gate(0.001).holds(deltas)
    assert bf16_gate(0.021).holds(deltas)
    assert not bf16_gate(0.021).holds(Deltas.between([[float("nan")]], [[0.0]]))


def test_the_numbers_of_a_comparison() -> None:
    """By hand: differences 0, 0.5 and -1 nats at positions 0, 1 and 0."""
    deltas = Deltas.between([[-1.0, -1.5], [-3.0]], [[-1.0, -2.0], [-2.0]])
    assert deltas.values.tolist() == [0.0, 0.5, -1.0]
    assert deltas.mean == pytest.approx(0.5)
    assert (deltas.max, deltas.num_large) == (1.0, 2)
    assert deltas.k3 == pytest.approx((0 + (1.6487213 - 1.5) + (0.3678794 - 0.0)) / 3)
    assert deltas.ess == pytest.approx((1 + 1.6487213 + 0.3678794) ** 2 / (3 * (1 + 2.7182818 + 0.1353353)))
    assert deltas.within(1, 9).values.tolist() == [0.5]


def test_the_command_s_exit_code_is_the_verdict(
    tiny_model: Path, shared_engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["check-parity", "--model", str(tiny_model), "--engine-url", shared_engine, "--prompts", "2"]
    words += ["--set", "rollout.max_new_tokens=12"]
    children = own_children()
    assert nanorl(*words) == 0
    shown = capsys.readouterr().out
    assert shown.count("holds: ") == 2
    assert "suspect" not in shown

    def at_another_temperature(path: str, device: torch.device, temperature: float, autocast: torch.dtype) -> Policy:
        return load_policy(path, device, 0.8 * temperature, autocast)

    monkeypatch.setattr(build_room, "load_policy", at_another_temperature)
    assert nanorl(*words) == 1
    shown = capsys.readouterr().out
    assert "FAILS: as loaded" in shown
    assert "suspect: temperature: the trainer computes at 0.8" in shown
    assert own_children() == children
