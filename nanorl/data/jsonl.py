"""Prompts from a file with one JSON object a line: `{"prompt": text or messages, "label": ..., "metadata": {...}}`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from nanorl.errors import DataError
from nanorl.types import Prompt


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the file; anything else belongs into metadata."""

    prompt: str | list[dict[str, Any]]
    """What the user says, or a whole conversation in OpenAI's form."""
    label: str | int | float | bool | None = None
    """The right answer; numbers become text as JSON writes them."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    id: str | None = None
    """Names the problem; without it: file name and line number."""


_decoder = msgspec.json.Decoder(Line)


def read_jsonl(path: str | Path) -> list[Prompt]:
    """All prompts of a file, in order; blank lines are skipped.

    Raises:
        DataError: no readable file, no prompt in it, or a bad line, with its number and what is wrong with it.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"Expected a JSONL file at {path}: {error}") from None
    prompts = [_read_line(line, f"{path}, line {i}", f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DataError(f"{path} holds no prompts. Expected one JSON object a line, each with a key 'prompt'.")
    return prompts


def split_heldout(prompts: Sequence[Prompt], path: str) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """(training, held-out): the last tenth, at least one, is held out.

    Raises:
        DataError: fewer than two prompts.
    """
    if len(prompts) < 2:
        raise DataError(f"{path} holds one prompt; two are needed, as the last tenth is held out for evaluation.")
    cut = len(prompts) - max(1, len(prompts) // 10)
    return prompts[:cut], prompts[cut:]


def _read_line(line: bytes, where: str, default_id: str) -> Prompt:
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {error}. Known keys: prompt, label, metadata, id.") from None
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    _check_messages(messages, where)
    label = row.label if row.label is None or isinstance(row.label, str) else msgspec.json.encode(row.label).decode()
    return Prompt(id=row.id or default_id, messages=tuple(messages), label=label, metadata=row.metadata)


def _check_messages(messages: list[dict[str, Any]], where: str) -> None:
    if not messages or not all(isinstance(m.get("role"), str) and m.get("content") for m in messages):
        raise DataError(f"{where}: prompt must be a text or a list of messages, each with a role and a content")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last message is the assistant's; the policy needs a turn to answer")
