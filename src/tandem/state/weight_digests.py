"""`weights.jsonl` of a run: a digest of each tensor after each step, so that two runs can be compared."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from tandem.api.lines import append_line
from tandem.api.team import Team
from tandem.api.weights import tensor_digest
from tandem.state.run_folder import RunFolder

FILE = "weights.jsonl"
DIGITS = 16
"""Hexadecimal digits that are kept of each SHA-256: enough to tell two tensors apart."""


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Name → digest of the bytes, of a stream of whole tensors. Reads each once; about a second for 2 GB."""
    return {name: tensor_digest(tensor)[:DIGITS] for name, tensor in weights}


def append_digests(folder: Path, step: int, digests: Mapping[str, str]) -> None:
    """Adds a line. A step that is done again after a resume has a second one, which counts. Raises `NotWritten`."""
    append_line(folder / FILE, json.dumps({"step": step, "tensors": digests}))


def record_weights(team: Team, run: RunFolder | None, digests: Callable[[], Mapping[str, str]], step: int) -> None:
    """Adds a line of digests to `weights.jsonl`. Collective. ``run``: on rank 0, which writes. ``digests``: of all weights,
    there; collective.

    Raises:
        NotWritten: the disk refuses.
    """
    found = digests()
    with team.together():
        if run is not None:
            append_digests(run.path, step, found)
