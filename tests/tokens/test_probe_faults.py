"""The template's verdict on a template that is right, and on the same one with one fault planted at a time."""

from collections.abc import Mapping
from typing import NamedTuple

import pytest

from nanorl.errors import ModelError
from nanorl.tokens.causes import Cause
from nanorl.tokens.drift import Tokenizer
from nanorl.tokens.probe import Finding, Harm, TemplateReport, probe_template
from tests.tokens.small_tokenizer import CHATML, build_small_tokenizer

HARMLESS = {Cause.WHITESPACE}
"""What the small tokenizer itself does: it merges the template's newline with a space that was sampled."""


class Fault(NamedTuple):
    """A change of the template, and what must be said of it."""

    old: str
    new: str
    cause: Cause
    harm: Harm


CONTENT = "{{- message.content }}"
END = r"{{- '<|im_end|>\n' }}"
FAULTS: Mapping[str, Fault] = {
    "strips reasoning": Fault(
        "if message.reasoning_content %}",
        "if message.reasoning_content and loop.last %}",
        Cause.REASONING_DROPPED,
        Harm.SEVERAL_TURNS,
    ),
    "empty think block": Fault(
        CONTENT,
        r"{{- ('<think>\n</think>' if loop.last and message.role == 'assistant' else '') + message.content }}",
        Cause.EMPTY_THINK,
        Harm.SEVERAL_TURNS,
    ),
    "end token": Fault(
        END,
        r"{{- '<|endoftext|>' if loop.last and message.role == 'assistant' else '<|im_end|>\n' }}",
        Cause.END_TOKEN,
        Harm.SEVERAL_TURNS,
    ),
    "last turn": Fault(
        CONTENT,
        "{{- message.content + (' (draft)' if loop.last and message.role == 'assistant' else '') }}",
        Cause.LAST_TURN,
        Harm.SEVERAL_TURNS,
    ),
    "generation prompt": Fault(
        r"{{- '<|im_start|>assistant\n' }}",
        r"{{- '<|im_start|>assistant\nSure: ' }}",
        Cause.GENERATION_PROMPT,
        Harm.SEVERAL_TURNS,
    ),
    "rewrites": Fault(
        CONTENT,
        "{{- message.content | upper if message.role == 'user' and loop.revindex > 4 else message.content }}",
        Cause.REWRITTEN,
        Harm.SEVERAL_TURNS,
    ),
    "first call only": Fault(
        "message.tool_calls or []", "(message.tool_calls or [])[:1]", Cause.CALLS_DROPPED, Harm.SEVERAL_TURNS
    ),
    "cuts results": Fault(
        CONTENT,
        "{{- message.content[:8] if message.role == 'tool' else message.content }}",
        Cause.TEXT_DROPPED,
        Harm.SEVERAL_TURNS,
    ),
    "two BOS": Fault("{{- bos_token }}", "{{- bos_token + bos_token }}", Cause.DOUBLE_BOS, Harm.EVERYTHING),
    "one question": Fault(
        "{{- bos_token }}",
        "{{- bos_token if messages[2:] == [] else raise_exception('one question only') }}",
        Cause.REFUSED,
        Harm.SEVERAL_TURNS,
    ),
    "no question": Fault("{{- bos_token }}", "{{- raise_exception('none') }}", Cause.REFUSED, Harm.EVERYTHING),
    "date": Fault(
        CONTENT,
        "{{- message.content + (strftime_now('%Y-%m-%d') if message.role == 'user' else '') }}",
        Cause.DATE,
        Harm.NONE,
    ),
    "default system": Fault(
        "{{- bos_token }}",
        r"{{- bos_token + ('' if messages[0].role == 'system' else '<|im_start|>system\nBe kind.<|im_end|>\n') }}",
        Cause.DEFAULT_SYSTEM,
        Harm.NONE,
    ),
    "no tools": Fault("message.tool_calls or []", "[]", Cause.NO_TOOLS, Harm.NONE),
    "results share a turn": Fault(
        END,
        "{%- if message.role != 'tool' or loop.last or messages[loop.index].role != 'tool' %}" + END + "{%- endif %}",
        Cause.PARALLEL_RESULTS,
        Harm.NONE,
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_small_tokenizer()


def planted(name: str) -> str:
    fault = FAULTS[name]
    assert CHATML.count(fault.old) == 1, "the fault must be planted exactly once"
    return CHATML.replace(fault.old, fault.new)


def first(report: TemplateReport, cause: Cause) -> Finding:
    return next(finding for finding in report.findings if finding.cause == cause)


def test_a_template_that_keeps_everything_is_safe(tokenizer: Tokenizer):
    report = probe_template(tokenizer)
    assert {finding.cause for finding in report.findings} == HARMLESS
    assert report.single_turn_safe
    assert report.multi_turn_safe
    assert len(report.conversations) == 8
    assert all(each.is_safe for each in report.conversations)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_and_forbids_what_it_breaks(tokenizer: Tokenizer, name: str):
    """prime-rl 1334, verl 6854: found and named before any training."""
    fault = FAULTS[name]
    report = probe_template(tokenizer, source=planted(name))
    found = {finding.cause for finding in report.findings} - HARMLESS
    assert fault.cause in found
    # Whatever else is said (results rendered anew as part of a refused conversation, say) must not be worse.
    assert max(finding.harm for finding in report.findings) == fault.harm
    assert {f.cause for f in report.findings if f.harm == fault.harm > Harm.NONE} <= {fault.cause}
    assert report.single_turn_safe == (fault.harm < Harm.EVERYTHING)
    assert report.multi_turn_safe == (fault.harm < Harm.SEVERAL_TURNS)
    if fault.harm is Harm.NONE:
        assert found == {fault.cause}


def test_a_finding_names_the_first_differing_token_and_turn(tokenizer: Tokenizer):
    """trl 5242's kind: the place, not only the fact."""
    report = probe_template(tokenizer, source=planted("strips reasoning"))
    finding = first(report, Cause.REASONING_DROPPED)
    assert (finding.conversation, finding.turn) == ("reasoning", 2)
    assert finding.token is not None
    conversation = next(each for each in report.conversations if each.conversation.name == "reasoning")
    pair = next(pair for pair in conversation.pairs if pair.is_text_break)
    before = tokenizer.encode(pair.prefix.context, add_special_tokens=False)
    assert tokenizer.decode(before, skip_special_tokens=False, clean_up_tokenization_spaces=False).endswith(
        "assistant\n"
    )
    assert pair.prefix.shorter_has.startswith("<think>Two and three")
    assert pair.prefix.longer_has.startswith("The answer is 5.")


def test_a_rewritten_question_is_found_in_the_message_that_changed(tokenizer: Tokenizer):
    report = probe_template(tokenizer, source=planted("rewrites"))
    findings = [finding for finding in report.findings if finding.cause == Cause.REWRITTEN]
    assert {finding.turn for finding in findings if finding.conversation == "tools"} == {1}
    assert all(
        "WEATHER" in finding.detail or "EATHER" in finding.detail
        for finding in findings
        if "tools" in finding.conversation
    )


def test_only_what_is_broken_is_counted(tokenizer: Tokenizer):
    report = probe_template(tokenizer, source=planted("strips reasoning"))
    broken = {each.conversation.name for each in report.conversations if not each.is_safe}
    assert broken == {"reasoning", "tools, reasoning"}


def test_options_reach_the_template(tokenizer: Tokenizer):
    """A template that can be told to keep reasoning is safe with that option and unsafe without."""
    source = planted("strips reasoning").replace("and loop.last %}", "and (keep or loop.last) %}")
    assert not probe_template(tokenizer, source=source).multi_turn_safe
    assert probe_template(tokenizer, source=source, options={"keep": True}).multi_turn_safe


def test_a_tokenizer_without_a_template_is_an_error_that_says_what_to_do():
    tokenizer = build_small_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"no chat template.*chat_template\.jinja"):
        probe_template(tokenizer)
