"""A configuration while it is being put together: assignments over defaults, then frozen data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from tandem.config.algorithm import Component, Knob
from tandem.config.coerce import coerce, expected, without_none
from tandem.config.coming_from import hint
from tandem.config.commands import KINDS
from tandem.config.errors import ConfigError, nearest_keys, nearest_names
from tandem.config.keys import all_keys, field_types, leaves, section
from tandem.config.terms import Spec, spelled
from tandem.config.yaml_file import Assignment, Scalar, plain

Tree = dict[str, Any]
"""Field → value; a section is a tree, a `Component` a tree of ``name`` and ``knobs``."""


class Draft:
    """Collects assignments for one class, with the source of each value and everything that is wrong with them."""

    def __init__(self, cls: type):
        self.cls = cls
        self.tree: Tree = {}
        self.sources: dict[str, str] = {}
        self.errors: list[str] = []

    def apply(self, assignments: Sequence[Assignment]) -> None:
        """One layer. A component's name is set before its knobs, in whatever order they stand."""
        for item in sorted(assignments, key=lambda a: (len(a.path), a.path[-1] != "name")):
            try:
                _assign(self.cls, self.tree, item.path, item.value, _KeyPlace((), item.source, self))
            except ConfigError as error:
                self.errors.append(str(error))

    def build(self) -> Any:
        """The configuration; call it when there are no errors."""
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
            return  # `actor:` with nothing under it
        inner = ", ".join(field_types(kind))
        raise place.error(f"is a section with the keys {inner}; got the single value {plain(value)!r}")
    name, rest = path[0], path[1:]
    types = field_types(kind)
    place = place.inside(name)
    if name not in types:
        if isinstance(value, Scalar) and (place.key, value.value) in GONE:
            return
        raise _unknown(place, rest, value)
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


GONE = (("rollout.engine.cuda_graphs", None),)
"""Keys that are gone, with their last default. The config.yaml of an older run still has them; at this value they are
ignored."""

NO_TURNS = (
    "`tandem sft` and `tandem reward` have one model, which each step needs as a whole, so nothing could take turns in one "
    "memory. To need less, train adapters (actor.lora.rank), or spread the model over more ranks (actor.backend=fsdp:dN); "
    "`tandem plan` says what fits"
)
"""The reason why training one model on rows has no `memory_limit_gib`, and the remedy."""


def _unknown(place: _KeyPlace, rest: tuple[str, ...], value: Any) -> ConfigError:
    wanted = ".".join((*place.prefix, *rest))
    keys = list(all_keys(place.draft.cls))
    text = f"unknown key {wanted}={plain(value)} ({place.source})"
    foreign = hint(wanted, keys)
    if foreign:
        return ConfigError(f"{text}: {foreign}")
    if wanted == "memory_limit_gib" and "actor.path" in keys:
        return ConfigError(f"{text}; {NO_TURNS}")
    single = [key for key, _ in leaves(place.draft.cls())]  # a section takes no value, so it would be a wrong hint
    close = nearest_keys(wanted, single) or nearest_keys(place.key, keys)
    others = [name for name, kind in KINDS.items() if place.key in all_keys(kind)]
    if others:
        text += f"; {place.key} belongs to `tandem {'`, `tandem '.join(others)}` (or --for {others[0]})"
        close = [key for key in close if key.rpartition(".")[2] == wanted.rpartition(".")[2]]
    if close or others:
        return ConfigError(f"{text}; did you mean {' or '.join(close)}?" if close else text)
    section_name = ".".join(place.prefix[:-1])
    there = [k for k in keys if k.rpartition(".")[0] == section_name]
    return ConfigError(f"{text}; {section_name or 'the top level'} has {', '.join(there)}")


def _component(tree: Tree, name: str, rest: tuple[str, ...], value: Any, place: _KeyPlace) -> None:
    """``rest``: () or (name,) for the choice, (knob,) or (knobs, knob) for one of its knobs."""
    part: Tree = tree.setdefault(name, {"name": None, "knobs": {}})
    if rest in ((), ("name",)):
        if not isinstance(value, Scalar) or value.value is None:
            raise place.error(f"must be a name, or a mapping with name and knobs; got {plain(value)!r}")
        if not _value(str, value, place):
            raise place.error("is empty; name a choice, or leave it out")
        if part["name"] != value.text:  # another choice starts from its own defaults
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
    """A name of a service, or ``{name: …, knob: …}``, of which `_build` makes one text."""
    if rest and rest[0] in ("by", "recipes"):
        if not isinstance(tree.get(name), dict) or "knobs" in tree[name]:
            tree[name] = {}
        _mapping(Mapping[str, Any], tree, name, rest, value, place)
    elif rest:
        if not isinstance(tree.get(name), dict):
            tree[name] = {"name": tree.get(name), "knobs": {}}
        _component(tree, name, rest, value, place)
    elif isinstance(value, Scalar) and value.value is None and not without_none(kind)[1]:
        tree.pop(name, None)  # what a file says is taken back
        place.draft.sources.pop(place.key, None)
    else:
        tree[name] = _value(kind, value, place)
        place.record()


def _mapping(kind: Any, tree: Tree, name: str, rest: tuple[str, ...], value: Any, place: _KeyPlace) -> None:
    """Free keys and values; single keys are added to those that are there."""
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
    """A coerced value; tuples of dataclasses are built item by item."""
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
    """One element of a tuple of dataclasses, from a mapping, or from its first field alone."""
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
    """``base`` with the values of the tree."""
    changes: dict[str, Any] = {}
    types = field_types(cls)
    for name, value in tree.items():
        inner = section(types[name])
        if inner is not None:
            changes[name] = _build(inner, value, getattr(base, name))
        elif types[name] is Component:
            default: Component = getattr(base, name)
            chosen = value["name"] or default.name
            kept = default.knobs if chosen == default.name else {}
            changes[name] = Component(chosen, {**kept, **value["knobs"]})
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
