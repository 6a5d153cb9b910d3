"""From TOML, `--set` and flags to a Config, with complaints in words; and to JSON and back for the run folder."""

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from nanorl.config import DATA_TYPES, Config, JsonlData
from nanorl.config_text import check_finite, parse_value, plain, read_toml
from nanorl.errors import ConfigError


def load_config(
    path: Path | None = None,
    sets: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
    base: Config | None = None,
) -> Config:
    """Defaults or `base`, then the TOML file, then `section.key=value` settings, then flags that are not None.

    Args:
        path: TOML file with one table a section.
        sets: `section.key=value`, the value in TOML's syntax, bare words as strings.
        flags: `section.key` -> value, as parsed by the command line.
        base: a configuration to start from: a resumed run's.

    Raises:
        ConfigError: a file that can't be read, an unknown key, a value of the wrong type or out of range.
    """
    tree: dict[str, Any] = msgspec.to_builtins(base) if base else {}
    for section, values in (read_toml(path) if path else {}).items():
        if isinstance(values, dict):
            tree.setdefault(section, {}).update(values)
        else:
            tree[section] = values
    for setting in sets:
        key, separator, text = setting.partition("=")
        if not separator or "." not in key:
            raise ConfigError(
                f"Expected --set section.key=value, got {setting!r}. Sections: {', '.join(_names(Config))}."
            )
        _put(tree, key.strip(), parse_value(text.strip()))
    for key, value in (flags or {}).items():
        if value is not None:
            _put(tree, key, value)
    return _convert(tree)


def to_json(config: Config) -> bytes:
    """The configuration as indented JSON; `from_json` reads it back equal."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def from_json(text: bytes) -> Config:
    """Reads what `to_json` wrote.

    Raises:
        ConfigError: it is no configuration of this version.
    """
    try:
        return _convert(msgspec.json.decode(text))
    except msgspec.DecodeError as error:
        raise ConfigError(f"Expected a configuration in JSON: {error}") from None


def _convert(tree: Mapping[str, Any]) -> Config:
    check_finite(tree, "")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), tree)) from None


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):  # pyright: ignore[reportUnnecessaryIsInstance] (a file may hold anything)
            raise ConfigError(f"{key}: {name} is a single value, {tree!r}; nothing lies below it")
    tree[last] = value


def _names(section: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(section)]


def _explain(message: str, tree: Mapping[str, Any]) -> str:
    """msgspec's message with its `$.path` as `section.key`, and for an unknown key the nearest right one."""
    path_match = re.search(r" - at `\$\.?([^`]*)`", message)
    path = path_match.group(1) if path_match else ""
    text = message[: path_match.start()] if path_match else message
    if "required field `type`" in text:
        return f"{path}: which keys belong there depends on {path}.type. Set it to one of: {', '.join(DATA_TYPES)}."
    if text.startswith(f"{path}."):  # a section's own check, which names its key
        return text
    unknown = re.search(r"unknown field `([^`]+)`", text)
    if not unknown:
        return f"{path}: {plain(text, _what_came(path, tree))}" if path else text
    key = unknown.group(1)
    valid = _names(Config) if not path else _names(_section_type(path, tree))
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"Did you mean {_join(path, near[0])!r}? " if near else ""
    return f"Unknown config key {_join(path, key)!r}. {hint}Known: {', '.join(valid)}."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _what_came(path: str, tree: Mapping[str, Any]) -> str:
    value: Any = tree
    for name in re.findall(r"[^.\[\]]+", path):  # `section.key[0]`: an item of a list
        if isinstance(value, list) and name.isdecimal():
            value = value[int(name)]  # pyright: ignore[reportUnknownVariableType]
        else:
            value = value.get(name) if isinstance(value, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if value is None or isinstance(value, Mapping):
        return ""
    choices = f". Choices: {', '.join(DATA_TYPES)}" if path == "data.type" else _choices(path, value)
    return f", got {value!r}{choices}"


def _choices(path: str, value: Any) -> str:
    """What a field of fixed choices takes, where the value is none of them."""
    if path.count(".") != 1 or not isinstance(value, str):
        return ""
    section, name = path.partition("[")[0].split(".")
    field_type = get_type_hints(_section_type(section, {})).get(name)
    options = [o for part in (field_type, *get_args(field_type)) if get_origin(part) is Literal for o in get_args(part)]
    return f". Choices: {', '.join(options)}" if options else ""


def _section_type(path: str, tree: Mapping[str, Any]) -> type[msgspec.Struct]:
    if path == "data" and tree.get("data", {}).get("type") == "jsonl":
        return JsonlData
    section: msgspec.Struct = getattr(Config(), path)
    return type(section)
