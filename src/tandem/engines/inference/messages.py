"""What travels over the pipe between an engine's process and its parent. Both ends are ours, so it is pickled."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.api.portable import survives_pickling
from tandem.api.weights import WeightVersion
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.callers import Piece, Result


@dataclass(frozen=True)
class Start:
    """To the child, first: what to make."""

    folder: Path
    config: EmbeddedEngineConfig
    dtype: torch.dtype
    device: str
    version: WeightVersion
    threads: int
    deterministic: bool


@dataclass(frozen=True)
class Call:
    """To the child: a method of `Driver`, answered under its number if it has one."""

    number: int | None
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Ready:
    """From the child, first: the model is loaded."""


@dataclass(frozen=True)
class Finished:
    """From the child: results of requests, in one message a step."""

    results: tuple[Result, ...]


@dataclass(frozen=True)
class Progress:
    """From the child: new tokens of requests that are streamed, in one message a step."""

    drawn: tuple[tuple[int, Piece], ...]


@dataclass(frozen=True)
class Answer:
    """From the child: what a call gave, or raised."""

    number: int
    value: Mapping[str, float] | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Died:
    """From the child, last: what ended it, with its traceback."""

    reason: str
    trace: str


def portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else a `RuntimeError` that carries its text and traceback."""
    if survives_pickling(error):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))
