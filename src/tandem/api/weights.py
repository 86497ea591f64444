"""Weights: their versions, the files that hold them, the description of an update for its receivers, and digests.

The weight files of a model folder are those that its index names, or `model.safetensors` if there is no index; other files
are ignored. Their headers are read without reading any weight.

A digest is SHA-256 or a keyed sum: 64 bits, computed on the tensor's device and faster than SHA-256. Each position of a
64-bit word has its own key, so the sum detects swapped words as well as changed ones. It is not secure against somebody who
knows the keys.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open

from tandem.api.lazy_torch import torch
from tandem.config.errors import ConfigError, kind_and_text

WORDS = 1 << 16
"""Number of different keys. After each block of this many 64-bit words the sum is multiplied and the keys start again."""

ROWS = 64
"""Number of blocks of `WORDS` words each that are summed at a time on a device other than the CPU."""

_OF_THIS_PROCESS = secrets.randbits(63)
_STEP = 0x9E3779B97F4A7C15


class KeyedSum:
    """The keyed sum of bytes that are added in pieces; each piece but the last must be a multiple of `WORDS` words."""

    def __init__(self, key: int = _OF_THIS_PROCESS) -> None:
        """``key``: seed of the keys. The default is random for this process, so that nobody can craft a file with a given
        sum."""
        self.value, self._key = 0, key
        # one buffer for all pieces: in a process that offloads models, every new tensor is mapped anew
        self._folded = torch.empty(0, dtype=torch.int64)

    def add(self, piece: torch.Tensor) -> None:
        """Adds the bytes of a contiguous tensor on any device."""
        data = piece.view(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        if data.numel() % 8:
            data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
        words = data.view(torch.int64)
        for some in torch.split(words, WORDS if words.device.type == "cpu" else ROWS * WORDS):
            for total in self._sums(some):
                self.value = (self.value * _STEP + total) % 2**64

    def _sums(self, words: torch.Tensor) -> list[int]:
        # XOR the upper bits into the lower ones: a flipped sign bit times an odd key would add the same to the sum for every
        # key. Shift by 31, not 32: by 32 the sign bits of two negated neighbours in float32 would cancel
        if self._folded.shape != words.shape or self._folded.device != words.device:
            self._folded = torch.empty_like(words)
        folded = torch.bitwise_right_shift(words, 31, out=self._folded).bitwise_and_(0x1FFFFFFFF).bitwise_xor_(words)
        keys = _keys(self._key, words.device)
        if words.device.type == "cpu":
            return [int(torch.dot(folded, keys[: len(folded)]))]
        whole = len(folded) // WORDS * WORDS  # no torch.dot here: GPUs have none for integers
        rows = [(folded[:whole].view(-1, WORDS) * keys).sum(1)]
        if whole < len(folded):
            rows.append((folded[whole:] * keys[: len(folded) - whole]).sum().view(1))
        return [int(total) for total in torch.cat(rows).tolist()]


def keyed_sum(tensor: torch.Tensor, key: int = _OF_THIS_PROCESS) -> int:
    """Returns the keyed sum of all bytes of a contiguous tensor, an integer below 2⁶⁴."""
    total = KeyedSum(key)
    for piece in torch.split(tensor.view(-1).view(torch.uint8), 8 * ROWS * WORDS):
        total.add(piece)
    return total.value


@functools.lru_cache(maxsize=8)
def _keys(key: int, device: torch.device) -> torch.Tensor:
    numbers = torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=torch.Generator().manual_seed(key))
    return (numbers | 1).to(device)


VALUE_FILE = "value_head.safetensors"
"""File of the value head of an actor that is a critic too. The language model in the same folder loads without this file."""


@dataclass(frozen=True)
class WeightVersion:
    """Identity of weights: number of updates published so far, and a digest of all tensors."""

    number: int
    digest: str = ""
    run: str = ""
    model: str = "actor"


class WeightSource(ABC):
    """The receiving end of a channel of weights. Picklable if the engine runs in another process."""

    is_private: ClassVar[bool] = False
    """True if only the receiver writes to the memory of the tensors that `tensors` yields."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor) for every tensor of the update, each valid until the next is requested."""

    def received_on(self, device: torch.device) -> WeightSource:
        """Returns the source for an engine on ``device``; tensors that must be copied or read arrive on this device."""
        return self

    def place(self) -> Mapping[str, Any] | None:
        """Returns the location of the tensors as JSON data, for a process without Tandem; None if only `tensors` can read
        them.

        A folder: ``{"folder": path}``. A file to map: ``{"memory": path, "tensors": [[name, shape, dtype, offset], …]}``.
        GPU memory: ``{"handles": [handle of a bucket, …], "tensors": [[name, shape, dtype, bucket, offset], …]}``.
        """
        return None


@dataclass(frozen=True)
class FolderSource(WeightSource):
    """A Hugging Face model folder on a disk that the engine's machine sees under the same path."""

    folder: Path
    """Folder with weights (`weight_files`), ``config.json`` and the tokenizer's files, so that any server can open it."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all tensors, one file after another. Raises `OSError` if the folder has no weights."""
        files = weight_files(self.folder)
        if not files:
            raise OSError(f"no weights in {self.folder}: the update was removed before it was read")
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    yield name, opened.get_tensor(name)

    def place(self) -> Mapping[str, Any]:
        """Returns the folder as JSON data."""
        return {"folder": str(self.folder.resolve())}


@dataclass(frozen=True)
class Adapter:
    """The rule by which low-rank matrices change a model's weight W: ``W + scaling · B A``.

    The matrices have the name of W with the endings ``.lora_A.weight [r, in]`` and ``.lora_B.weight [out, r]``; both are
    float32.
    """

    scaling: float
    dtype: torch.dtype
    """Dtype to which the trainer rounds every W that it reads from the model's files."""


@dataclass(frozen=True)
class WeightUpdate:
    """A weight update: its version, the source of its tensors, and the digest of each tensor."""

    version: WeightVersion
    source: WeightSource
    digests: Mapping[str, str]
    """Hugging Face name → hex digest of the tensor's bytes in the dtype that is delivered."""

    adapter: Adapter | None = None
    """Set if the tensors are an adapter of the model that the engine was started with; None if they are all weights."""

    key: int | None = None
    """Key of the digests, which are then keyed sums of 16 hex digits each; None: digests are SHA-256."""


def tensor_digest(tensor: torch.Tensor, key: int | None = None) -> str:
    """Returns the hex digest of a tensor's bytes, in row-major order and in its dtype. Releases the GIL while it reads.

    ``key``: compute a keyed sum with this key, on the tensor's device; None: compute SHA-256, on the CPU.
    """
    if key is not None:
        return f"{keyed_sum(tensor.detach().contiguous(), key):016x}"
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def version_digest(digests: Mapping[str, str]) -> str:
    """Returns the hex digest of a version: SHA-256 of the names and digests of its tensors, sorted by name."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100 << 20
UNREADABLE = (AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)
"""Errors that libraries raise on damaged files. They are always converted to a `ConfigError` that names the file."""


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Calls `safetensors.torch.save_file` and gives the file the permissions of any new file (the umask). The library alone
    would let only the owner read it, so that other users could not load the model."""
    from safetensors.torch import save_file  # noqa: PLC0415 - imports torch, which reading headers does not need

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def in_groups(stream: Iterable[tuple[str, torch.Tensor]], num_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors of a stream in groups, such as one group per file or message.

    A group ends with the tensor that brings it to ``num_bytes`` or more. The yielded dict is cleared before the next group
    is read, so that only one group is in memory.

    Raises:
        ValueError: two tensors have the same name.
    """
    names: set[str] = set()
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in stream:
        if name in names:
            raise ValueError(f"tensor {name!r} came twice")
        names.add(name)
        group[name] = tensor
        size += tensor.nbytes
        if size >= num_bytes:
            yield group
            group.clear()
            size = 0
    if group:
        yield group


@dataclass(frozen=True)
class Entry:
    """Location, dtype and shape of a stored tensor, from the header of its file."""

    file: Path
    start: int
    """Offset of the tensor's first byte in the file."""

    dtype: str
    """Dtype as safetensors spells it, such as ``BF16``."""

    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that the index names (they may be missing), or `model.safetensors` if there is no index.

    The list is empty if the folder has neither.

    Raises:
        ConfigError: the index is damaged, or names a file outside the folder.
    """
    names = sorted(set(indexed(folder / INDEX).values())) or [SINGLE] * (folder / SINGLE).exists()
    return [folder / name for name in names]


def is_complete(folder: Path) -> bool:
    """True if all files of `weight_files` exist. Those of a model on the hub are downloaded when a run starts."""
    files = weight_files(folder)
    return bool(files) and all(file.is_file() for file in files)


def indexed(index: Path) -> dict[str, str]:
    """Reads an index of weights: tensor name → file name. Empty if the index does not exist.

    Raises:
        ConfigError: the index is damaged, or names a file outside its folder.
    """
    if not index.is_file():
        return {}
    refuse_placeholder(index)
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except UNREADABLE as error:
        raise ConfigError(f"{index} is damaged ({kind_and_text(error)}); download the model anew") from error
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise ConfigError(f"{index} names {name!r}, which is not a file in that folder; download the model anew")
    return files


def stored_entries(folder: Path) -> dict[str, Entry]:
    """Returns name → entry of every tensor in the files of `weight_files`.

    Raises:
        ConfigError: a file is missing, empty, cut off or damaged, two files have the same tensor, or the files do not have
            the tensors that the index lists.
    """
    entries: dict[str, Entry] = {}
    for file in weight_files(folder):
        for name, entry in _header(file).items():
            if name in entries:
                raise ConfigError(f"{entries[name].file} and {file} both hold {name}: download the model anew")
            entries[name] = entry
    index = folder / INDEX
    for name, place in indexed(index).items():
        if name not in entries or entries[name].file.name != place:
            raise ConfigError(
                f"{index} says that {place} holds {name}, and {folder / place} does not: the files are of two models, or "
                "one of them is damaged; download the model anew"
            )
    return entries


def refuse_placeholder(file: Path) -> None:
    """Raises `ConfigError` if a file is missing, not a regular file, empty, or only a pointer of git-lfs."""
    if not file.is_file():
        if file.exists() or file.is_symlink():
            raise ConfigError(f"{file} is no file (a pipe, a device, a folder or a link to nothing): copy the weights there")
        single = f", or remove the index if {SINGLE} is the model" if (file.parent / SINGLE).is_file() else ""
        raise ConfigError(f"{file} is missing, and the index in that folder names it: download it{single}")
    if not file.stat().st_size:
        raise ConfigError(f"{file} is empty: download it anew")
    with file.open("rb") as opened:
        if opened.read(32).startswith(b"version https://git-lfs"):
            raise ConfigError(
                f"{file} is not the file itself but a pointer of git-lfs to it: run `git lfs pull` in {file.parent}, or "
                "download the model anew"
            )


def _header(file: Path) -> dict[str, Entry]:
    refuse_placeholder(file)
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError("the header would be too long")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        start = 8 + length
        end = start + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if file.stat().st_size == end:
            safe_open(file, "np")  # raises for every other kind of damage
            return {
                name: Entry(file, start + tensor["data_offsets"][0], tensor["dtype"], tuple(tensor["shape"]))
                for name, tensor in header.items()
            }
    except UNREADABLE as error:
        raise ConfigError(f"the weights in {file} cannot be read ({kind_and_text(error)}): download it anew") from error
    raise ConfigError(
        f"the weights in {file} have {file.stat().st_size:,} bytes, and by the file's own header they have {end:,}: "
        "it is cut off or damaged; download it anew"
    )
