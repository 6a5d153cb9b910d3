"""Why a rendering is not a prefix of a longer one: the edits between both, each with a name."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

from nanorl.tokens.prefix import PairCheck, Render, common_length
from nanorl.tokens.template import REASONING_FIELDS
from nanorl.types import Message

_EMPTY_BLOCK = re.compile(r"\s*<([\w|]+)>\s*</\1>\s*")
_INLINE_REASONING = re.compile(r"<think>\s*(.*?)\s*</think>", re.DOTALL)


class Cause(StrEnum):
    """What a template or tokenizer does that matters for keeping ids."""

    REASONING_DROPPED = "reasoning of earlier turns is dropped"
    EMPTY_THINK = "an empty think block is added to the last turn"
    END_TOKEN = "the end-of-turn token changes between last and earlier turns"
    LAST_TURN = "the last turn is rendered differently from earlier ones"
    GENERATION_PROMPT = "the generation prompt is not how a turn begins in history"
    REWRITTEN = "an earlier turn is rewritten"
    CALLS_DROPPED = "tool calls after the first are dropped"
    TEXT_DROPPED = "a message is left out of the rendering"
    DOUBLE_BOS = "the prompt begins with two BOS tokens"
    REFUSED = "the template refuses a conversation"
    PARALLEL_RESULTS = "parallel tool results share one turn"
    WHITESPACE = "whitespace merges with the sampled text"
    MERGE = "template text merges with the sampled text"
    DEFAULT_SYSTEM = "default system prompt inserted"
    DATE = "the current date is written into the prompt"
    NO_TOOLS = "tools are not known to the template: they go into messages"


@dataclass(frozen=True, slots=True)
class Edit:
    """Text of the shorter rendering that the longer one has otherwise."""

    removed: str
    added: str
    before: str
    """The shorter text up to there."""

    @property
    def spellings(self) -> Iterator[str]:
        """Every text whose removal does the same: after `<t`, `hink></think><t` may as well be `<think></think>`."""
        before, removed = self.before, self.removed
        yield removed
        while before and removed and before[-1] == removed[-1]:
            before, removed = before[:-1], removed[-1] + removed[:-1]
            yield removed


def name_causes(pair: PairCheck, turn: int, render: Render, marks: Collection[str]) -> set[Cause]:
    """The causes of a broken pair; several where the template makes several edits.

    Args:
        pair: a pair whose text or ids are no prefix.
        turn: the message in which it diverges (`nanorl.tokens.prefix.diverging_turn`).
        render: the template.
        marks: texts of the added tokens, which are never cut in two.
    """
    shorter = render(pair.conversation, pair.shorter, pair.generation_prompt)
    longer = render(pair.conversation, pair.longer, pair.kind != "growth")
    if pair.is_token_break:
        ends_in_space = shorter[-1:].isspace() or longer[len(shorter) :][:1].isspace()
        return {Cause.WHITESPACE if ends_in_space else Cause.MERGE}
    messages = pair.conversation.messages
    roles = [message["role"] for message in messages[turn : pair.longer]]
    if set(roles) == {"tool"}:
        return {Cause.PARALLEL_RESULTS}
    lost = [text for text in reasoning_texts(messages[: pair.shorter]) if longer.count(text) < shorter.count(text)]
    marks = [mark for mark in marks if mark in shorter + longer]  # some vocabularies reserve a thousand
    otherwise = {pair.shorter: Cause.GENERATION_PROMPT, pair.shorter - 1: Cause.LAST_TURN}.get(turn, Cause.REWRITTEN)
    found = {_name(edit, lost, marks) or otherwise for edit in edits(shorter, longer, marks)}
    return found | ({Cause.REASONING_DROPPED} if lost else set())


def edits(shorter: str, longer: str, marks: Collection[str]) -> Iterator[Edit]:
    """What must be changed within the shorter text to make it a prefix of the longer one, word by word."""
    short_words, long_words = _words(shorter, marks), _words(longer, marks)
    common = common_length(short_words, long_words)
    before, rest, long_rest = "".join(short_words[:common]), short_words[common:], long_words[common:]
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, rest, long_rest, autojunk=False).get_opcodes():
        if tag == "equal" or i1 == len(rest):  # what follows the shorter text is no edit
            continue
        yield Edit("".join(rest[i1:i2]), "".join(long_rest[j1:j2]), before + "".join(rest[:i1]))


def reasoning_texts(messages: Sequence[Message]) -> list[str]:
    """The reasoning of each message that has some, from its field or from within its content."""
    found: list[str] = []
    for message in messages:
        field = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
        inline = _INLINE_REASONING.search(message.get("content") or "")
        text = field or (inline and inline[1])
        if text:
            found.append(text)
    return found


def _name(edit: Edit, lost_reasoning: Sequence[str], marks: Collection[str]) -> Cause | None:
    if any(text in edit.removed for text in lost_reasoning):
        return Cause.REASONING_DROPPED
    if not edit.added and any(_EMPTY_BLOCK.fullmatch(removed) for removed in edit.spellings):
        return Cause.EMPTY_THINK
    if edit.removed.startswith(tuple(marks)) and edit.added.startswith(tuple(marks)):
        return Cause.END_TOKEN
    return None


def _words(text: str, marks: Collection[str]) -> list[str]:
    """Added tokens, words and single other characters: their concatenation is the text."""
    special = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    return re.findall(rf"{special}|\w+|\W" if special else r"\w+|\W", text)
