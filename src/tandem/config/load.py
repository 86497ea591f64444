"""From defaults, preset, file and command line to one configuration, and back to text."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from tandem.config.algorithm import Component
from tandem.config.allocation import check_allocation
from tandem.config.check import check
from tandem.config.errors import ConfigError, nearest_names, refuse
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.keys import leaves
from tandem.config.presets import PRESETS
from tandem.config.tree import Draft
from tandem.config.unused import overruled
from tandem.config.yaml_file import Assignment, Scalar, read_file, read_override

log = logging.getLogger(__name__)

C = TypeVar("C", bound=BaseConfig)


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """A configuration that was checked, and where each of its values comes from."""

    config: C
    sources: Mapping[str, str]
    """Dotted key → `default`, `preset grpo`, `gsm8k.yaml:12` or `command line`; of a value of the file that was left aside,
    also where it stood."""


def load_config(cls: type[C], file: Path | str | None = None, overrides: Sequence[str] = ()) -> Resolved[C]:
    """Defaults ← algorithm preset ← YAML file ← ``key=value``, checked.

    What the file says for another choice than that of the command line, such as of `rollout.backend`, is left aside with a
    warning (`unused.overruled`).

    Raises:
        ConfigError: names every key that is wrong, its value, the rule and what to do.
    """
    problems: list[str] = []
    layers = [read_file(Path(file)) if file is not None else []]
    for text in overrides:
        try:
            layers.append(read_override(text))
        except ConfigError as error:
            problems.append(str(error))
    written = _drafted(cls, layers)
    preset = [*_preset_of(cls, written.tree, problems), *_allocated(written, problems)]
    draft = _drafted(cls, [preset, *layers])
    refuse(problems + draft.errors)
    config = draft.build()
    aside = {key: _told_aside(key, choice, written) for key, choice in overruled(config, written.sources).items()}
    if aside:
        layers[0] = [item for item in layers[0] if ".".join(item.path) not in aside]
        draft = _drafted(cls, [preset, *layers])
        config = draft.build()
    check(config, written=written.sources)
    return Resolved(config, {key: draft.sources.get(key, aside.get(key, "default")) for key in _source_keys(config)})


def _drafted(cls: type, layers: Sequence[Sequence[Assignment]]) -> Draft:
    draft = Draft(cls)
    for layer in layers:
        draft.apply(layer)
    return draft


def _told_aside(key: str, choice: str, written: Draft) -> str:
    """Says that a value of the file is not taken; returns what stands for its source."""
    place = written.sources[key]
    log.warning("%s of %s is left aside: with the %s of the command line nothing reads it", key, place, choice)
    return f"default; {place} is for another {choice}"


def _allocated(written: Draft, problems: list[str]) -> list[Assignment]:
    """The keys that `allocation` sets, where it is given."""
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
        found = check_allocation(text, beside)
    except ConfigError as error:
        problems.append(str(error))
        return []
    return [Assignment(tuple(key.split(".")), _scalars(value), f"allocation={text}") for key, value in found.items()]


def _preset_of(cls: type, tree: Mapping[str, Any], problems: list[str]) -> list[Assignment]:
    if not issubclass(cls, TrainConfig):
        return []
    try:
        return _preset(tree)
    except ConfigError as error:
        problems.append(str(error))
        return []


def _preset(tree: Mapping[str, Any]) -> list[Assignment]:
    """The values that the chosen preset sets, as assignments."""
    name = tree.get("algorithm", {}).get("preset", "grpo")
    if name not in PRESETS:
        raise ConfigError(f"algorithm.preset={name} is not known; {nearest_names(name, PRESETS)}")
    preset = PRESETS[name]
    found = list(_flatten(preset.values, ("algorithm",), f"preset {name}"))
    found += _flatten(preset.run, (), f"preset {name}")
    replays = tree.get("rollout", {}).get("replay", {}).get("groups")
    if (tree.get("async_training") or replays) and preset.asynchronous is not None:
        how = "asynchronous" if tree.get("async_training") else "replay"
        found += _flatten(preset.asynchronous, ("algorithm",), f"preset {name}, {how}")
    return found


def _flatten(values: Mapping[str, Any], prefix: tuple[str, ...], source: str) -> Iterator[Assignment]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, key), source)
        else:
            yield Assignment((*prefix, key), _scalars(value), source)


def _scalars(value: Any) -> Any:
    """The form that YAML gives, from plain data."""
    if isinstance(value, Mapping):
        return {key: _scalars(item) for key, item in value.items()}
    return [_scalars(item) for item in value] if isinstance(value, (list, tuple)) else Scalar(str(value), value)


def _source_keys(config: Any) -> Iterator[str]:
    """Keys with a source: every single value, and every knob that is set."""
    for key, value in leaves(config):
        yield key
        if isinstance(value, Component):
            yield from (f"{key}.{knob}" for knob in value.knobs)


def plain_data(value: Any) -> Any:
    """Dicts, lists and scalars; a component without knobs is its name."""
    if isinstance(value, Component):
        return {"name": value.name, **value.knobs} if value.knobs else value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain_data(item) for key, item in value.items()}
    return [plain_data(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_yaml(config: BaseConfig) -> str:
    """The whole configuration as YAML; loading it gives the same configuration."""
    return yaml.safe_dump(plain_data(config), sort_keys=False, allow_unicode=True, width=1000)


def describe(resolved: Resolved[Any], hidden: Sequence[str] = ()) -> str:
    """The configuration as YAML with the source of each value as a comment; without values from the sources ``hidden``."""
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
