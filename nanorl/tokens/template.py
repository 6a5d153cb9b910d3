"""A chat template as a function from messages to text, and how it wants messages spelled.

Templates disagree on the spelling of tool calls and reasoning. What a template does not know, it drops in silence, so
the spelling is found by trying: render a mark, see whether it is in the text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from nanorl.errors import ModelError, TokenizationError
from nanorl.tokens.drift import Tokenizer, encode
from nanorl.tokens.prefix import Conversation
from nanorl.types import Message

MARK = "Zqx"
"""A word that no template writes by itself."""

_CLOCK = "{%- macro strftime_now(format) -%}DATE{%- endmacro -%}"
"""Put before a template, it stands in for the clock that transformers hands to it."""

CallSpelling = Literal["dict", "string", "inline"]
ContentSpelling = Literal["empty", "none", "omitted"]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""What templates call it, the most common first."""

USER: Message = {"role": "user", "content": "Hello?"}


@dataclass(frozen=True, slots=True)
class Flavour:
    """How a template wants messages spelled."""

    system: bool
    """Whether it takes a system message."""
    tool_calls: CallSpelling
    """`tool_calls` with arguments as an object or as JSON text; inline: written into the content."""
    tool_content: ContentSpelling
    """What `content` is beside tool calls."""
    tool_role: bool
    """Whether messages of role tool are rendered; else results go as user messages."""
    reasoning: str | None
    """The field for reasoning; None: `<think>` within the content."""

    @property
    def native_tools(self) -> bool:
        """Whether the template knows tool calls."""
        return self.tool_calls != "inline"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A tokenizer's template with fixed options.

    Args:
        tokenizer: a Hugging Face tokenizer.
        source: another template than the tokenizer's own.
        options: variables that are always passed, such as `{"enable_thinking": False}`.
        date: what the template's clock says; None: today, as in training.
    """

    tokenizer: Tokenizer
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    date: str | None = None

    def __post_init__(self) -> None:
        """Raises: ModelError where there is no template."""
        if self.source is None and not self.tokenizer.chat_template:
            raise ModelError(
                "The tokenizer has no chat template, so there is no prompt to check. Take an instruction-tuned model, "
                "or put a chat_template.jinja into the model's folder."
            )

    def render(self, conversation: Conversation, k: int, add_generation_prompt: bool) -> str:
        """Text of the first k messages: a `nanorl.tokens.prefix.Render`. Raises: TokenizationError on refusal."""
        return self.render_messages(conversation.messages[:k], add_generation_prompt, conversation.tools)

    def render_messages(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Text of some messages.

        Raises:
            TokenizationError: the template raised an error; with what it said.
        """
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **({"chat_template": self._source()} if self.source or self.date else {}),
                **self.options,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise TokenizationError(f"The chat template refuses the conversation: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text."""
        return encode(self.tokenizer, text)

    def _source(self) -> str:
        source: Any = self.source or self.tokenizer.chat_template
        if isinstance(source, Mapping):  # several by name: transformers takes `default` where no tools are given
            source = source["default"]  # pyright: ignore[reportUnknownVariableType]
        return _CLOCK.replace("DATE", self.date) + str(source) if self.date else str(source)  # pyright: ignore[reportUnknownArgumentType]


def detect_flavour(template: ChatTemplate) -> Flavour:
    """Tries each spelling, the most common first, until the marks come through."""
    tool_calls, tool_content = _detect_tool_calls(template)
    call: Message = {"role": "assistant", "content": "f(1)"}
    if tool_calls != "inline":
        call = _calling("f", 1, tool_calls, tool_content)
    result: Message = {"role": "tool", "content": MARK, "name": "f", "tool_call_id": "call00001"}
    return Flavour(
        system=_shows(template, [{"role": "system", "content": MARK}, USER]),
        tool_calls=tool_calls,
        tool_content=tool_content,
        tool_role=_shows(template, [USER, call, result]),
        reasoning=next((name for name in REASONING_FIELDS if _shows_reasoning(template, name)), None),
    )


def tool_call(name: str, arguments: Mapping[str, Any], spelling: str, number: int = 1) -> dict[str, Any]:
    """A call in OpenAI's form; the id has nine characters, as some templates demand."""
    spelled = json.dumps(arguments) if spelling == "string" else dict(arguments)
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": spelled}}


def _detect_tool_calls(template: ChatTemplate) -> tuple[CallSpelling, ContentSpelling]:
    spellings: tuple[CallSpelling, ...] = ("dict", "string")
    contents: tuple[ContentSpelling, ...] = ("empty", "omitted", "none")
    for spelling, content in product(spellings, contents):
        if _shows(template, [USER, _calling(MARK, MARK, spelling, content)], times=2):
            return spelling, content
    return "inline", "empty"


def _calling(name: str, argument: object, spelling: str, content: str) -> Message:
    message: Message = {"role": "assistant", "tool_calls": [tool_call(name, {"x": argument}, spelling)]}
    return message if content == "omitted" else {**message, "content": "" if content == "empty" else None}


def _shows_reasoning(template: ChatTemplate, name: str) -> bool:
    return _shows(template, [USER, {"role": "assistant", "content": "Hi.", name: MARK}])


def _shows(template: ChatTemplate, messages: Sequence[Message], times: int = 1) -> bool:
    """Whether the mark is in the text, at least so many times; a refusal is a no."""
    try:
        return template.render_messages(messages).count(MARK) >= times
    except TokenizationError:
        return False
