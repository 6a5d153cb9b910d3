"""The template's verdict: may single turns be trained on, may several turns be?

A single turn is safe where its prompt can be rendered: what is sampled is appended, never rendered again. Several turns
are safe where the template would show each next prompt as an extension of what was sampled before
(`nanorl.tokens.prefix`), and leaves nothing out. A difference that only re-encoding shows is harmless: nanorl keeps the
ids and appends to them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from nanorl.errors import TokenizationError
from nanorl.tokens.causes import Cause, name_causes
from nanorl.tokens.conversations import conversations
from nanorl.tokens.drift import Tokenizer
from nanorl.tokens.prefix import (
    Conversation,
    PairCheck,
    check_extension,
    check_growth,
    common_length,
    diverging_turn,
)
from nanorl.tokens.template import USER, ChatTemplate, Flavour, detect_flavour
from nanorl.types import Message


class Harm(IntEnum):
    """What a finding forbids."""

    NONE = 0
    """Nothing, as long as ids are appended."""
    SEVERAL_TURNS = 1
    EVERYTHING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause at one place."""

    cause: Cause
    harm: Harm
    conversation: str = ""
    """Its name; empty where the cause belongs to no conversation."""
    turn: int | None = None
    """Index of the message."""
    token: int | None = None
    """Index of the first differing id in the shorter rendering."""
    detail: str = ""
    """Both texts from there on, or what the template said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationReport:
    """All pairs of one conversation."""

    conversation: Conversation
    pairs: tuple[PairCheck, ...]

    def count(self, kind: str) -> tuple[int, int]:
        """(pairs of the kind that break as text, all of the kind)."""
        pairs = [pair for pair in self.pairs if pair.kind == kind]
        return sum(pair.is_text_break for pair in pairs), len(pairs)

    @property
    def is_safe(self) -> bool:
        """Whether each turn's prompt extends what was sampled before."""
        return not any(pair.is_text_break for pair in self.pairs if pair.kind != "growth")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What a template does to conversations."""

    flavour: Flavour
    conversations: tuple[ConversationReport, ...]
    findings: tuple[Finding, ...]

    @property
    def single_turn_safe(self) -> bool:
        """Whether nothing forbids everything."""
        return all(finding.harm < Harm.EVERYTHING for finding in self.findings)

    @property
    def multi_turn_safe(self) -> bool:
        """Whether nothing forbids several turns."""
        return all(finding.harm < Harm.SEVERAL_TURNS for finding in self.findings)

    def causes(self, least: Harm) -> list[Cause]:
        """Distinct causes of at least that harm, in order of `Cause`."""
        found = {finding.cause for finding in self.findings if finding.harm >= least}
        return [cause for cause in Cause if cause in found]


def probe_template(
    tokenizer: Tokenizer,
    *,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    own_conversations: Sequence[Conversation] | None = None,
) -> TemplateReport:
    """Renders conversations piece by piece and says what is safe.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        source: another template than the tokenizer's own.
        options: template variables as training passes them.
        own_conversations: instead of the built-in ones; spelled as the template wants them.

    Raises:
        ModelError: there is no template.
    """
    template = ChatTemplate(tokenizer, source, options or {})
    flavour = detect_flavour(template)
    reports: list[ConversationReport] = []
    findings = list(_check_whole(template, flavour))
    for conversation in conversations(flavour) if own_conversations is None else own_conversations:
        try:
            growth = check_growth(conversation, template.render, template.encode)
            pairs = (*growth, *check_extension(conversation, template.render, template.encode))
        except TokenizationError as error:
            findings.append(_refused(template, conversation, error))
            continue
        reports.append(ConversationReport(conversation=conversation, pairs=pairs))
        findings += _explain(pairs, template)
        findings += _find_dropped(conversation, template)
    return TemplateReport(flavour=flavour, conversations=tuple(reports), findings=tuple(findings))


def _explain(pairs: Iterable[PairCheck], template: ChatTemplate) -> Iterator[Finding]:
    marks = [str(token) for token in template.tokenizer.added_tokens_decoder.values()]
    for pair in pairs:
        if not (pair.is_text_break or pair.is_token_break):
            continue
        turn = diverging_turn(pair, template.render)
        # Growth alone does no harm: a turn's breaks show again as extension breaks, parallel results are added at once.
        harm = Harm.SEVERAL_TURNS if pair.is_text_break and pair.kind != "growth" else Harm.NONE
        check = pair.prefix
        for cause in name_causes(pair, turn, template.render, marks):
            yield Finding(
                cause=cause,
                harm=harm,
                conversation=pair.conversation.name,
                turn=turn,
                token=check.diverge_token,
                detail=f"{check.shorter_has!r} becomes {check.longer_has!r}" if pair.is_text_break else "",
            )


def _find_dropped(conversation: Conversation, template: ChatTemplate) -> Iterator[Finding]:
    """Content and tool calls that the template leaves out, where it renders the message alone at the end."""
    for i, message in enumerate(conversation.messages):
        text = template.render(conversation, i + 1, False)
        content = str(message.get("content") or "").split("</think>")[-1].strip()
        if content not in text and json.dumps(content)[1:-1] not in text:
            yield _dropped(Cause.TEXT_DROPPED, conversation, i, repr(content))
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        before = template.render(conversation, i, False) if names and i else ""
        missing = [name for name in names if text.count(name) <= before.count(name)]
        if missing:
            yield _dropped(Cause.CALLS_DROPPED, conversation, i, f"no call of {', '.join(missing)} in the text")


def _dropped(cause: Cause, conversation: Conversation, turn: int, detail: str) -> Finding:
    return Finding(cause=cause, harm=Harm.SEVERAL_TURNS, conversation=conversation.name, turn=turn, detail=detail)


def _refused(template: ChatTemplate, conversation: Conversation, error: TokenizationError) -> Finding:
    """A question must be taken, and another after its answer; tools and a system message need not be."""
    harm = Harm.NONE
    if {message["role"] for message in conversation.messages} <= {"user", "assistant"} and not conversation.tools:
        harm = Harm.SEVERAL_TURNS
    try:
        template.render_messages([USER], add_generation_prompt=True)
    except TokenizationError:
        harm = Harm.EVERYTHING
    return Finding(cause=Cause.REFUSED, harm=harm, conversation=conversation.name, detail=str(error.__cause__ or error))


def _check_whole(template: ChatTemplate, flavour: Flavour) -> Iterator[Finding]:
    """What belongs to the template and to no conversation."""
    try:
        prompt = template.render_messages([USER], add_generation_prompt=True)
    except TokenizationError:
        return  # each conversation says so
    bos = template.tokenizer.bos_token or ""
    bos_ids = template.encode(bos)
    if len(bos_ids) == 1 and template.encode(prompt)[:2] == bos_ids * 2:
        yield Finding(cause=Cause.DOUBLE_BOS, harm=Harm.EVERYTHING, token=1, detail=repr(prompt[:40]))
    default = _default_system(template, prompt, bos)
    if default:
        yield Finding(cause=Cause.DEFAULT_SYSTEM, harm=Harm.NONE, turn=0, detail=repr(default))
    days = [replace(template, date=date).render_messages([USER]) for date in ("2001-02-03", "2032-11-30")]
    if days[0] != days[1]:
        yield Finding(cause=Cause.DATE, harm=Harm.NONE, turn=0, detail="one run's prompts differ from day to day")
    if not flavour.native_tools:
        yield Finding(cause=Cause.NO_TOOLS, harm=Harm.NONE)


def _default_system(template: ChatTemplate, prompt: str, bos: str) -> str:
    """What stands before the first user message that does not stand before a later one."""
    again: list[Message] = [USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye."}]
    try:
        later = template.render_messages(again)
    except TokenizationError:
        return ""
    first, last = prompt.partition(USER["content"])[0], later.rpartition("Bye.")[0]
    head = first[: len(first) - common_length(first[::-1], last[::-1])].strip()
    return "" if head == bos else head
