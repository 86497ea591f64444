"""Reads YAML as a flat list of assignments, each with the line it comes from."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from tandem.config.errors import ConfigError

OTHER_BASE = re.compile(r"[-+]?0_*[0-9][0-9_]*|[^:]*:.*")
"""Matches text that YAML 1.1 reads as a number of base 8 or 60: `0123` as 83, and `1:30` as 90. It is kept as text."""

MERGE = "tag:yaml.org,2002:merge"

COMMAND_LINE = "command line"
"""The source of values that are set by ``key=value``."""


@dataclass(frozen=True)
class Scalar:
    """A plain or quoted value: its text as written, and the value that YAML reads."""

    text: str
    value: Any


@dataclass(frozen=True)
class Assignment:
    """A key, its value, and the place where it was written.

    Example: ``Assignment(("actor", "optimizer", "lr"), Scalar("2e-5", "2e-5"), "gsm8k.yaml:12")``
    """

    path: tuple[str, ...]
    value: Any
    """A `Scalar`, or a list or dict of these."""

    source: str


class _Loader(yaml.SafeLoader):
    """A safe loader, of which only the constructor for scalars is used."""


def packaged(name: str) -> dict[str, dict[str, Any]]:
    """Reads a data file of this package."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # fifteen times as fast, and every command reads the presets
    entries: dict[str, dict[str, Any]] = yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), Loader=loader)
    return entries


def plain(value: Any) -> Any:
    """Returns plain data for a value with `Scalar` leaves; numbers that YAML 1.1 reads as text become numbers."""
    if isinstance(value, Scalar):
        return number(value.text) if isinstance(value.value, str) and value.value == value.text else value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def number(text: str) -> str | float:
    """Converts numbers such as ``2e-5``, which YAML 1.1 reads as text; other text is returned unchanged."""
    if "e" not in text.lower() or not any(c.isdigit() for c in text):
        return text
    try:
        return float(text)
    except ValueError:
        return text


def read_file(file: Path) -> list[Assignment]:
    """Returns the assignments of a file, in order.

    Raises:
        ConfigError: the file does not exist, is not YAML (the message has the line), is not a mapping, or has a key twice.
    """
    if not _is_file(file):
        if os.path.isdir(file):
            inside = f", such as {file / 'config.yaml'}" if os.path.isfile(file / "config.yaml") else ""
            raise ConfigError(f"{file} is a folder; give a YAML file{inside}")
        beside = [other.name for other in file.parent.glob("*.y*ml")] if os.path.isdir(file.parent) else []
        near = "".join(f"did you mean {file.parent / name}? " for name in get_close_matches(file.name, beside, n=1))
        raise ConfigError(f"there is no configuration file {file}; {near or 'give a YAML file, or only key=value'}".rstrip())
    if file.suffix in (".jsonl", ".csv", ".parquet"):
        raise ConfigError(f"{file} is a data file and no configuration; rows to train on are train_dataset.path={file}")
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=_Loader)
        if isinstance(node, yaml.MappingNode):
            return _once(_walk(node, (), file.name))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {_words(error)}") from error
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply, or holds an alias of itself; write it flat") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if node is None:
        return []
    what = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
    raise ConfigError(f"{file} must hold keys and values, such as `seed: 1`; it holds {what}")


def _words(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Returns the message of an error on one line."""
    tab = "; YAML is indented with spaces, not with tabs" if r"'\t'" in str(error) else ""
    return " ".join(str(error).replace('"<unicode string>", ', "").split()) + tab


def _once(assignments: Iterator[Assignment]) -> list[Assignment]:
    """Returns all assignments; raises `ConfigError` if a key is given twice, such as once with dots and once nested."""
    by_path: dict[tuple[str, ...], Assignment] = {}
    for item in assignments:
        before = by_path.setdefault(item.path, item)
        if before is not item:
            raise ConfigError(f"{'.'.join(item.path)} is given twice, in {before.source} and {item.source}; keep one")
    return list(by_path.values())


def _is_file(file: Path) -> bool:
    """True if the file exists; False also for an invalid name."""
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False


def read_override(text: str) -> list[Assignment]:
    """Parses ``key=value`` of the command line, in which the value is YAML.

    Raises:
        ConfigError: there is no `=`, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} is not key=value; write for example actor.optimizer.lr=1e-5")
    path = tuple(key.strip().split("."))
    as_text = [Assignment(path, Scalar(value, value), COMMAND_LINE)]
    flow = value.lstrip()[:1] in ("[", "{")
    try:
        node = yaml.compose(value, Loader=_Loader)
        if isinstance(node, yaml.MappingNode) and flow:
            return list(_walk(node, path, None))
        # Only values in brackets are lists or mappings. All others are one value, such as the prompt `Answer: a # b`.
        if node is None or (not flow and isinstance(node, yaml.CollectionNode)):
            return as_text
        parsed = _value(node)
    except yaml.YAMLError as error:
        if flow:
            raise ConfigError(f"{key}={value}: the value is not valid YAML: {_words(error)}") from error
        return as_text
    except RecursionError:
        raise ConfigError(f"{key}: the value is nested too deeply, or holds an alias of itself") from None
    if isinstance(node, yaml.ScalarNode) and node.style is None:
        parsed = Scalar(value, parsed.value)
    return [Assignment(path, parsed, COMMAND_LINE)]


def _walk(node: yaml.MappingNode, prefix: tuple[str, ...], file: str | None) -> Iterator[Assignment]:
    """Yields an assignment for each value below a mapping; dotted keys are split."""
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{file or COMMAND_LINE}:{line}: a key must be one word, and here it is a list or a mapping")
        if key_node.tag == MERGE:
            raise ConfigError(
                f"{file or COMMAND_LINE}:{line}: `<<` merges are not supported, because every value must be written in "
                "exactly one place; write the keys out, or repeat a whole value with an alias (optimizer: *name)"
            )
        key = str(key_node.value)
        source = f"{file}:{line}" if file else COMMAND_LINE
        if key in seen:
            raise ConfigError(
                f"{'.'.join((*prefix, key))} is given twice, in lines {seen[key]} and {line} of {file}; keep one"
            )
        seen[key] = line
        path = (*prefix, *key.split("."))
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _walk(value_node, path, file)
        else:
            yield Assignment(path, _value(value_node), source)


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    try:
        value = _Loader("").construct_object(node)
    except (ValueError, OverflowError):  # it only looks like a date or a number, such as 2024-99-99
        value = node.value
    if isinstance(value, int) and value.bit_length() > 1024:  # Python cannot print very large integers
        value = node.value
    if isinstance(value, (int, float)) and OTHER_BASE.fullmatch(node.value):
        value = node.value
    return Scalar(node.value, value)
