"""Loads a configuration from defaults, preset, file and command line, and converts it back to text.

A `Draft` applies assignments over the defaults, and then constructs the frozen dataclasses. `KINDS` has the commands that
train and the configuration class of each.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin

import yaml

from tandem.config.algorithm import PRESETS, Component, Knob
from tandem.config.allocation import check_allocation
from tandem.config.check import check, out_of_bounds
from tandem.config.coming_from import REMOVED, hint
from tandem.config.errors import ConfigError, nearest_keys, nearest_names, refuse
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.keys import all_keys, coerce, expected, field_types, leaves, section, without_none
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.config.terms import Spec, spelled
from tandem.config.unused import overruled
from tandem.config.yaml_file import COMMAND_LINE, Assignment, Scalar, plain, read_file, read_override

KINDS: dict[str, type[BaseConfig]] = {
    "train": TrainConfig,
    "sft": SFTConfig,
    "preference": PreferenceConfig,
    "reward": RewardModelConfig,
    "distill": DistillConfig,
}
"""Name of a command → its configuration class."""

COMMANDS = {kind: name for name, kind in KINDS.items()}
"""Configuration class → name of its command. `run.json` has the name, for `tandem continue`."""


Tree = dict[str, Any]
"""Name of a field → value. A section is a nested tree, a `Component` a tree with ``name`` and ``knobs``."""


class Draft:
    """Collects assignments for one configuration class, with the source of each value and all errors.

    ``saved``: the file is the configuration of an existing run, in which removed keys may have any value.
    """

    def __init__(self, cls: type, *, saved: bool = False):
        self.cls, self.saved = cls, saved
        self.tree: Tree = {}
        self.sources: dict[str, str] = {}
        self.errors: list[str] = []
        self.ignored: list[str] = []
        """A message for each removed key that a saved configuration sets to a value that is gone."""

    def apply(self, assignments: Sequence[Assignment]) -> None:
        """Applies one layer of assignments. A component's name is set before its knobs, in whatever order they are written.
        Errors are added to ``errors``."""
        for item in sorted(assignments, key=lambda a: (len(a.path), a.path[-1] != "name")):
            try:
                _assign(self.cls, self.tree, item.path, item.value, _KeyPlace((), item.source, self))
            except ConfigError as error:
                self.errors.append(str(error))

    def build(self) -> Any:
        """Returns the configuration. Call it only if there are no errors."""
        return _build(self.cls, self.tree, self.cls())


@dataclasses.dataclass(frozen=True)
class _KeyPlace:
    """A place in the configuration, for error messages and sources."""

    prefix: tuple[str, ...]
    source: str
    draft: Draft

    def inside(self, name: str) -> "_KeyPlace":
        return dataclasses.replace(self, prefix=(*self.prefix, name))

    @property
    def key(self) -> str:
        return ".".join(self.prefix)

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.key} {text} ({self.source})")

    def record(self) -> None:
        self.draft.sources[self.key] = self.source


def _assign(kind: Any, tree: Tree, path: tuple[str, ...], value: Any, place: _KeyPlace) -> None:
    """Puts one value into the tree of a dataclass ``kind``."""
    if not path:
        if (isinstance(value, Scalar) and value.value is None) or value == {}:
            return  # an empty section, `actor:`
        inner = ", ".join(field_types(kind))
        raise place.error(f"is a section with the keys {inner}; got the single value {plain(value)!r}")
    name, rest = path[0], path[1:]
    types = field_types(kind)
    place = place.inside(name)
    if name not in types:
        if not _removed(place, rest, value):
            raise _unknown(place, rest, value)
        return
    if section(types[name]) is not None:
        if name == "algorithm" and not rest and isinstance(value, Scalar) and value.value is not None:
            name, rest = "algorithm", ("preset",)
        _assign(section(types[name]), tree.setdefault(name, {}), rest, value, place)
    elif types[name] is Component:
        _component(tree, name, rest, value, place)
    elif without_none(types[name])[0] == Spec:
        _spec(types[name], tree, name, rest, value, place)
    elif get_origin(types[name]) is Mapping:
        _mapping(types[name], tree, name, rest, value, place)
    elif rest:
        raise place.error(f"is {expected(types[name])}; it has no part {'.'.join(rest)!r}")
    else:
        tree[name] = _value(types[name], value, place)
        place.record()


NO_TURNS = (
    "`tandem sft` and `tandem reward` have one model, which each step needs as a whole, so nothing could take turns in one "
    "memory. To need less, train adapters (actor.lora.rank), or spread the model over more ranks (actor.backend=fsdp:dN); "
    "`tandem plan` says what fits"
)
"""The reason why training one model on rows has no `memory_limit_gib`, and the remedy."""


def _removed(place: _KeyPlace, rest: tuple[str, ...], value: Any) -> bool:
    """True if the key has been removed and its value can be ignored; False if there was never such a key.

    Raises:
        ConfigError: the value is not the one that is left, and the user asks for it.
    """
    end = REMOVED.get(place.key)
    if end is None or rest:
        return False
    if plain(value) != end.was and (plain(value), end.was) != ("none", None):
        text = f"{place.key}={plain(value)} ({place.source}) is no key any more: {end.now}"
        if not place.draft.saved or place.source == COMMAND_LINE:
            raise ConfigError(text)
        place.draft.ignored.append(text)
    return True


def _unknown(place: _KeyPlace, rest: tuple[str, ...], value: Any) -> ConfigError:
    wanted = ".".join((*place.prefix, *rest))
    keys = list(all_keys(place.draft.cls))
    text = f"unknown key {wanted}={plain(value)} ({place.source})"
    foreign = hint(wanted, keys)
    if foreign:
        return ConfigError(f"{text}: {foreign}")
    if wanted == "memory_limit_gib" and "actor.path" in keys:
        return ConfigError(f"{text}; {NO_TURNS}")
    single = [key for key, _ in leaves(place.draft.cls())]  # without sections, which cannot have a value
    close = nearest_keys(wanted, single) or nearest_keys(place.key, keys)
    others = [name for name, kind in KINDS.items() if place.key in all_keys(kind)]
    if others:
        text += f"; {place.key} belongs to `tandem {'`, `tandem '.join(others)}` (or --for {others[0]})"
        close = [key for key in close if key.rpartition(".")[2] == wanted.rpartition(".")[2]]
    if close or others:
        return ConfigError(f"{text}; did you mean {' or '.join(close)}?" if close else text)
    section_name = ".".join(place.prefix[:-1])
    neighbours = [k for k in keys if k.rpartition(".")[0] == section_name]
    return ConfigError(f"{text}; {section_name or 'the top level'} has {', '.join(neighbours)}")


def _component(tree: Tree, name: str, rest: tuple[str, ...], value: Any, place: _KeyPlace) -> None:
    """Sets a component's name or one of its knobs. ``rest``: () or (name,) for the name, (knob,) or (knobs, knob) for a
    knob."""
    part: Tree = tree.setdefault(name, {"name": None, "knobs": {}})
    if rest in ((), ("name",)):
        if not isinstance(value, Scalar) or value.value is None:
            raise place.error(f"must be a name, or a mapping with name and knobs; got {plain(value)!r}")
        if not _value(str, value, place):
            raise place.error("is empty; name a choice, or leave it out")
        if part["name"] != value.text:  # another name starts with the default knobs
            for knob in part["knobs"]:
                place.draft.sources.pop(place.inside(knob).key, None)
            part.update(name=value.text, knobs={})
        place.record()
        return
    rest = rest[1:] if rest[0] == "knobs" and len(rest) > 1 else rest
    if rest == ("knobs",) and not plain(value):
        return
    if len(rest) != 1:
        raise place.error(f"has knobs of one word, got {'.'.join(rest)}")
    place = place.inside(rest[0])
    part["knobs"][rest[0]] = _value(Knob, value, place)
    place.record()


def _spec(kind: Any, tree: Tree, name: str, rest: tuple[str, ...], value: Any, place: _KeyPlace) -> None:
    """Sets the name of a service, or parts of ``{name: …, knob: …}``, which `_build` converts to one text."""
    if rest and rest[0] in ("by", "recipes"):
        if not isinstance(tree.get(name), dict) or "knobs" in tree[name]:
            tree[name] = {}
        _mapping(Mapping[str, Any], tree, name, rest, value, place)
    elif rest:
        if not isinstance(tree.get(name), dict):
            tree[name] = {"name": tree.get(name), "knobs": {}}
        _component(tree, name, rest, value, place)
    elif isinstance(value, Scalar) and value.value is None and not without_none(kind)[1]:
        tree.pop(name, None)  # null resets the value of an earlier layer
        place.draft.sources.pop(place.key, None)
    else:
        tree[name] = _value(kind, value, place)
        place.record()


def _mapping(kind: Any, tree: Tree, name: str, rest: tuple[str, ...], value: Any, place: _KeyPlace) -> None:
    """Sets a mapping with keys of the user's choice: the whole mapping, or a single key of it (``rest``)."""
    inner = get_args(kind)[1]
    if len(rest) > 1 and inner is not Any:
        raise place.error(f"holds {expected(inner)} under each key, got the key {'.'.join(rest)}")
    if rest:
        table = tree.setdefault(name, {})
        for i, key in enumerate(rest[:-1]):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise place.error(f"cannot hold {'.'.join(rest)}: {'.'.join(rest[: i + 1])} is {table!r} already")
        table[rest[-1]] = _value(inner, value, place.inside(".".join(rest)))
    else:
        tree[name] = _value(kind, value, place)
    place.record()


def _value(kind: Any, value: Any, place: _KeyPlace) -> Any:
    """Converts a value to the type ``kind``; tuples of dataclasses are built item by item."""
    item = get_args(kind)[0] if get_origin(kind) is tuple else None
    if not (isinstance(item, type) and dataclasses.is_dataclass(item)):
        try:
            return coerce(kind, value)
        except ConfigError as error:
            raise place.error(str(error)) from None
    if isinstance(value, Scalar) and value.value is None:
        raise place.error("must be a list, got null; an empty list is []")
    items = value if isinstance(value, (list, tuple)) else [value]
    name = place.prefix[-1]
    places = [dataclasses.replace(place, prefix=(*place.prefix[:-1], f"{name}[{i}]")) for i in range(len(items))]
    return tuple(_item(item, entry, where) for entry, where in zip(items, places, strict=True))


def _item(kind: type, value: Any, place: _KeyPlace) -> Any:
    """Builds one item of a tuple of dataclasses, from a mapping, or from the value of its first field."""
    first = next(iter(field_types(kind)))
    entries = value if isinstance(value, Mapping) else {first: value}
    if kind is Component:
        holder: Tree = {}
        knobs = entries.get("knobs", {})
        if not isinstance(knobs, Mapping) and plain(knobs) is not None:
            raise place.inside("knobs").error(f"must be keys and values, got {plain(knobs)!r}")
        flat = {**{k: v for k, v in entries.items() if k != "knobs"}, **(knobs if isinstance(knobs, Mapping) else {})}
        for key in sorted(flat, key=lambda k: k != "name"):
            _component(holder, "item", (key,), flat[key], place)
        if holder["item"]["name"] is None:
            raise place.error(f"needs a name, got {plain(entries)}")
        return Component(**holder["item"])
    types, values = field_types(kind), {}
    for key, entry in entries.items():
        if key not in types:
            raise place.error(f"has no key {key!r}; {nearest_names(key, types)}")
        values[key] = _value(types[key], entry, place.inside(key))
    missing = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise place.error(f"needs {', '.join(missing)}")
    return kind(**values)


def _build(cls: type, tree: Tree, base: Any) -> Any:
    """Returns a copy of ``base`` with the values of the tree."""
    changes: dict[str, Any] = {}
    types = field_types(cls)
    for name, value in tree.items():
        inner = section(types[name])
        if inner is not None:
            changes[name] = _build(inner, value, getattr(base, name))
        elif types[name] is Component:
            default: Component = getattr(base, name)
            chosen = value["name"] or default.name
            knobs = default.knobs if chosen == default.name else {}
            changes[name] = Component(chosen, {**knobs, **value["knobs"]})
        elif without_none(types[name])[0] == Spec and isinstance(value, dict) and "knobs" not in value:
            try:
                changes[name] = coerce(Spec, value)
            except ConfigError as error:
                raise ConfigError(f"{name} {error}") from None
        elif without_none(types[name])[0] == Spec and isinstance(value, dict):
            changes[name] = spelled(value["name"] or getattr(base, name) or "", value["knobs"], name)
        else:
            changes[name] = value
    return dataclasses.replace(base, **changes)


log = logging.getLogger(__name__)

C = TypeVar("C", bound=BaseConfig)


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """A checked configuration, and the source of each value."""

    config: C
    sources: Mapping[str, str]
    """Dotted key → `default`, `preset grpo`, `gsm8k.yaml:12` or `command line`. If a value of the file was ignored, the
    source says so, with the value's line."""


def load_config(cls: type[C], file: Path | str | None = None, overrides: Sequence[str] = ()) -> Resolved[C]:
    """Loads and checks a configuration: defaults, overridden by the algorithm preset, then by the YAML file, then by
    ``overrides`` (``key=value``).

    If the command line chooses another value of a key such as `rollout.backend`, the file's settings for the other choice
    are ignored with a warning (`unused.overruled`).

    Raises:
        ConfigError: the message has every wrong key with its value, the rule and the remedy.
    """
    problems: list[str] = []
    saved = file is not None and _is_saved(Path(file))
    layers = [read_file(Path(file)) if file is not None else []]
    for text in overrides:
        try:
            layers.append(read_override(text))
        except ConfigError as error:
            problems.append(str(error))
    written = _drafted(cls, layers, saved)
    preset = [*_preset_of(cls, written.tree, problems), *_allocated(written, problems)]
    draft = _drafted(cls, [preset, *layers], saved)
    if problems or draft.errors:
        with contextlib.suppress(ConfigError):  # the rest cannot be built, for one of the problems
            problems += out_of_bounds(draft.build(), draft.sources)
    refuse(problems + draft.errors)
    for text in draft.ignored:
        log.warning("%s", text)
    config = draft.build()
    aside = {key: _told_aside(key, choice, written) for key, choice in overruled(config, written.sources).items()}
    if aside:
        layers[0] = [item for item in layers[0] if ".".join(item.path) not in aside]
        draft = _drafted(cls, [preset, *layers], saved)
        config = draft.build()
    check(config, written=written.sources, saved=saved)
    return Resolved(config, {key: draft.sources.get(key, aside.get(key, "default")) for key in _source_keys(config)})


def _is_saved(file: Path) -> bool:
    """True if a file is the configuration that a run has saved in its folder."""
    return file.name == "config.yaml" and (file.parent / "run.json").is_file()


def _drafted(cls: type, layers: Sequence[Sequence[Assignment]], saved: bool) -> Draft:
    draft = Draft(cls, saved=saved)
    for layer in layers:
        draft.apply(layer)
    return draft


def _told_aside(key: str, choice: str, written: Draft) -> str:
    """Warns that a value of the file is ignored; returns the text for its source."""
    place = written.sources[key]
    log.warning("%s of %s is left aside: with the %s of the command line nothing reads it", key, place, choice)
    return f"default; {place} is for another {choice}"


def _allocated(written: Draft, problems: list[str]) -> list[Assignment]:
    """Returns assignments of the keys that `allocation` sets, if it is given. Errors are added to ``problems``."""
    text = written.tree.get("allocation")
    if text is None:
        return []
    beside = {}
    for key in written.sources:
        value: Any = written.tree
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        beside[key] = value
    try:
        keys = check_allocation(text, beside)
    except ConfigError as error:
        problems.append(str(error))
        return []
    return [Assignment(tuple(key.split(".")), _scalars(value), f"allocation={text}") for key, value in keys.items()]


def _preset_of(cls: type, tree: Mapping[str, Any], problems: list[str]) -> list[Assignment]:
    if not issubclass(cls, TrainConfig):
        return []
    try:
        return _preset(tree)
    except ConfigError as error:
        problems.append(str(error))
        return []


def _preset(tree: Mapping[str, Any]) -> list[Assignment]:
    """Returns the values of the chosen preset as assignments."""
    name = tree.get("algorithm", {}).get("preset", "grpo")
    if name not in PRESETS:
        raise ConfigError(f"algorithm.preset={name} is not known; {nearest_names(name, PRESETS)}")
    preset = PRESETS[name]
    assignments = list(_flatten(preset.values, ("algorithm",), f"preset {name}"))
    assignments += _flatten(preset.run, (), f"preset {name}")
    replays = tree.get("rollout", {}).get("replay", {}).get("groups")
    if (tree.get("async_training") or replays) and preset.asynchronous is not None:
        how = "asynchronous" if tree.get("async_training") else "replay"
        assignments += _flatten(preset.asynchronous, ("algorithm",), f"preset {name}, {how}")
    return assignments


def _flatten(values: Mapping[str, Any], prefix: tuple[str, ...], source: str) -> Iterator[Assignment]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, key), source)
        else:
            yield Assignment((*prefix, key), _scalars(value), source)


def _scalars(value: Any) -> Any:
    """Converts plain data to the form of values from YAML, with `Scalar` leaves."""
    if isinstance(value, Mapping):
        return {key: _scalars(item) for key, item in value.items()}
    return [_scalars(item) for item in value] if isinstance(value, (list, tuple)) else Scalar(str(value), value)


def _source_keys(config: Any) -> Iterator[str]:
    """Yields the keys that have a source: every single value, and every knob that is set."""
    for key, value in leaves(config):
        yield key
        if isinstance(value, Component):
            yield from (f"{key}.{knob}" for knob in value.knobs)


def plain_data(value: Any) -> Any:
    """Converts a configuration or value to dicts, lists and scalars; a component without knobs becomes its name."""
    if isinstance(value, Component):
        return {"name": value.name, **value.knobs} if value.knobs else value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain_data(item) for key, item in value.items()}
    return [plain_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_yaml(config: BaseConfig) -> str:
    """Returns the whole configuration as YAML; loading this gives the same configuration."""
    return yaml.safe_dump(plain_data(config), sort_keys=False, allow_unicode=True, width=1000)


def describe(resolved: Resolved[Any], hidden: Sequence[str] = ()) -> str:
    """Returns the configuration as YAML with the source of each value as a comment. Values from the sources ``hidden`` are
    left out."""
    lines = list(_described(plain_data(resolved.config), "", "", resolved.sources, hidden))
    width = min(60, max(len(text) for text, _ in lines))
    return "\n".join(f"{text:<{width}}  # {source}" if source else text for text, source in lines)


def _described(
    data: Mapping[str, Any], indent: str, prefix: str, sources: Mapping[str, str], hidden: Sequence[str]
) -> Iterator[tuple[str, str]]:
    for name, value in data.items():
        key = prefix + name
        if isinstance(value, Mapping) and value and (key not in sources or f"{key}.{_last(value)}" in sources):
            below = {f"{key}.name": sources.get(key, ""), **sources}
            inner = list(_described(value, indent + "  ", key + ".", below, hidden))
            yield from [(f"{indent}{name}:", ""), *inner] if inner else ()
        elif sources.get(key) not in hidden:
            text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
            yield f"{indent}{name}: {text.removesuffix('...' + chr(10)).strip()}", sources.get(key, "")


def _last(value: Mapping[str, Any]) -> str:
    return list(value)[-1]
