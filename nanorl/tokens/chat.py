"""From messages to the prompt's ids and from sampled ids to text, with the model's own tokenizer and chat template."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanorl.errors import ModelError, TokenizationError
from nanorl.types import Message


class ChatFormat:
    """A tokenizer and its chat template. Safe to use from several threads.

    Rendering is the only place where text becomes ids, and it happens before anything was sampled: what the policy samples
    is never decoded and encoded again.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        """`tokenizer` is a Hugging Face tokenizer with a chat template; further stop ids are added to its own eos.

        Raises:
            ModelError: no chat template, or no token that ends a turn.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "The model's tokenizer has no chat template, so prompts can't be rendered. Take an instruction-tuned model, or "
                "add a chat_template.jinja to its folder."
            )
        self._tokenizer = tokenizer
        # Fast tokenizers change their padding state inside calls: two threads at once end in "Already borrowed".
        self._lock = threading.Lock()
        stops = [i for i in (tokenizer.eos_token_id, *stop_token_ids) if i is not None]
        if not stops:
            raise ModelError("The model names no end-of-turn token (eos_token): generation would never stop by itself.")
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The conversation's ids, up to where the assistant goes on.

        The template writes every special token itself, so the text is encoded without adding any: exactly one BOS.

        Raises:
            TokenizationError: the template can't render these messages.
        """
        with self._lock:
            try:
                text = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                )
                ids = self._tokenizer.encode(text, add_special_tokens=False)
            except Exception as error:  # a template is a program: it may raise anything
                raise TokenizationError(f"The chat template can't render {len(messages)} messages: {error}") from error
        return [int(i) for i in ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text for rewards and people, special tokens as they are unless told otherwise."""
        with self._lock:
            return self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )


def load_chat(path: str | Path) -> ChatFormat:
    """The chat format of a model folder, with the stop ids of its generation config.

    Raises:
        ModelError: no tokenizer that transformers can load, or no chat template.
    """
    return ChatFormat(load_tokenizer(path), _generation_stops(Path(path)))


def load_tokenizer(path: str | Path) -> Any:
    """A model folder's tokenizer.

    Raises:
        ModelError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer  # seconds to import: only when needed

    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"Expected a tokenizer in {path} (tokenizer.json, tokenizer_config.json), transformers could not load one: {error}"
        ) from error


def _generation_stops(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json: chat models list several there."""
    try:
        stops = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError):
        return []
    return stops if isinstance(stops, list) else [stops] if isinstance(stops, int) else []
