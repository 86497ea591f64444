"""Algorithm presets, read from presets.yaml: the settings of `algorithm.preset=NAME`, and their documentation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Preset:
    """One entry of the file."""

    summary: str
    """One line for the lists."""

    title: str
    """Title of the paper, authors, year."""

    values: Mapping[str, Any]
    """The values of the `algorithm` section that the preset sets."""

    asynchronous: Mapping[str, Any] | None
    """Settings that are added if training is asynchronous or replays: the behaviour correction. None: never asynchronous."""

    when: str
    """When to use it, one sentence."""

    text: str
    """The idea, and when to use it, at length; Markdown, like the next two fields."""

    defaults: str
    """The source of each default."""

    watch: Mapping[str, str]
    """Metric → what to do when it looks wrong with this algorithm."""

    limits: str = ""
    arxiv: str = ""
    """The paper's number, if it has one."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """The values that the preset sets outside of the `algorithm` section."""

    refused: Sequence[str] = ()
    """Changes with which the preset is refused."""

    example: str = ""
    """Keys that the addition example needs besides `algorithm=NAME`."""


def _read() -> dict[str, Preset]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # every command reads it: fifteen times as fast
    return {name: Preset(**entry) for name, entry in yaml.load(text, Loader=loader).items()}


PRESETS: Mapping[str, Preset] = _read()
