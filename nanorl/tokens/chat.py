"""From messages to ids and back: a model's chat template, its stop tokens, and safe use from many threads."""

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nanorl.errors import ModelError, TokenizationError
from nanorl.types import Message

_PROBE = "nanorl-probe"


def load_tokenizer(path: str | Path) -> Any:
    """A model folder's tokenizer.

    Raises:
        ModelError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer  # seconds to import: only when needed

    try:
        auto: Any = AutoTokenizer  # its signature is untyped
        return auto.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"Expected a tokenizer in {path} (tokenizer.json, tokenizer_config.json), but: {error}"
        ) from error


def load_chat(path: str | Path) -> "ChatFormat":
    """The chat format of a model folder, with the stop ids that its generation config names.

    Raises:
        ModelError: no tokenizer, no chat template, or no token that ends a turn.
    """
    return ChatFormat(load_tokenizer(path), _configured_stop_ids(Path(path)))


class ChatFormat:
    """A tokenizer with its chat template, as the loop uses them. Any number of threads may share one.

    The tokenizer is its own from then on: it lets one thread in at a time, since a fast tokenizer whose padding or
    truncation changes under a running call answers "Already borrowed". Who shares a tokenizer hands over a copy.

    Rendering is the only place where text becomes ids, and it happens before anything is sampled: what the policy
    samples is never decoded and encoded again.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Iterable[int] = ()) -> None:
        """`stop_token_ids` come on top of the tokenizer's eos and the token that ends a turn in the template.

        Raises:
            ModelError: no chat template, or no token that ends a turn.
        """
        if not tokenizer.chat_template:
            raise ModelError(
                "The model's tokenizer has no chat template, so prompts can't be rendered. Take an "
                "instruction-tuned model, or add a chat_template.jinja to its folder."
            )
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        stops = [*eos, *self._end_of_turn(), *stop_token_ids]
        if not stops:
            raise ModelError("The model names no end-of-turn token (eos_token): generation would never stop by itself.")
        self._stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn; the tokenizer's own eos first."""
        return self._stop_token_ids

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """The conversation as ids; with add_generation_prompt up to where the assistant goes on.

        The template writes every special token itself, BOS too, so none is added when its text is encoded.

        Raises:
            TokenizationError: the template refuses these messages.
        """
        with self._lock:
            return self._encode(self._render_text(messages, tools, add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        """The ids of a text as it stands, no special token added."""
        with self._lock:
            return self._encode(text)

    def decode(self, token_ids: Sequence[int], *, keep_stop: bool = False, skip_special_tokens: bool = False) -> str:
        """Text for rewards and people, never to be encoded again.

        Args:
            token_ids: any ids.
            keep_stop: keep a stop token at the very end; by default it is dropped, as finish_reason says the same.
            skip_special_tokens: drop all other special tokens as well.
        """
        ids = list(token_ids)
        if ids and not keep_stop and ids[-1] in self._stop_token_ids:
            ids.pop()
        with self._lock:
            return self._tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def _render_text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages) or "none"
            raise TokenizationError(
                f"The chat template can't render these messages (roles: {roles}): {type(error).__name__}: {error}"
            ) from error

    def _end_of_turn(self) -> list[int]:
        """The special token that the template writes right after an assistant's last message, if it writes one.

        Raises:
            ModelError: the template is none.
        """
        from jinja2 import TemplateSyntaxError

        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, _, tail = self._render_text(messages, None, False).rpartition(_PROBE)
        except TokenizationError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise ModelError(
                    f"The model's chat template is broken: {error.__cause__}. Mend or replace it."
                ) from error
            return []  # a template with rules of its own; the eos of tokenizer and config must do
        first = self._encode(tail)[:1]
        return [i for i in first if i in self._tokenizer.all_special_ids or i in self._tokenizer.added_tokens_decoder]


def _configured_stop_ids(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json: none, one, or several."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    return []
