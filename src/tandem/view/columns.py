"""The tokens of a recorded sample with their figures, read without torch."""

import contextlib
import functools
import gzip
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.errors import ConfigError, kind_and_text
from tandem.models.catalog import present
from tandem.state.existing import written_config
from tandem.tracking.record_files import TIMES, TIMES_OF, tensors_path

KEPT = 4
"""Unpacked batches that stay in the cache, so that the next sample of a step comes at once."""

MOST_BYTES = 1 << 33
"""Unpacked bytes of one batch; more is no batch but a trap."""

MOST_TOKENS = 20_000
"""Tokens of a trajectory that are told."""

_TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
_KNOWN = (
    *("advantages", "token_rewards", "rollout_logprobs", "proximal_logprobs", "reference_logprobs", "teacher_logprobs"),
    *(
        "entropy",
        "values",
        "returns",
        "versions",
        "correction",
        "loss_weights",
        "expired",
        "dropped",
        "step_end",
        "step_right",
    ),
)
"""Columns that are told, in this order, where they are there."""


class TokenColumns:
    """The batch of one recorded step on the disk of the cache, from where only what is asked for is read."""

    def __init__(self, run: Path, step: int, folder: Path):
        """``folder``: of the run in the cache.

        Raises:
            ConfigError: there is none, or it is torn.
        """
        packed = tensors_path(run, step)
        try:
            stamp = packed.stat().st_mtime_ns
            self._file = folder / f"step_{step}-{stamp}.tensors"
            if not self._file.is_file():
                make_folder(self._file.parent)
                _unpack(packed, self._file)
            self._columns = _columns(self._file)
        except FileNotFoundError:
            raise ConfigError(f"step {step} was recorded without its tokens") from None
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{packed.name} is torn: {error}") from error
        if not {"input_ids", "loss_mask", "cu_seqlens", "sample_id"} <= self._columns.keys():
            raise ConfigError(f"{packed.name} is no batch: a field is missing")

    def trajectories(self, sample_id: int) -> Iterator[dict[str, np.ndarray]]:
        """Each trajectory of a sample: token columns ``[S]``."""
        bounds, total = self._columns["cu_seqlens"], len(self._columns["input_ids"])
        for place in np.flatnonzero(self._columns["sample_id"] == sample_id):
            start, end = int(bounds[place]), int(bounds[place + 1])
            yield {name: c[start:end] for name, c in self._columns.items() if c.ndim == 1 and len(c) == total}

    def times(self, sample_id: int) -> list[list[float | None]]:
        """(queue, first token, end) in seconds of each request of a sample."""
        if TIMES not in self._columns:
            return []
        return [plain(row) for row in self._columns[TIMES][self._columns[TIMES_OF] == sample_id]]


def make_folder(folder: Path) -> None:
    """A folder in the cache. Raises `ConfigError` where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; set TANDEM_CACHE to a folder that can") from error


def _unpack(packed: Path, file: Path) -> None:
    """Bounded in memory, and whole or not there; older ones make room."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        with gzip.open(packed) as source, partial.open("wb") as target:
            while block := source.read(1 << 20):
                if target.tell() > MOST_BYTES:
                    raise ValueError("it unpacks to more than 8 GiB")
                target.write(block)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    for old in sorted(file.parent.glob("*.tensors"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()


def _columns(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, mapped and not read; those of a type that numpy has none of are left out."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(size, 1 << 24)))
    data = np.memmap(file, mode="r", offset=8 + size)
    columns = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in _TYPES:
            start, end = entry["data_offsets"]
            columns[name] = data[start:end].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return columns


def plain(column: np.ndarray) -> list[Any]:
    """Numbers as JSON has them: five digits, null for what is not finite."""
    if column.dtype.kind != "f":
        return [int(value) for value in column]
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in column.tolist()]


def told_columns(trajectory: dict[str, np.ndarray], first: int) -> dict[str, list[Any]]:
    """The columns of the tokens from ``first`` on that a reader may choose from; the gap between the engine and the trainer
    and the distance to the reference are worked out. At most `MOST_TOKENS`."""
    cut = {name: column[first : first + MOST_TOKENS] for name, column in trajectory.items()}
    told = {name: cut[name] for name in _KNOWN if name in cut}
    over = cut.get("proximal_logprobs", cut.get("rollout_logprobs"))
    for name, less in (("kl", "reference_logprobs"), ("gap", "rollout_logprobs")):
        if over is not None and less in cut and over is not cut[less]:
            told = {name: over.astype("f8") - cut[less]} | told
    return {name: plain(column) for name, column in told.items()}


def decoder(run: Path) -> tuple[Callable[[int], str], str]:
    """Token → its text by the tokenizer of the run, and in words why there is none, so that numbers are shown. Nothing is
    downloaded for it."""
    try:
        return _decoder(run, (run / "config.yaml").stat().st_mtime_ns), ""
    except Exception as error:  # boundary: files of a user; the library raises bare exceptions
        return str, f"tokens are shown as numbers, for the tokenizer cannot be read: {kind_and_text(error)}"


@functools.lru_cache(maxsize=1)
def _decoder(run: Path, _: int) -> Callable[[int], str]:
    from tokenizers import Tokenizer  # noqa: PLC0415 — most pages need none

    path = str(written_config(run, "its model", "")["actor"]["path"])
    found = present(path)
    if found is None:
        raise ConfigError(f"the model {path} is not on this machine")
    tokenizer = Tokenizer.from_file(str(found / "tokenizer.json"))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
