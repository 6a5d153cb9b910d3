"""Drift: ids that come back different when they are decoded and encoded again.

Text to ids is a function, ids to text is many to one: a model samples `hel` + `lo`, the encoder writes `hello`. A tool
that keeps text between sampling and training therefore trains tokens that were never sampled. nanorl keeps ids; this
module counts what that saves.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
"""What decoding writes for bytes that are no UTF-8."""


class Tokenizer(Protocol):
    """What the probe needs of a Hugging Face tokenizer."""

    bos_token: str | None
    chat_template: Any
    """The template's source, or several by name."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Tokens outside the learned vocabulary: marks like `<|im_end|>`."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Every token and its id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Ids to text."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Messages to text, with tokenize=False."""
        ...


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One sequence, decoded and encoded again."""

    token_ids: tuple[int, ...]
    """As sampled."""
    text: str
    reencoded_ids: tuple[int, ...]
    """As somebody who kept only the text would train them."""
    text_survives: bool
    """Whether the second ids decode to the same text; bytes that are no UTF-8 are lost although it is true."""

    @property
    def drifted(self) -> bool:
        """Whether the ids changed."""
        return self.token_ids != self.reencoded_ids

    @property
    def text_lost(self) -> bool:
        """Whether not even the text can be told any more: it changed, or bytes became U+FFFD."""
        return not self.text_survives or REPLACEMENT in self.text


@dataclass(frozen=True, slots=True)
class DriftReport:
    """How many of a kind of sequence drift."""

    kind: str
    """Where the sequences come from."""
    num_sequences: int
    drifted: tuple[int, ...]
    """Indices of those that drift."""
    num_text_lost: int
    """Of those that drift, how many lose their text too."""
    examples: tuple[RoundTrip, ...]
    """The shortest few that drift."""

    @property
    def share(self) -> float:
        """Drifted over all, 0 where there are none."""
        return len(self.drifted) / self.num_sequences if self.num_sequences else 0.0


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Every token's text, special ones included, nothing tidied."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's ids and nothing else: templates write their BOS themselves."""
    return tokenizer.encode(text, add_special_tokens=False)


def round_trip(tokenizer: Tokenizer, token_ids: Sequence[int]) -> RoundTrip:
    """encode(decode(ids)), beside what it began with."""
    text = decode(tokenizer, token_ids)
    again = encode(tokenizer, text)
    return RoundTrip(tuple(token_ids), text, tuple(again), decode(tokenizer, again) == text)


def measure_drift(
    tokenizer: Tokenizer, kind: str, sequences: Sequence[Sequence[int]], num_examples: int = 3
) -> DriftReport:
    """Round-trips every sequence; the examples are the shortest drifted ones, which show the cause best."""
    trips = [round_trip(tokenizer, token_ids) for token_ids in sequences]
    drifted = [i for i, trip in enumerate(trips) if trip.drifted]
    shortest = sorted(drifted, key=lambda i: (len(trips[i].token_ids), i))[:num_examples]
    return DriftReport(
        kind=kind,
        num_sequences=len(trips),
        drifted=tuple(drifted),
        num_text_lost=sum(trips[i].text_lost for i in drifted),
        examples=tuple(trips[i] for i in shortest),
    )


def learned_ids(tokenizer: Tokenizer) -> list[int]:
    """All ids that are no added tokens, ascending: what random sequences are drawn from, byte fragments included."""
    added = set(tokenizer.added_tokens_decoder)
    return sorted(set(tokenizer.get_vocab().values()) - added)


def printable_ids(tokenizer: Tokenizer) -> list[int]:
    """The learned ids whose text alone is whole and printable, ascending; no byte fragments."""
    return [i for i in learned_ids(tokenizer) if _is_printable(decode(tokenizer, [i]))]


def random_sequences(pool: Sequence[int], num_sequences: int, length: int, seed: int) -> list[list[int]]:
    """Uniform ids of the pool: no model writes like this, but every kind of token meets every other."""
    rng = random.Random(seed)
    return [[rng.choice(pool) for _ in range(length)] for _ in range(num_sequences)]


def spliced_sequences(tokenizer: Tokenizer, num_sequences: int, seed: int, window: int = 120) -> list[list[int]]:
    """Real text, cut at a random character and encoded in two parts, as a budget, a stop string or a tool call cuts it.

    The text is Python's own documentation, English and code; it differs a little between Python versions.
    """
    cuts = _windows(num_sequences, seed, window)
    return [encode(tokenizer, text[:cut]) + encode(tokenizer, text[cut:]) for text, cut in cuts]


def _windows(num_windows: int, seed: int, window: int) -> Iterator[tuple[str, int]]:
    from pydoc_data.topics import topics  # half a megabyte that only this needs

    corpus = "\n".join(topics[name] for name in sorted(topics))
    rng = random.Random(seed)
    for _ in range(num_windows):
        start = rng.randrange(len(corpus) - window)
        yield corpus[start : start + window], rng.randrange(1, window)


def _is_printable(text: str) -> bool:
    return bool(text) and REPLACEMENT not in text and all(c.isprintable() or c in " \n\t\r" for c in text)
