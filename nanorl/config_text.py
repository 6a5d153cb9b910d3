"""The text side of the configuration: TOML in, and complaints in words out. It knows no section by name."""

import re
import tomllib
from math import isfinite
from pathlib import Path
from typing import Any, cast

from nanorl.errors import ConfigError

TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
}
"""What messages call msgspec's types."""


def read_toml(path: Path) -> dict[str, Any]:
    """A file's tables. Raises: ConfigError where it can't be read or is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Expected a readable config file at {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None


def parse_value(text: str) -> Any:
    """A value in TOML's syntax; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def check_finite(value: Any, path: str) -> None:
    """Looks into tables and lists. Raises: ConfigError naming the path of a NaN or infinity."""
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            check_finite(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, inner in enumerate(cast("list[Any]", value)):
            check_finite(inner, f"{path}[{i}]")
    elif isinstance(value, float) and not isfinite(value):
        raise ConfigError(f"{path}: expected a finite number, got {value}")


def plain(text: str, came: str) -> str:
    """msgspec's ``Expected `int | null`, got `str` `` in words, with the value that came rather than its type."""
    if came:
        text = re.sub(r", got [^,]*$| '[^']*'$", "", text)
    text = re.sub(r"`([^`]+)`", lambda types: " or ".join(_in_words(types[1])), text)
    return text[0].lower() + text[1:].replace("enum value", "choice") + came


def _in_words(types: str) -> list[str]:
    return [TYPE_WORDS.get(name, name) for name in types.split(" | ") if name != "null"]
