"""Makes docs/configuration.md from the dataclasses: ``python scripts/configuration_page.py > docs/configuration.md``."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tandem.config.algorithm import Component
from tandem.config.data import SourceConfig
from tandem.config.evaluation import EvaluationConfig, EvaluationData
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.keys import bound, field_types, section, without_none
from tandem.config.parts import PARTS, PartRecord
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.config.terms import Spec

HEAD = """# Configuration

Made by `python scripts/configuration_page.py > docs/configuration.md`; do not edit.

A configuration is put together from, in this order: the defaults below, the algorithm preset, a YAML file, and `key=value`
on the command line. `tandem config FILE key=value …` prints the result with the source of every value. An unknown key, a
wrong type, an impossible value, a contradiction, or a key that nothing would read is refused before anything starts. What a
file says for another `rollout.backend` than that of the command line is left aside, with a warning.

- Keys are joined by dots: `actor.optimizer.lr=2e-5`. In YAML, sections are nested.
- `null` means no limit, or "follows from the rest", as the key says.
- Lists are written `[a, b]`; one element may stand alone.
- A component, such as `algorithm.policy_loss`, is a name and knobs: `algorithm.policy_loss=ppo_clip
  algorithm.policy_loss.clip_high=0.28`, in YAML `{name: ppo_clip, clip_high: 0.28}`. Another name starts from that choice's
  own defaults.
- A name with knobs, such as `workflow`, `reward`, `judge` or an element of `tracking.sinks`, is written in one of five
  ways: `name`, `name:ID`, `my_file.py:Name`, `name(knob=value)`, or in YAML `{name: …, knob: …}`. A reward
  may also be a sum of such names, a list of terms, or a recipe for each row (writing_a_reward.md#sums-of-rewards).
- `algorithm=dapo` abbreviates `algorithm.preset=dapo`; what each preset sets is in [presets.md](presets.md).
"""


def sentences(cls: type) -> dict[str, str]:
    """Field → the string that stands under it, base classes included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        tree = ast.parse(Path(inspect.getfile(base)).read_text(encoding="utf-8"))
        body = next(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == base.__name__)
        for node, below in zip(body, body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
                value = below.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[node.target.id] = " ".join(value.value.split())
    return found


def type_name(kind: Any) -> str:
    """The type as a reader of the table wants it."""
    rule = bound(kind)
    kind, optional = without_none(kind)
    origin = get_origin(kind)
    if rule is not None:
        text = rule.rule().removeprefix("a ")
    elif origin is Literal:
        text = ", ".join(f"`{choice}`" for choice in get_args(kind))
    elif origin is tuple:
        text = f"list of {type_name(get_args(kind)[0])}"
    elif origin is Mapping:
        text = "keys and values"
    elif kind is Component:
        text = "component"
    elif kind == Spec:
        text = "name and knobs"
    elif kind in (SourceConfig, EvaluationData):
        text = "sources" if kind is SourceConfig else "data sets"
    else:
        text = {int: "whole number", float: "number", bool: "true / false", str: "text"}.get(kind, str(kind))
    return text + (", `null`" if optional else "")


def _default(value: Any) -> str:
    if isinstance(value, Component):
        return f"`{value.name}`"
    if isinstance(value, (tuple, Mapping)):
        return f"`[{', '.join(map(str, value))}]`" if isinstance(value, tuple) else "`{}`"
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    return f"`{value}`" if value != "" else "empty"


def _table(cls: type, instance: Any, prefix: str, skip: frozenset[str] = frozenset()) -> Iterator[str]:
    texts = sentences(cls)
    rows, inner = [], []
    for name, kind in field_types(cls).items():
        if name in skip:
            continue
        value = getattr(instance, name)
        if section(kind) is not None:
            inner.append((name, section(kind), value))
        else:
            # A bar would end the cell of the table.
            cells = (f"`{prefix}{name}`", type_name(kind), _default(value), texts[name].replace("|", "\\|"))
            rows.append("| " + " | ".join(cells) + " |")
    if rows:
        yield from ("", "| key | type | default | what it does |", "|---|---|---|---|", *rows)
    for name, kind, value in inner:
        assert kind is not None
        yield from ("", f"### `{prefix}{name}`", "", " ".join((kind.__doc__ or "").split()))
        yield from _table(kind, value, f"{prefix}{name}.")


def _judged(base: frozenset[str]) -> Iterator[str]:
    """`tandem preference`, `reward` and `distill`."""
    head = "has the same shared keys, and:"
    yield from ("", "## `tandem preference`", "", f"Preference learning {head}")
    yield from _table(PreferenceConfig, PreferenceConfig(), "", base)
    yield from ("", "| `loss` | knobs |", "|---|---|", *_knobs(PARTS["loss"]))
    yield from ("", "## `tandem reward`", "", f"Training a reward model {head}")
    yield from _table(RewardModelConfig, RewardModelConfig(), "", base)
    shared = base | {"gconfig", "rollout"}
    text = "On-policy distillation has the same shared keys, `gconfig` and `rollout` of `tandem train`, and:"
    yield from ("", "## `tandem distill`", "", text)
    yield from _table(DistillConfig, DistillConfig(), "", shared)


def _choices() -> Iterator[str]:
    yield from ("", "## Choices and their knobs")
    for field, choices in PARTS.items():
        if field in ("loss", "kl.estimator"):
            continue
        yield from ("", f"### `algorithm.{field}`", "", "| choice | knobs |", "|---|---|", *_knobs(choices))


def _knobs(choices: Mapping[str, PartRecord]) -> Iterator[str]:
    """A row for each choice."""
    for name, part in choices.items():
        cells = []
        for knob, rule in part.knobs.items():
            default = "" if rule.default is None else f" = {rule.default}"
            cells.append(f"`{knob}`{default} ({rule.rule()}): {rule.meaning}".replace("|", "\\|"))
        yield f"| `{name}` | {'<br>'.join(cells) or '—'} |"


def markdown() -> str:
    """The whole page."""
    base = frozenset(field_types(BaseConfig))
    source = SourceConfig("")
    parts = [
        HEAD,
        "## `tandem train`",
        "",
        "Reinforcement learning.",
        *_table(TrainConfig, TrainConfig(), ""),
        "",
        "## `tandem sft`",
        "",
        f"Supervised fine-tuning has of the above {', '.join(f'`{name}`' for name in field_types(BaseConfig))}; and:",
        *_table(SFTConfig, SFTConfig(), "", base),
        *_judged(base),
        "",
        "## `tandem eval`",
        "",
        "Evaluation without training; docs/evaluation.md says more.",
        *_table(EvaluationConfig, EvaluationConfig(), ""),
        "",
        "## Elements of `data` of `tandem eval`",
        *_table(EvaluationData, EvaluationData(""), ""),
        "",
        "## Elements of `train_dataset.sources`",
        *_table(SourceConfig, source, ""),
        *_choices(),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
