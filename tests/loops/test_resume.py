"""Going on exactly where a run stood: 6 steps are 3 and 3 more, bit for bit; and what can't be gone on with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nanorl.config_load import load_config
from nanorl.errors import NanoRLError
from nanorl.loops.saved import saved_config
from nanorl.loops.train import TrainResult, train
from nanorl.tracking.rollouts import rollout_steps
from nanorl.tracking.view import PlainView
from nanorl.train.checkpoint import checkpoint_path, list_checkpoints, read_state
from nanorl.types import StepReport
from tests.loops.commands import nanorl, own_children
from tests.loops.test_train import groups_of, make_config, metrics_of, without_times

LIVELY = ["train.lr=1e-2", "train.warmup_steps=9", "run.checkpoint_every=3"]
"""Weights that wander far, and a learning rate that differs in each step: a resume that forgets either shows."""


class Interrupted(Exception):  # noqa: N818 it stands for a death, not for an error
    """The end of a process in the middle of a run."""


class EndsAfter(PlainView):
    """Ends the run as soon as the given step is recorded."""

    def __init__(self, step: int) -> None:
        super().__init__(quiet=True)
        self.last = step

    def step(self, report: StepReport, steps: int) -> None:
        if report.step == self.last:
            raise Interrupted


def resume(folder: Path, *sets: str, step: str = "latest") -> TrainResult:
    """As `nanorl train --resume STEP --run-dir FOLDER` does it."""
    config = load_config(None, sets, {"run.resume": step}, saved_config(str(folder)))
    return train(config, PlainView(quiet=True))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(tiny_model: Path, shared_engine: str, home: Path) -> tuple[Path, TrainResult]:
    """Six steps at one go."""
    config = make_config(tiny_model, home / "whole", *LIVELY, "run.steps=6", f"engine.url={shared_engine}")
    return home / "whole", train(config, PlainView(quiet=True))


@pytest.fixture(scope="module")
def three(tiny_model: Path, shared_engine: str, home: Path) -> Path:
    """The first three steps of the same run; not to be changed."""
    config = make_config(tiny_model, home / "three", *LIVELY, "run.steps=3", f"engine.url={shared_engine}")
    train(config, PlainView(quiet=True))
    return home / "three"


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "copy"))


def expect_the_same(folder: Path, whole: Path) -> None:
    """Metrics, rollouts, and every file of the last checkpoint."""
    assert [row["step"] for row in metrics_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert without_times(metrics_of(folder)) == without_times(metrics_of(whole))
    assert rollout_steps(folder / "rollouts") == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        assert groups_of(folder, step) == groups_of(whole, step)
    # The state has the hash of each file: weights, optimizer; and the generator, the data position, the version.
    assert read_state(checkpoint_path(folder / "checkpoints", 6)) == read_state(
        checkpoint_path(whole / "checkpoints", 6)
    )


def test_six_steps_are_three_and_three(whole: tuple[Path, TrainResult], copy: Path) -> None:
    """Contract 9; prime-rl 3164, verl 4156. The engine has seen other weights in between: those of the whole run."""
    result = resume(copy, "run.steps=6")
    assert [report.step for report in result.reports] == [4, 5, 6]
    expect_the_same(copy, whole[0])
    assert result.after == whole[1].after
    weights = load_file(checkpoint_path(copy / "checkpoints", 6) / "model.safetensors")
    before = load_file(checkpoint_path(copy / "checkpoints", 3) / "model.safetensors")
    assert weights.keys() == before.keys()
    assert all((weights[name] != before[name]).any() for name in weights)
    assert saved_config(str(copy)).run.steps == 6


def test_the_engine_has_the_resumed_weights_before_the_first_sample(
    whole: tuple[Path, TrainResult], copy: Path
) -> None:
    """prime-rl 3004, slime 1695: the engine held another run's weights, and the model's own are far away by now."""
    resume(copy, "run.steps=4")
    row = metrics_of(copy)[3]
    assert (row["step"], row["weight_version"]) == (4, 5)
    assert 0 < row["train/mismatch/max"] < 1e-5
    for group in groups_of(copy, 4):
        for sample in group.samples:
            assert {span.version for span in sample.weight_versions} == {4}


def test_what_a_dead_run_lost_is_sampled_again_and_not_doubled(
    whole: tuple[Path, TrainResult], tiny_model: Path, shared_engine: str, tmp_path: Path
) -> None:
    """prime-rl 3164, verl 4156: dead after step 4, with a checkpoint at 3, while a line was being written."""
    folder = tmp_path / "dead"
    config = make_config(tiny_model, folder, *LIVELY, "run.steps=6", f"engine.url={shared_engine}")
    with pytest.raises(Interrupted):
        train(config, EndsAfter(4))
    assert [row["step"] for row in metrics_of(folder)] == [1, 2, 3, 4]
    assert rollout_steps(folder / "rollouts") == [1, 2, 3, 4]
    assert list_checkpoints(folder / "checkpoints") == [3]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "weight_ver')
    resume(folder)
    expect_the_same(folder, whole[0])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words", "message"),
    [
        (lambda run: flip_a_bit(run / "checkpoints/step-00003/model.safetensors"), [], "damaged: model.safetensors"),
        (lambda run: cut_in_half(run / "checkpoints/step-00003/optimizer.safetensors"), [], "damaged: optimizer"),
        (lambda run: cut_in_half(run / "checkpoints/step-00003/state.json"), [], "Expected a complete checkpoint"),
        (lambda run: (run / "checkpoints/step-00003/state.json").unlink(), [], "it has none"),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "it has none"),
        (lambda run: cut_in_half(run / "config.json"), [], "Expected a configuration in JSON"),
        (lambda run: (run / "versions.json").unlink(), [], "where no run is"),
        (lambda run: None, ["--lr", "0.5"], "other settings in train"),
        (lambda run: None, ["--temperature", "0.5", "--group-size", "8"], "other settings in rollout"),
        (lambda run: None, ["--seed", "9"], "other settings in run.seed"),
        (lambda run: None, ["--steps", "3"], "done 3 steps already"),
    ],
)
def test_what_can_t_be_resumed_is_refused_and_untouched(
    copy: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], words: list[str], message: str
) -> None:
    """prime-rl 2304: a run folder of another config; corrupt and half-written checkpoints. Nothing is cut off it."""
    damage(copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    children = own_children()
    assert nanorl("train", "--steps", "6", "--run-dir", str(copy), "--resume", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert own_children() == children


def test_a_step_without_a_checkpoint_names_those_that_are_there(copy: Path) -> None:
    with pytest.raises(NanoRLError, match=r"checkpoint '2' in .*there are those of steps 3\."):
        resume(copy, "run.steps=6", step="2")


def test_a_used_folder_is_neither_mixed_nor_lost_without_being_asked(
    three: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """prime-rl 2304."""
    before = (three / "metrics.jsonl").read_bytes()
    assert nanorl("train", "--steps", "1", "--model", str(tiny_model), "--run-dir", str(three)) == 2
    assert "is used already" in capsys.readouterr().err
    assert (three / "metrics.jsonl").read_bytes() == before


def test_overwrite_leaves_nothing_of_the_earlier_run(copy: Path, tiny_model: Path, shared_engine: str) -> None:
    """prime-rl 2304: old rollouts mixed into a fresh run's."""
    config = make_config(tiny_model, copy, "run.steps=1", "run.overwrite=true", f"engine.url={shared_engine}")
    train(config, PlainView(quiet=True))
    assert [row["step"] for row in metrics_of(copy)] == [1]
    assert rollout_steps(copy / "rollouts") == [1]
    assert list_checkpoints(copy / "checkpoints") == [1]
    assert json.loads((copy / "config.json").read_text())["train"]["lr"] == 1e-3
