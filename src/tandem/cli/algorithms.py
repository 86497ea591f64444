"""List the algorithms, or say everything about one: values, formula, what asynchronous training adds, what to watch.

examples:
  tandem algorithms
  tandem algorithms gspo
  tandem algorithms gspo algorithm.policy_loss.clip_high=5e-4
  tandem algorithms --parts
  tandem algorithms --json
"""

import argparse
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from tandem.api.shared_files import aligned
from tandem.config.algorithm import PRESETS, AlgorithmConfig, Component
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.experiment import TrainConfig
from tandem.config.keys import flat
from tandem.config.load import load_config, plain_data
from tandem.config.parts import PARTS, part_of
from tandem.tracking.catalog import METRICS

WIDTH = 118

NOTATION = """r_i: reward of sample i; T_i: its trained tokens; g: its group, its prompt's samples; N: samples in the loss.
ρ = exp(policy − proximal), w = exp(proximal − rollout), d = policy − reference, from log-probabilities by: `rollout` the
inference engine, `proximal` the trainer just before this update, `policy` the weights being optimised, `reference` the
frozen model. sg: without gradient. Log-ratios are clamped to ±20."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="one algorithm; without it, all are listed")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to the algorithm before it is shown")
    parser.add_argument("--parts", action="store_true", help="list every loss, advantage, correction … by itself instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object, or without NAME a list of objects")


def run(arguments: argparse.Namespace) -> int:
    if arguments.parts and arguments.name is not None:
        raise ConfigError(f"--parts lists the parts of all algorithms; leave {arguments.name!r} out")
    data: Any
    text: Callable[[Any], Iterator[str]]
    if arguments.parts:
        data, text = list(all_parts()), _parts_text
    elif arguments.name is None:
        data, text = [about(name) for name in PRESETS], _listing
        data = [{key: row[key] for key in ("name", "summary", "paper", "arxiv", "needs")} for row in data]
    else:
        data, text = about(arguments.name, arguments.changes), _text
    print(json.dumps(data, ensure_ascii=False) if arguments.json else "\n".join(text(data)))
    return 0


def about(name: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Describes a preset with ``key=value`` changes, as plain data. ``asynchronous`` holds the values that asynchronous
    training changes, or a text: the reason why the preset cannot train asynchronously. ``outside`` holds keys that the
    preset sets outside of `algorithm`.

    Raises:
        ConfigError: the preset is unknown (the message names the nearest), or a change is refused.
    """
    if name not in PRESETS:
        for part in all_parts():
            if part["name"] == name:
                raise ConfigError(
                    f"{name!r} is no algorithm but a part of one: train with {part['key']}={name}; `tandem algorithms "
                    "--parts` says what it does"
                )
        raise ConfigError(f"no algorithm is called {name!r}; {nearest_names(name, PRESETS)}")
    preset, config = PRESETS[name], preset_config(name, changes)
    return {
        "name": name,
        "summary": preset.summary,
        "paper": preset.title,
        "arxiv": preset.arxiv,
        "needs": _needs(config),
        "when": preset.when,
        "formulas": dict(_formulas(config)),
        "algorithm": _with_knobs(config),
        "outside": dict(flat(preset.run)),
        "asynchronous": _asynchronous(name, changes, config),
        "metrics": {key: {"meaning": METRICS[key].meaning, "advice": advice} for key, advice in preset.watch.items()},
    }


def preset_config(name: str, changes: Sequence[str] = ()) -> AlgorithmConfig:
    """Returns the `algorithm` section of a preset with ``key=value`` changes. A placeholder data set is filled in, because
    a configuration without one is refused."""
    items = ["train_dataset.path=addition", f"algorithm={name}", *changes]
    return load_config(TrainConfig, None, items).config.algorithm


def shown(values: Mapping[str, Any]) -> str:
    """Returns the `algorithm` section as YAML: each part with its knobs, and other values only where they differ from the
    default."""
    plain = plain_data(AlgorithmConfig())
    section: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, Mapping):
            section |= {key: value} if key != "preset" and value != plain[key] else {}
        elif "name" in value:
            section |= {key: value} if value["name"] != "none" else {}
        elif inner := {name: item for name, item in value.items() if item != plain[key][name]}:
            section[key] = inner
    words = yaml.safe_dump({"algorithm": section}, sort_keys=False, allow_unicode=True, width=WIDTH, default_flow_style=None)
    return words.rstrip()


def all_parts() -> Iterator[dict[str, Any]]:
    """Yields every named choice for every part of an algorithm, in the order in which a batch passes through the parts.
    Each has ``key`` (the configuration key that sets it), ``name``, ``formula``, ``sources`` (arXiv numbers) and ``knobs``
    (name → default)."""
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


def _needs(config: AlgorithmConfig) -> list[str]:
    """Lists the models and data that an algorithm needs besides the actor."""
    advantage = part_of("advantage", config.advantage.name)
    needs = {
        "critic": advantage.needs_critic,
        "reference": config.kl.coefficient > 0,
        "group": advantage.needs_group,
        "several rewards": advantage.needs_named_rewards,
        "greedy answer": advantage.needs_greedy,
    }
    return [name for name, needed in needs.items() if needed]


def _with_knobs(config: AlgorithmConfig) -> dict[str, Any]:
    """Returns the section as plain data. Each component has all its knobs, including those at their defaults."""
    parts = ("advantage", "policy_loss", "aggregation", "filter", "token_filter")
    values = plain_data(config) | {part: _component(part, getattr(config, part)) for part in parts}
    return values | {"shaping": [_component("shaping", shaping) for shaping in config.shaping]}


def _component(part: str, component: Component) -> dict[str, Any]:
    defaults = {name: rule.default for name, rule in part_of(part, component.name).knobs.items()}
    return {"name": component.name, **defaults, **component.knobs}


def _formulas(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yields (part, formula) in the order in which a batch passes through the parts."""
    parts = [("shaping", shaping) for shaping in config.shaping]
    parts += [
        (part, getattr(config, part)) for part in ("filter", "advantage", "policy_loss", "token_filter", "aggregation")
    ]
    parts += [("correction.reject", config.correction.reject)]
    if config.labels == "majority":
        yield "labels", "r_i = 1 where the answer of sample i equals the answer that most samples of g gave, else 0"
    for part, component in parts:
        formula = part_of(part, component.name).formula  # empty for a user's function
        if formula and component.name != "none":
            yield (f"{part}: {component.name}" if part == "shaping" else part), _without_off(part, component, formula)
    if config.whitening != "none":
        yield "whitening", f"A_t whitened over the trained tokens of {'g' if config.whitening == 'group' else 'the batch'}"
    correction, kl = config.correction, config.kl
    if correction.weight != "none":
        weight = part_of("correction.weight", correction.weight)
        limits = {"low": correction.low, "high": correction.highest}
        bounds = [f"{bound} = {value:g}" for bound, value in limits.items() if bound in weight.knobs]
        yield "correction", f"{weight.formula}; {', '.join(bounds)}, of each {correction.level}"
    if kl.coefficient > 0:
        effect = {"loss": "added to L_t", "reward": "subtracted from the reward of each token"}[kl.where]
        form = kl.estimator or ("k1" if kl.where == "reward" else "k3")
        ratio = " × exp(policy − rollout)" if kl.importance else ""
        yield "kl", f"{kl.coefficient:g} × {form}{ratio} {effect}; {form} = {part_of('kl.estimator', form).formula}"
    if config.entropy_coefficient:
        yield "entropy", f"L_t ← L_t − {config.entropy_coefficient:g} × entropy of token t"


def _without_off(part: str, component: Component, text: str) -> str:
    """Returns the formula without the clauses `; with KNOB = …` whose knob is off (0)."""
    knobs = _component(part, component)
    first, *clauses = text.split("; with ")
    return "; with ".join([first, *(clause for clause in clauses if knobs.get(clause.split(" ")[0]) != 0)])


def _asynchronous(name: str, changes: Sequence[str], config: AlgorithmConfig) -> dict[str, Any] | str:
    try:
        other = preset_config(name, [*changes, "async_training=true"])
    except ConfigError as error:
        return str(error)
    before, after = dict(flat(plain_data(config))), dict(flat(plain_data(other)))
    changed = {f"algorithm.{key}": value for key, value in after.items() if before.get(key) != value}
    if "algorithm.correction.weight" in changed:
        changed["algorithm.correction.high"] = other.correction.highest
    return changed


def _listing(presets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [(row["name"], ", ".join(row["needs"]) or "—", row["arxiv"] or "—", row["summary"]) for row in presets]
    rows.insert(0, ("name", "needs", "arXiv", "what it is"))
    yield from aligned(rows)
    usage = "NAME explains one, --parts lists their parts; tandem train FILE algorithm=NAME trains with one."
    yield from ("", f"tandem algorithms {usage}")


def _parts_text(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines that list all parts, grouped by the key that sets them."""
    key = ""
    for part in parts:
        if part["key"] != key:
            yield from ("", part["key"]) if key else (part["key"],)
            key = part["key"]
        knobs = f" [{', '.join(f'{name}={value}' for name, value in part['knobs'].items())}]" if part["knobs"] else ""
        sources = f" (arXiv:{', '.join(part['sources'])})" if part["sources"] else ""
        yield from _wrapped(f"  {part['name']}", f"{part['formula']}{knobs}{sources}")
    yield from ("", *textwrap.wrap(NOTATION, WIDTH))


def _text(preset: Mapping[str, Any]) -> Iterator[str]:
    link = f", https://arxiv.org/abs/{preset['arxiv']}" if preset["arxiv"] else ""
    yield f"{preset['name']}: {preset['summary']}"
    yield from _wrapped("paper", preset["paper"] + link)
    yield from _wrapped("needs", ", ".join(preset["needs"]) or "nothing but the actor")
    yield from _wrapped("when", preset["when"])
    yield from ("", shown(preset["algorithm"]), "")
    if preset["outside"]:
        yield from _wrapped("outside", " ".join(f"{key}={value}" for key, value in preset["outside"].items()))
    for part, formula in preset["formulas"].items():
        yield from _wrapped(part, formula)
    yield from ("", *textwrap.wrap(NOTATION, WIDTH), "")
    yield from _wrapped("asynchronous", f"training {asynchronous_words(preset['asynchronous'])}")
    yield from ("", "watch")
    for name, metric in preset["metrics"].items():
        yield from _wrapped(f"  {name}", f"{metric['meaning']} {metric['advice']}")


def asynchronous_words(change: Mapping[str, Any] | str) -> str:
    """Turns the value ``asynchronous`` of `about` into words."""
    if isinstance(change, str):
        return f"is refused: {change}"
    return f"adds {' '.join(f'{key}={value}' for key, value in change.items())}" if change else "changes nothing"


def _wrapped(label: str, words: str) -> list[str]:
    return textwrap.wrap(f"{label}: {words}", WIDTH, subsequent_indent="    ")
