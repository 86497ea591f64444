"""Reads the tokens of a recorded sample with their values, without torch.

Also turns images and sounds of the media store into small copies as data URLs for a page.
"""

import base64
import contextlib
import functools
import gzip
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tandem.config.errors import ConfigError, kind_and_text
from tandem.media import store
from tandem.models.catalog import present
from tandem.state.existing import written_config
from tandem.tracking.record_files import TIMES, TIMES_OF, tensors_path

KEPT = 4
"""Number of unpacked batches that stay in the cache, so that the next sample of a step is read fast."""

MOST_BYTES = 1 << 33
"""Most bytes of an unpacked batch; a larger file is refused, because it may be a decompression bomb."""

MOST_TOKENS = 20_000
"""Most tokens of a trajectory in one answer."""

_TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
_KNOWN = (
    "advantages",
    "token_rewards",
    "rollout_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
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
)
"""Columns that an answer has, in this order, if they are recorded."""


class TokenColumns:
    """The batch of one recorded step, unpacked in the cache and memory-mapped, so that only requested parts are read."""

    def __init__(self, run: Path, step: int, folder: Path):
        """Unpacks the batch of ``run``. ``folder``: the run's folder in the cache.

        Raises:
            ConfigError: the step has no batch, or its file is damaged.
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
            raise ConfigError(f"{packed.name} is damaged: {error}") from error
        if not {"input_ids", "loss_mask", "cu_seqlens", "sample_id"} <= self._columns.keys():
            raise ConfigError(f"{packed.name} is not a batch: a field is missing")

    def trajectories(self, sample_id: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields each trajectory of a sample: name → column of its tokens ``[S]``."""
        bounds, total = self._columns["cu_seqlens"], len(self._columns["input_ids"])
        for place in np.flatnonzero(self._columns["sample_id"] == sample_id):
            start, end = int(bounds[place]), int(bounds[place + 1])
            yield {name: c[start:end] for name, c in self._columns.items() if c.ndim == 1 and len(c) == total}

    def times(self, sample_id: int) -> list[list[float | None]]:
        """Returns [time in the queue, time to the first token, total time] in seconds of each request of a sample."""
        if TIMES not in self._columns:
            return []
        return [plain(row) for row in self._columns[TIMES][self._columns[TIMES_OF] == sample_id]]


def make_folder(folder: Path) -> None:
    """Creates a folder in the cache. Raises `ConfigError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be created: {error.strerror}; set TANDEM_CACHE to a folder that can be written"
        ) from error


def _unpack(packed: Path, file: Path) -> None:
    """Unpacks a batch into ``file`` atomically and in blocks, and removes all but the `KEPT` newest unpacked batches."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        with gzip.open(packed) as source, partial.open("wb") as target:
            while block := source.read(1 << 20):
                if target.tell() > MOST_BYTES:
                    raise ValueError("the batch unpacks to more than 8 GiB")
                target.write(block)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    for old in sorted(file.parent.glob("*.tensors"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()


def _columns(file: Path) -> dict[str, np.ndarray]:
    """Maps the tensors of a safetensors file without reading them, except tensors of a type that numpy lacks."""
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
    """Converts a column for JSON: floats are rounded to five digits, and become null if they are not finite."""
    if column.dtype.kind != "f":
        return [int(value) for value in column]
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in column.tolist()]


def shown_columns(trajectory: dict[str, np.ndarray], first: int) -> dict[str, list[Any]]:
    """Returns the columns that a page can show, for at most `MOST_TOKENS` tokens from ``first`` on. Adds ``gap`` (trainer's
    minus engine's log-probability) and ``kl`` (trainer's minus reference's), if both parts are recorded."""
    cut = {name: column[first : first + MOST_TOKENS] for name, column in trajectory.items()}
    columns = {name: cut[name] for name in _KNOWN if name in cut}
    policy = cut.get("proximal_logprobs", cut.get("rollout_logprobs"))
    for name, other in (("kl", "reference_logprobs"), ("gap", "rollout_logprobs")):
        if policy is not None and other in cut and policy is not cut[other]:
            columns = {name: policy.astype("f8") - cut[other]} | columns
    return {name: plain(column) for name, column in columns.items()}


def decoder(run: Path) -> tuple[Callable[[int], str], str]:
    """Returns (a function from token to text, a note). Without a tokenizer the text is the token's number, and the note says
    why; otherwise the note is empty. Nothing is downloaded."""
    try:
        return _decoder(run, (run / "config.yaml").stat().st_mtime_ns), ""
    except Exception as error:  # boundary: files of a user; the library raises bare exceptions
        return str, f"tokens are shown as numbers, because the tokenizer cannot be read: {kind_and_text(error)}"


@functools.lru_cache(maxsize=1)
def _decoder(run: Path, _: int) -> Callable[[int], str]:
    from tokenizers import Tokenizer  # noqa: PLC0415 — only for pages with tokens

    path = str(written_config(run, "its model", "")["actor"]["path"])
    model_folder = present(path)
    if model_folder is None:
        raise ConfigError(f"the model {path} is not on this machine")
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))


MOST_MEDIA = 24
"""Most media that are shown of a sample."""

SIDE = 384
"""Most pixels of the longer side of a shown image."""

MOST_SAMPLES = 30 * store.RATE
"""Most audio samples of a sound that can be played (30 s); the rest is cut."""


def media_numbers(messages: Any) -> list[int]:
    """Returns the numbers of the media in recorded messages, in order, at most `MOST_MEDIA`."""
    contents = [turn.get("content") for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    media = [part["medium"] for part in parts if isinstance(part.get("medium"), dict)]
    texts = [str(medium.get("number")) for medium in media]
    return [int(number) for number in texts if number.removeprefix("-").isdecimal() and len(number) < 21][:MOST_MEDIA]


class ShownMedia:
    """The media of one answer to a page. Each medium is sent once, even if several samples of a group have it."""

    def __init__(self) -> None:
        self._sent: set[int] = set()

    def of(self, number: int) -> dict[str, str]:
        """Returns ``{"number", "kind", "url"}`` at the first call for a number, and ``{"number"}`` later. If the store no
        longer has the medium, returns ``{"number", "missing"}``."""
        if number in self._sent:
            return {"number": str(number)}
        self._sent.add(number)
        try:
            kind = store.medium(number).kind
            data = _png(number) if kind == "image" else _wav(number)
        except ConfigError as error:
            return {"number": str(number), "missing": str(error)}
        form = "image/png" if kind == "image" else "audio/wav"
        return {"number": str(number), "kind": kind, "url": f"data:{form};base64,{base64.b64encode(data).decode()}"}


def _png(number: int) -> bytes:
    image = Image.fromarray(store.image(number))
    image.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _wav(number: int) -> bytes:
    out = io.BytesIO()
    store.write_sound(out, (store.sound(number)[:MOST_SAMPLES] * 2**15).astype("<i2"))
    return out.getvalue()
