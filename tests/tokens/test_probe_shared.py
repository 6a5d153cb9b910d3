"""Real tokenizers and templates: every pair, extension and drift count against ground truth made by others."""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from nanorl.tokens import drift
from nanorl.tokens.causes import Cause
from nanorl.tokens.prefix import Conversation, PairCheck
from nanorl.tokens.probe import Harm, TemplateReport, probe_template

SHARED = Path(__file__).parents[3] / "shared" / "tokenizers"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/tokenizers")

THINK, EMPTY = Cause.REASONING_DROPPED, Cause.EMPTY_THINK
TEMPLATES: dict[tuple[str, str], list[Cause]] = {
    ("smollm2", "chat_template.jinja"): [],
    ("qwen3", "chat_template.jinja"): [THINK, EMPTY],
    ("qwen3", "chat_template_training.jinja"): [],
    ("qwen3", "chat_template_instruct2507.jinja"): [],
    ("gptoss", "chat_template.jinja"): [THINK, Cause.END_TOKEN, Cause.CALLS_DROPPED],
}
"""(tokenizer, template) -> the causes that forbid several turns; none: safe."""


class Truth(NamedTuple):
    """One template's ground truth and what the probe says of the same conversations."""

    cases: dict[str, Any]
    report: TemplateReport


@cache
def tokenizer_of(name: str) -> drift.Tokenizer:
    from transformers import AutoTokenizer

    return cast("drift.Tokenizer", AutoTokenizer.from_pretrained(SHARED / name))


@cache
def cases_of(name: str) -> dict[str, Any]:
    return json.loads((SHARED / f"cases-{name}.json").read_text(encoding="utf-8"))


def source_of(name: str, file: str) -> str:
    """The template, its clock stopped as the ground truth's is."""
    source = (SHARED / name / file).read_text(encoding="utf-8")
    return source.replace('strftime_now("%Y-%m-%d")', '"2025-01-01"')


@cache
def truth_of(name: str, file: str) -> Truth:
    template = cases_of(name)["templates"][file]
    tools = next((tuple(case["tools"]) for case in template["tito"] if case.get("tools")), ())
    own = [
        Conversation(each["conversation"], tuple(each["messages"]), tools if each["tools"] else ())
        for each in template["prefix_stability"]
    ]
    report = probe_template(tokenizer_of(name), source=source_of(name, file), own_conversations=own)
    return Truth(template, report)


def pairs_of(report: TemplateReport, name: str, *kinds: str) -> Iterator[PairCheck]:
    (found,) = [each for each in report.conversations if each.conversation.name == name]
    return (pair for pair in found.pairs if pair.kind in kinds)


def same(pair: PairCheck, expected: dict[str, Any]) -> None:
    """Both verdicts and the place; a place of text is given where the text breaks, one of tokens where only they do."""
    check = pair.prefix
    assert (check.string_prefix, check.token_prefix) == (expected["string_prefix"], expected["token_prefix"])
    for field in ("diverge_char", "diverge_token", "shorter_has", "longer_has"):
        if field in expected:
            assert getattr(check, field) == expected[field]
    assert check.context.endswith(expected.get("context_before", ""))


@pytest.mark.parametrize(("name", "file"), TEMPLATES)
def test_every_pair_agrees(name: str, file: str):
    truth, report = truth_of(name, file)
    num_pairs = 0
    for each in truth["prefix_stability"]:
        got = list(pairs_of(report, each["conversation"], "growth"))
        keys = [(pair.shorter, pair.generation_prompt) for pair in got]
        assert keys == [(pair["k"], pair["add_generation_prompt"]) for pair in each["pairs"]]
        for pair, expected in zip(got, each["pairs"], strict=True):
            same(pair, expected)
        num_pairs += len(got)
    assert num_pairs in (67, 68)


@pytest.mark.parametrize(("name", "file"), TEMPLATES)
def test_every_extension_agrees(name: str, file: str):
    truth, report = truth_of(name, file)
    num_extensions = 0
    for each in truth["prefix_stability"]:
        got = list(pairs_of(report, each["conversation"], "prompt", "turn"))
        for i, expected in enumerate(each["rollout_extension"]):
            prompt, turn = got[2 * i : 2 * i + 2]
            assert (prompt.kind, turn.kind) == ("prompt", "turn")
            assert (prompt.shorter, turn.shorter) == (expected["assistant"], expected["assistant"] + 1)
            assert prompt.longer == turn.longer == expected["next_prompt_messages"]
            same(prompt, expected["prompt"])
            same(turn, expected["prompt_plus_turn"])
        assert len(got) == 2 * len(each["rollout_extension"])
        num_extensions += len(got) // 2
    assert num_extensions == 14


@pytest.mark.parametrize(("name", "file"), TEMPLATES)
@pytest.mark.parametrize("built_in", [True, False], ids=["built-in", "theirs"])
def test_the_verdict_and_its_causes(name: str, file: str, built_in: bool):
    """The same verdict on our conversations as on the ground truth's."""
    truth = truth_of(name, file).report
    report = probe_template(tokenizer_of(name), source=source_of(name, file)) if built_in else truth
    assert report.single_turn_safe
    assert report.causes(Harm.SEVERAL_TURNS) == TEMPLATES[name, file]
    assert report.multi_turn_safe == (not TEMPLATES[name, file])


def test_harmless_causes_are_named_too():
    """What breaks only for those who re-encode, or who append parallel results one by one."""
    whitespace = [f for f in truth_of("smollm2", "chat_template.jinja").report.findings if f.cause == Cause.WHITESPACE]
    assert {(finding.conversation, finding.turn, finding.token) for finding in whitespace} == {("whitespace", 1, 33)}
    assert Cause.DEFAULT_SYSTEM in truth_of("smollm2", "chat_template.jinja").report.causes(Harm.NONE)
    for file in ("chat_template_training.jinja", "chat_template_instruct2507.jinja"):
        findings = truth_of("qwen3", file).report.findings
        assert {finding.cause for finding in findings} == {Cause.PARALLEL_RESULTS}


def test_the_clock_is_seen():
    source = (SHARED / "gptoss" / "chat_template.jinja").read_text(encoding="utf-8")
    assert Cause.DATE in probe_template(tokenizer_of("gptoss"), source=source).causes(Harm.NONE)
    assert Cause.DATE not in truth_of("gptoss", "chat_template.jinja").report.causes(Harm.NONE)


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "gptoss"])
@pytest.mark.parametrize("kind", ["random_printable", "random_all_nonadded"])
def test_the_same_random_sequences_drift(name: str, kind: str):
    """Trl 5242, on real vocabularies: a fifth of random sequences would come back as other ids."""
    expected = cases_of(name)["drift"][kind]
    tokenizer = tokenizer_of(name)
    pool = drift.printable_ids(tokenizer) if kind == "random_printable" else drift.learned_ids(tokenizer)
    assert (len(pool), _sha256(pool)) == (expected["pool_size"], expected["pool_sha256"])
    sequences = drift.random_sequences(pool, expected["n"], expected["length"], expected["seed"])
    assert sequences[0] == expected["first_sample"]
    report = drift.measure_drift(tokenizer, kind, sequences)
    assert len(report.drifted) == expected["drifted"]
    assert _sha256(list(report.drifted)) == expected["drifted_indices_sha256"]
    assert report.num_text_lost == expected["drifted_with_text_loss"]


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "gptoss"])
def test_examples_and_controls(name: str):
    tokenizer = tokenizer_of(name)
    for example in cases_of(name)["drift"]["examples"]:
        trip = drift.round_trip(tokenizer, example["ids"])
        assert trip.drifted
        assert trip.text == example["text"]
        assert list(trip.reencoded_ids) == example["reencoded_ids"]
        assert trip.text_survives == example["text_survives"]
    for control in cases_of(name)["drift"]["stable_controls"]:
        assert not drift.round_trip(tokenizer, control["ids"]).drifted


def _sha256(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()
