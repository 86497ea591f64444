"""The facts about an algorithm, put together from the preset, the records of its parts and the notes.

`tandem algorithms` prints it; scripts/algorithm_pages.py writes it into docs/algorithms/.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tandem.algorithms.presets.notes import NOTES, Note, needs_of
from tandem.config.algorithm import AlgorithmConfig, Component
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config, plain_data
from tandem.config.nearest import nearest_names
from tandem.config.parts import PARTS, part_of
from tandem.config.presets import PRESETS

NOTATION = """r_i: reward of sample i; T_i: its trained tokens; g: its group, its prompt's samples; N: samples in the loss.
ρ = exp(policy − proximal), w = exp(proximal − rollout), d = policy − reference, from log-probabilities by: `rollout` the
inference engine, `proximal` the trainer just before this update, `policy` the weights being optimised, `reference` the
frozen model. sg: without gradient. Log-ratios are clamped to ±20."""

SOME_DATA = "train_dataset.path=addition"
"""A configuration is whole with data only; which data does not matter here."""

SHOWN = ("advantage", "policy_loss", "aggregation", "filter", "token_filter")
NONE = {"name": "none"}


@dataclass(frozen=True)
class Algorithm:
    """One preset, resolved, with what the user changed in it."""

    name: str
    summary: str
    """One line."""

    note: Note
    needs: tuple[str, ...]
    """Its needs besides the actor."""

    formulas: Mapping[str, str]
    """Part → formula, in the order in which a batch meets them."""

    values: Mapping[str, Any]
    """The whole `algorithm` section, plain data, defaults of knobs included."""

    outside: Mapping[str, Any]
    """The values that the preset sets outside of that section: dotted key → value."""

    asynchronous: Mapping[str, Any] | str
    """Dotted key → value that asynchronous training changes; or the reason why it is refused."""

    def shown(self) -> dict[str, Any]:
        """The values that say something: every part with its knobs, and what is not at its default."""
        plain = plain_data(AlgorithmConfig())
        shown: dict[str, Any] = {}
        for key, value in self.values.items():
            if key in SHOWN:
                shown |= {} if value == NONE else {key: value}
            elif isinstance(value, Mapping):
                inner = {name: item for name, item in value.items() if item != plain[key][name]}
                shown |= {key: inner} if inner else {}
            elif key != "preset" and value != plain[key]:
                shown[key] = value
        return shown


def algorithm(name: str, overrides: Sequence[str] = ()) -> Algorithm:
    """The preset of that name, with ``key=value`` changes.

    Raises:
        ConfigError: no such preset (tells the nearest), or changes that are refused.
    """
    if name not in PRESETS:
        for part in all_parts():
            if part["name"] == name:
                raise ConfigError(
                    f"{name!r} is no algorithm but a part of one: train with {part['key']}={name}; `tandem algorithms "
                    "--parts` says what it does"
                )
        raise ConfigError(f"no algorithm is called {name!r}; {nearest_names(name, PRESETS)}")
    config = _load(name, overrides).algorithm
    return Algorithm(
        name=name,
        summary=summary(name),
        note=NOTES[name],
        needs=needs_of(config),
        formulas=dict(_formulas(config)),
        values=_with_knobs(config),
        outside=dict(_flat(PRESETS[name].run)),
        asynchronous=_asynchronous(name, overrides, config),
    )


def all_parts() -> Iterator[dict[str, Any]]:
    """Every named choice of every part of an algorithm, in the order in which a batch meets them: the ``key`` that sets
    it, ``name``, ``formula``, ``sources`` (arXiv numbers), ``knobs`` (name → default)."""
    for kind, parts in PARTS.items():
        for name, part in parts.items():
            if name != "none":
                yield {
                    "key": kind if kind == "loss" else f"algorithm.{kind}",
                    "name": name,
                    "formula": part.formula,
                    "sources": part.sources,
                    "knobs": {knob: rule.default for knob, rule in part.knobs.items()},
                }


def summary(name: str) -> str:
    """A preset in a line, without the paper's number, which the note has."""
    return PRESETS[name].summary.partition(" (arXiv:")[0]


def _load(name: str, overrides: Sequence[str]) -> TrainConfig:
    return load_config(TrainConfig, None, [SOME_DATA, f"algorithm={name}", *overrides]).config


def _with_knobs(config: AlgorithmConfig) -> dict[str, Any]:
    """The section as plain data, where a component shows its knobs, also those at their defaults."""
    values = plain_data(config)
    for part in SHOWN:
        values[part] = _component(part, getattr(config, part))
    values["shaping"] = [_component("shaping", shaping) for shaping in config.shaping]
    return values


def _component(part: str, component: Component) -> dict[str, Any]:
    defaults = {name: rule.default for name, rule in part_of(part, component.name).knobs.items()}
    return {"name": component.name, **defaults, **component.knobs}


def _formulas(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    parts = [("shaping", shaping) for shaping in config.shaping]
    parts += [
        (part, getattr(config, part)) for part in ("filter", "advantage", "policy_loss", "token_filter", "aggregation")
    ]
    parts += [("correction.reject", config.correction.reject)]
    if config.labels == "majority":
        yield "labels", "r_i = 1 where the answer of sample i equals the answer that most samples of g gave, else 0"
    for part, component in parts:
        formula = part_of(part, component.name).formula  # empty for a function of the user's
        if formula and component.name != "none":
            yield (f"{part}: {component.name}" if part == "shaping" else part), _without_off(part, component, formula)
    if config.whitening != "none":
        yield "whitening", f"A_t whitened over the trained tokens of {'g' if config.whitening == 'group' else 'the batch'}"
    correction, kl = config.correction, config.kl
    if correction.weight != "none":
        weight = part_of("correction.weight", correction.weight)
        bounds = [
            f"{bound} = {value:g}"
            for bound, value in (("low", correction.low), ("high", correction.highest))
            if bound in weight.knobs
        ]
        yield "correction", f"{weight.formula}; {', '.join(bounds)}, of each {correction.level}"
    if kl.coefficient > 0:
        what = {"loss": "added to L_t", "reward": "subtracted from the reward of each token"}[kl.where]
        form = kl.estimator or ("k1" if kl.where == "reward" else "k3")
        ratio = " × exp(policy − rollout)" if kl.importance else ""
        yield "kl", f"{kl.coefficient:g} × {form}{ratio} {what}; {form} = {part_of('kl.estimator', form).formula}"
    if config.entropy_coefficient:
        yield "entropy", f"L_t ← L_t − {config.entropy_coefficient:g} × entropy of token t"


def _without_off(part: str, component: Component, text: str) -> str:
    """Without the clauses `; with KNOB = …` of knobs that are off."""
    knobs = _component(part, component)
    clauses = text.split("; with ")
    return "; with ".join([clauses[0], *(clause for clause in clauses[1:] if knobs.get(clause.split(" ")[0]) != 0)])


def _asynchronous(name: str, overrides: Sequence[str], config: AlgorithmConfig) -> Mapping[str, Any] | str:
    try:
        other = _load(name, [*overrides, "async_training=true"]).algorithm
    except ConfigError as error:
        return str(error)
    before, after = dict(_flat(plain_data(config))), dict(_flat(plain_data(other)))
    changed = {f"algorithm.{key}": value for key, value in after.items() if before.get(key) != value}
    if "algorithm.correction.weight" in changed:
        changed["algorithm.correction.high"] = other.correction.highest
    return changed


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def refusals(name: str) -> Iterator[tuple[str, str]]:
    """The overrides that a preset is refused with, and the messages; the message is empty where it is not refused."""
    for overrides in NOTES[name].refused:
        try:
            _load(name, overrides)
            message = ""
        except ConfigError as error:
            message = str(error)
        yield " ".join(overrides), message


def as_yaml(values: Mapping[str, Any]) -> str:
    """The section as it would stand in a file."""
    return yaml.safe_dump({"algorithm": dict(values)}, sort_keys=False, allow_unicode=True, width=120).rstrip()
