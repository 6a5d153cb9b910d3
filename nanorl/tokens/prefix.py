"""Is one rendering of a conversation a prefix of a longer one? The question on which multi-turn training stands.

Two kinds of pairs are compared:

- growth: the first k messages against the first k + 1, the shorter with and without the generation prompt;
- extension: what turn t was sampled from (`prompt`), and that plus the turn rendered as the last message (`turn`),
  against what turn t + 1 is sampled from. Where these break as text, the ids that a rollout holds are not what the
  template would show the model next, and no suffix can be appended that makes them so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from nanorl.types import Message

EXCERPT = 70
"""Characters shown of what follows a divergence."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the way a template wants them spelled."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions that the template is given; empty where the system message holds them."""

    @property
    def assistant_turns(self) -> list[int]:
        """Indices of the messages that a model would sample."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]


Render = Callable[[Conversation, int, bool], str]
"""render(conversation, k, add_generation_prompt): text of the first k messages; TokenizationError on refusal."""


@dataclass(frozen=True, slots=True)
class PrefixCheck:
    """How a shorter text and its ids relate to a longer one's."""

    string_prefix: bool
    token_prefix: bool
    """Whether the ids of the shorter text begin those of the longer one; false with string_prefix: tokens merge."""
    diverge_char: int | None = None
    """The first character that differs; None where the text is a prefix."""
    diverge_token: int | None = None
    """The first id that differs; None where the ids are a prefix."""
    context: str = ""
    """What both have just before."""
    shorter_has: str = ""
    longer_has: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCheck:
    """One pair of renderings of a conversation."""

    conversation: Conversation
    kind: Literal["growth", "prompt", "turn"]
    shorter: int
    """Messages in the shorter rendering."""
    longer: int
    """Messages in the longer one."""
    generation_prompt: bool
    """Whether the shorter rendering ends in the generation prompt."""
    prefix: PrefixCheck

    @property
    def is_text_break(self) -> bool:
        """The template rewrote something: no way of appending ids helps."""
        return not self.prefix.string_prefix

    @property
    def is_token_break(self) -> bool:
        """Only re-encoding differs: harmless where ids are appended."""
        return self.prefix.string_prefix and not self.prefix.token_prefix


def compare(shorter: str, longer: str, encode: Encode) -> PrefixCheck:
    """Whether `shorter` begins `longer`, as text and as ids, and where not."""
    short_ids, long_ids = encode(shorter), encode(longer)
    token = next((i for i, token_id in enumerate(short_ids) if long_ids[i : i + 1] != [token_id]), None)
    if longer.startswith(shorter):
        return PrefixCheck(True, token is None, None, token)
    char = common_length(shorter, longer)
    return PrefixCheck(
        False,
        token is None,
        char,
        token,
        context=shorter[max(0, char - EXCERPT) : char],
        shorter_has=shorter[char : char + EXCERPT],
        longer_has=longer[char : char + EXCERPT],
    )


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items two sequences begin with in common."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def check_growth(conversation: Conversation, render: Render, encode: Encode) -> Iterator[PairCheck]:
    """Every k: the first k messages against the first k + 1; with the generation prompt where the model speaks next."""
    for k in range(1, len(conversation.messages)):
        speaks_next = conversation.messages[k]["role"] == "assistant"
        for generation_prompt in (False, True) if speaks_next else (False,):
            shorter, longer = render(conversation, k, generation_prompt), render(conversation, k + 1, False)
            yield PairCheck(
                conversation=conversation,
                kind="growth",
                shorter=k,
                longer=k + 1,
                generation_prompt=generation_prompt,
                prefix=compare(shorter, longer, encode),
            )


def check_extension(conversation: Conversation, render: Render, encode: Encode) -> Iterator[PairCheck]:
    """Every turn t that another follows: prompt(t), and prompt(t) + turn, against prompt(t + 1)."""
    kinds: tuple[tuple[Literal["prompt", "turn"], int], ...] = (("prompt", 0), ("turn", 1))
    for turn, following in pairwise(conversation.assistant_turns):
        next_prompt = render(conversation, following, True)
        for kind, sampled in kinds:
            shorter, generation_prompt = turn + sampled, not sampled
            yield PairCheck(
                conversation=conversation,
                kind=kind,
                shorter=shorter,
                longer=following,
                generation_prompt=generation_prompt,
                prefix=compare(render(conversation, shorter, generation_prompt), next_prompt, encode),
            )


def diverging_turn(pair: PairCheck, render: Render) -> int:
    """Index of the message in which the shorter rendering diverges.

    It is the first message with which the rendering reaches beyond the divergence. Rendering up to the message itself
    shows it as the last one; where that differs from how the shorter text has it, a later message is named.
    """
    if pair.prefix.diverge_char is None:  # only tokens differ, and they do so where the shorter text ends
        return pair.shorter if pair.generation_prompt else pair.shorter - 1
    text = render(pair.conversation, pair.shorter, pair.generation_prompt)
    for i in range(pair.shorter):
        if common_length(render(pair.conversation, i + 1, False), text) > pair.prefix.diverge_char:
            return i
    return pair.shorter
