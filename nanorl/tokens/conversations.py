"""The conversations that a template is tried with: system, tools, tool results, reasoning, several turns.

Each is written once, neutrally, and spelled as the template wants it. The words are chosen so that no text occurs twice
within a conversation: what is missing from a rendering can then be named.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanorl.tokens.prefix import Conversation
from nanorl.tokens.template import Flavour, tool_call
from nanorl.types import Message

TOOLS: tuple[Mapping[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {p: {"type": kind, "description": f"The {p}"} for p, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }
    for name, description, parameters in (
        ("get_weather", "Get the weather of a city.", {"city": "string"}),
        ("add", "Add two integers.", {"a": "integer", "b": "integer"}),
    )
)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the assistant."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One neutral message."""

    role: str
    text: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    answers: str = ""
    """Which tool a result comes from."""


SYSTEM = Turn("system", "You are a careful helper.")
WEATHER = Call("get_weather", {"city": "Paris"})
SUM = Call("add", {"a": 17, "b": 25})
WARM = Turn("tool", '{"temp_c": 18}', answers="get_weather")
TOTAL = Turn("tool", "42", answers="add")

PLAIN: Mapping[str, tuple[Turn, ...]] = {
    "plain": (
        Turn("user", "Hello, who are you?"),
        Turn("assistant", "A test assistant."),
        Turn("user", "What is 17+25?"),
        Turn("assistant", "It makes 42."),
    ),
    "system": (
        SYSTEM,
        Turn("user", "Name a colour."),
        Turn("assistant", "Perhaps blue."),
        Turn("user", "Another one?"),
        Turn("assistant", "Then green."),
    ),
    "whitespace": (
        Turn("user", "Write a line."),
        Turn("assistant", "  indented line \n"),
        Turn("user", " again "),
        Turn("assistant", "fine"),
    ),
    "reasoning": (
        SYSTEM,
        Turn("user", "What is 2+3?"),
        Turn("assistant", "The answer is 5.", reasoning="Two and three is five."),
        Turn("user", "And 3+4?"),
        Turn("assistant", "That gives 7.", reasoning="Three and four is seven."),
    ),
}
"""Without tools."""

WITH_TOOLS: Mapping[str, tuple[Turn, ...]] = {
    "tools": (
        SYSTEM,
        Turn("user", "Weather in Paris, and 17+25?"),
        Turn("assistant", calls=(WEATHER,)),
        WARM,
        Turn("assistant", calls=(SUM,)),
        TOTAL,
        Turn("assistant", "Mild, and the sum is as you see."),
    ),
    "tools, user": (
        Turn("user", "Weather in Paris?"),
        Turn("assistant", calls=(WEATHER,)),
        WARM,
        Turn("assistant", "It is mild."),
        Turn("user", "Thanks. 17+25?"),
        Turn("assistant", calls=(SUM,)),
        TOTAL,
        Turn("assistant", "Forty-two."),
    ),
    "tools, reasoning": (
        SYSTEM,
        Turn("user", "Weather in Paris, and 17+25?"),
        Turn("assistant", reasoning="The weather comes first.", calls=(WEATHER,)),
        WARM,
        Turn("assistant", reasoning="Now for the sum.", calls=(SUM,)),
        TOTAL,
        Turn("assistant", "Mild, and the sum is as you see.", reasoning="Both are known."),
        Turn("user", "Thanks!"),
        Turn("assistant", "You are welcome.", reasoning="Just be polite."),
    ),
    "parallel tools": (
        SYSTEM,
        Turn("user", "Weather in Paris, and 17+25?"),
        Turn("assistant", calls=(WEATHER, SUM)),
        WARM,
        TOTAL,
        Turn("assistant", "Mild, and forty-two."),
    ),
}


def conversations(flavour: Flavour) -> list[Conversation]:
    """All of them, spelled for a template."""
    tools = TOOLS if flavour.native_tools else ()
    explained = {name: _explained(turns, flavour) for name, turns in WITH_TOOLS.items()}
    return [
        *(Conversation(name, _spell(turns, flavour)) for name, turns in PLAIN.items()),
        *(Conversation(name, _spell(turns, flavour), tools) for name, turns in explained.items()),
    ]


def _explained(turns: Sequence[Turn], flavour: Flavour) -> tuple[Turn, ...]:
    """A template that knows no tools needs them in a system message, or else in the first user message."""
    if flavour.native_tools:
        return tuple(turns)
    definitions = "\n".join(json.dumps(tool["function"]) for tool in TOOLS)
    manual = f"Tools:\n{definitions}\nCall one with <tool_call>{{...}}</tool_call>."
    first, *rest = turns
    if first.role != "system" and flavour.system:
        return (Turn("system", manual), *turns)
    return (Turn(first.role, f"{first.text}\n{manual}"), *rest)


def _spell(turns: Sequence[Turn], flavour: Flavour) -> tuple[Message, ...]:
    if turns[0].role == "system" and not flavour.system:
        system, user, *rest = turns
        turns = (Turn("user", f"{system.text}\n{user.text}"), *rest)
    return tuple(_spell_turn(turn, flavour) for turn in turns)


def _spell_turn(turn: Turn, flavour: Flavour) -> Message:
    if turn.role == "tool":
        return _spell_result(turn, flavour)
    message: dict[str, Any] = {"role": turn.role}
    content = turn.text
    if turn.calls and flavour.native_tools:
        message["tool_calls"] = [
            tool_call(c.name, c.arguments, flavour.tool_calls, _number(c.name)) for c in turn.calls
        ]
    elif turn.calls:
        bodies = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in turn.calls]
        content = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if turn.reasoning is not None and flavour.reasoning:
        message[flavour.reasoning] = turn.reasoning
    elif turn.reasoning is not None:
        content = f"<think>\n{turn.reasoning}\n</think>\n\n{content}"
    if content or "tool_calls" not in message or flavour.tool_content == "empty":
        message["content"] = content
    elif flavour.tool_content == "none":
        message["content"] = None
    return message


def _spell_result(turn: Turn, flavour: Flavour) -> Message:
    if not flavour.tool_role:
        return {"role": "user", "content": f"<tool_response>\n{turn.text}\n</tool_response>"}
    call_id = f"call{_number(turn.answers):05d}"
    return {"role": "tool", "content": turn.text, "name": turn.answers, "tool_call_id": call_id}


def _number(tool: str) -> int:
    """What a call's id and its result's share; no conversation calls a tool twice."""
    return 1 + [definition["function"]["name"] for definition in TOOLS].index(tool)
