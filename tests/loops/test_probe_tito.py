"""The stage as a whole: without an engine, with a real one over HTTP, and every check with its fault planted."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanorl.config import Config
from nanorl.config_load import load_config
from nanorl.engine.launcher import EngineProcess, embedded_engine
from nanorl.engine.protocol import FinishInfo, GenerateAnswer, MetaInfo
from nanorl.errors import ConfigError, EngineError, ModelError
from nanorl.loops import probe_checks
from nanorl.loops.probe import probe_tito
from nanorl.loops.probe_checks import Turn, check_slices, check_stored, random_turns
from nanorl.loops.probe_engine import answer_faults, prompt_faults
from nanorl.tokens.causes import Cause
from nanorl.tokens.probe import Harm
from nanorl.tracking.view import PlainView
from nanorl.train.batch import Batch, make_batch
from nanorl.types import Sample
from tests.tiny_models import build_tiny_model
from tests.tokens.small_tokenizer import CHATML

STRIPPED = CHATML.replace("if message.reasoning_content %}", "if message.reasoning_content and loop.last %}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineProcess]:
    with EngineProcess(embedded_engine(model)) as process:
        yield process


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `nanorl serve` of this machine's user must not be found."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def make_config(model: Path | str, url: str | None = None) -> Config:
    return load_config(None, ["rollout.max_new_tokens=12"], {"model.name": str(model), "engine.url": url})


def test_without_an_engine_tokenizer_and_template_are_probed(model: Path, capsys: pytest.CaptureFixture[str]):
    result = probe_tito(make_config(model), PlainView(), num_samples=40, use_engine=False)
    assert result.exit_code == 0
    assert [report.num_sequences for report in result.drift] == [40, 40, 40]
    shown = capsys.readouterr().out
    assert "engine=none" in shown
    assert "nanorl never re-encodes" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80
    assert shown.count("SAFE") == 2


def test_a_tokenizer_alone_is_enough_without_an_engine(model: Path, tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (model / name).exists():
            (tmp_path / name).write_bytes((model / name).read_bytes())
    assert probe_tito(make_config(tmp_path), PlainView(quiet=True), num_samples=8, use_engine=False).exit_code == 0


def test_with_an_engine_what_it_sampled_comes_back_id_for_id(
    model: Path, engine: EngineProcess, capsys: pytest.CaptureFixture[str]
):
    """Trl 5242: the ids go over HTTP and back; a random model writes bytes that would all drift."""
    result = probe_tito(make_config(model, engine.url), PlainView(), num_samples=16)
    assert result.exit_code == 0
    assert [check.num_checked for check in result.checks] == [32, 32, 16, 16]
    assert all(check.passed for check in result.checks)
    sampled = result.drift[0]
    assert (sampled.kind, sampled.num_sequences) == ("sampled by the model", 16)
    assert sampled.share > 0.5
    shown = capsys.readouterr().out
    assert f"given) {engine.url}" in shown
    assert "re-encoded ids" in shown


def test_its_own_engine_is_started_and_stopped(model: Path, capsys: pytest.CaptureFixture[str]):
    result = probe_tito(make_config(model), PlainView(), num_samples=8)
    assert result.exit_code == 0
    url = capsys.readouterr().out.split("(own) ")[1].split()[0]
    with pytest.raises(EngineError, match="nothing listens"):
        probe_tito(make_config(model, url), PlainView(quiet=True), num_samples=8)


def test_an_unsafe_template_is_exit_code_1_with_its_cause(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Prime-rl 1334: a template that strips reasoning."""
    (tmp_path / "stripped.jinja").write_text(STRIPPED, encoding="utf-8")
    result = probe_tito(
        make_config(model),
        PlainView(),
        num_samples=8,
        use_engine=False,
        template_file=tmp_path / "stripped.jinja",
    )
    assert result.exit_code == 1
    assert result.single_turn_safe
    assert result.template.causes(Harm.SEVERAL_TURNS) == [Cause.REASONING_DROPPED]
    verdict = capsys.readouterr().out.split("Verdict")[1]
    assert "several turns  UNSAFE" in verdict
    assert "reasoning of earlier turns is dropped" in verdict


def test_an_engine_that_serves_another_model_is_refused(engine: EngineProcess, tmp_path: Path):
    other = build_tiny_model(tmp_path / "other")
    with pytest.raises(EngineError, match=r"serves .*/m, but the tokens .*/other\. Pass --model"):
        probe_tito(make_config(other, engine.url), PlainView(quiet=True), num_samples=8)


def test_bad_input_says_what_to_do(model: Path, tmp_path: Path):
    view = PlainView(quiet=True)
    with pytest.raises(ModelError, match="tokenizer"):
        probe_tito(make_config(tmp_path), view, use_engine=False)
    with pytest.raises(ConfigError, match="chat template"):
        probe_tito(make_config(model), view, use_engine=False, template_file=tmp_path / "missing.jinja")
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        probe_tito(make_config(tmp_path), view, num_samples=8, use_engine=False)


def test_a_batch_that_shifts_wrongly_is_found(monkeypatch: pytest.MonkeyPatch):
    """Trl 3681, planted: the mask of every row one position late."""
    turns = random_turns(range(3, 50), 20, seed=0)
    assert check_slices(turns).passed

    def shifted(samples: list[Sample]) -> Batch:
        batch = make_batch(samples)
        return replace(batch, loss_mask=torch.roll(batch.loss_mask, 1, dims=1))

    monkeypatch.setattr(probe_checks, "make_batch", shifted)
    check = check_slices(turns)
    assert not check.passed
    assert len(check.faults) == sum(bool(turn.completion.token_ids) for turn in turns)
    assert "the mask should be" in check.faults[0]


def test_a_sample_that_lost_its_stop_token_is_found(monkeypatch: pytest.MonkeyPatch):
    """AReaL 846, planted: the last sampled id is stripped."""
    turns = random_turns(range(3, 50), 20, seed=0)
    assert check_stored(turns).passed

    def stripped(turns: list[Turn]) -> list[Sample]:
        samples = [Sample.from_completion(str(i), 0, t.prompt_ids, t.completion) for i, t in enumerate(turns)]
        return [
            replace(
                s,
                token_ids=s.token_ids[:-1],
                loss_mask=s.loss_mask[:-1],
                rollout_logprobs=s.rollout_logprobs[:-1],
                weight_versions=(),
            )
            for s in samples
        ]

    monkeypatch.setattr(probe_checks, "_samples", stripped)
    assert len(check_stored(turns).faults) == 20


def test_nothing_checked_is_nothing_passed():
    assert not check_slices([]).passed


def answer(prompt: list[int], sampled: list[int], **changes: object) -> GenerateAnswer:
    """What an honest engine answers, but for the changes."""
    facts = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "input_token_logprobs": [(None if i == 0 else -1.0, token, None) for i, token in enumerate(prompt)],
        "output_token_logprobs": [(-1.0, token, None) for token in sampled],
        **changes,
    }
    output_ids = facts.pop("output_ids", sampled)
    meta = MetaInfo(id="0", finish_reason=FinishInfo(type="stop"), **facts)  # pyright: ignore[reportArgumentType]
    return GenerateAnswer(output_ids=output_ids, meta_info=meta)  # pyright: ignore[reportArgumentType]


PROMPT, SAMPLED, LAST_ID = [5, 6, 7], [8, 2], 99


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"prompt_tokens": 4}, "3 prompt ids were sent, the engine counts 4"),  # an engine that adds a BOS (sglang 888)
        ({"output_ids": [8]}, "are not the ids of output_token_logprobs"),
        ({"completion_tokens": 3}, "the engine counts 3 sampled tokens, 2 have a logprob"),
    ],
)
def test_an_answer_that_contradicts_itself_is_found(changes: dict[str, object], expected: str | None):
    faults = answer_faults(PROMPT, answer(PROMPT, SAMPLED, **changes))
    assert faults == [] if expected is None else expected in faults[0]


def test_an_engine_that_names_other_ids_is_found():
    assert prompt_faults(PROMPT, answer(PROMPT, SAMPLED), LAST_ID) == []
    merged = prompt_faults(PROMPT, answer([5, 67], SAMPLED), LAST_ID)
    assert merged == [
        "3 ids were sent, the engine counts 2",
        "from position 1 on the engine names other ids than were sent",
    ]
    assert len(prompt_faults(PROMPT, answer([5, 6, 0], SAMPLED), LAST_ID)) == 1


def test_the_vocabulary_s_last_id_may_be_named_0():
    """SGLang writes 0 there, for the sake of images; it has computed on the id that was sent."""
    assert prompt_faults([5, 99, 7], answer([5, 0, 7], SAMPLED), LAST_ID) == []
    assert len(prompt_faults([5, 98, 7], answer([5, 0, 7], SAMPLED), LAST_ID)) == 1
