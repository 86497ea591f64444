"""The files that hold the weights of a model folder, and what their headers say; no weight is read.

With an index the files are those that it names; otherwise `model.safetensors`. What else lies there is no part of the model.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from tandem.config.errors import ConfigError, kind_and_text

if TYPE_CHECKING:
    import torch

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100 << 20
UNREADABLE = (AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)
"""Errors that libraries raise on files that are not what their names say; no refusal, and so no error of ours alone."""


def save_tensors(tensors: "Mapping[str, torch.Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """`safetensors.torch.save_file`, with the rights that the umask gives a new file: the library gives them to its owner
    alone, and whoever else is to read the model is told that it is not there."""
    from safetensors.torch import save_file  # noqa: PLC0415 - torch, which not all that reads headers needs

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def in_groups(stream: "Iterable[tuple[str, torch.Tensor]]", num_bytes: int) -> "Iterator[dict[str, torch.Tensor]]":
    """The tensors of a stream in groups, one for each file or message: a group is full once it has ``num_bytes``. It is
    emptied when the next one is asked for, so that no more is held.

    Raises:
        ValueError: a name comes twice.
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
    """The place of a tensor, as a header says it."""

    file: Path
    start: int
    """Byte of the file with which its numbers begin."""

    dtype: str
    """Type of its numbers in the words of safetensors: ``BF16``."""

    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The files, which may be missing: those that the index names, else `model.safetensors` if it is there.

    Raises:
        ConfigError: the index is damaged, or names something elsewhere.
    """
    names = sorted(set(indexed(folder / INDEX).values())) or [SINGLE] * (folder / SINGLE).exists()
    return [folder / name for name in names]


def is_complete(folder: Path) -> bool:
    """True if all files of `weight_files` are there; of a model on the hub they come when a run starts."""
    files = weight_files(folder)
    return bool(files) and all(file.is_file() for file in files)


def indexed(index: Path) -> dict[str, str]:
    """Tensor → the file that holds it, by an index of weights; nothing where there is none.

    Raises:
        ConfigError: it is damaged, or names something that is not in its own folder.
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
    """Every tensor in the files of `weight_files` by name; those that no file has are missing.

    Raises:
        ConfigError: a file is missing, empty, cut off or damaged, two have one tensor, or the index says otherwise.
    """
    found: dict[str, Entry] = {}
    for file in weight_files(folder):
        for name, entry in _header(file).items():
            if name in found:
                raise ConfigError(f"{found[name].file} and {file} both hold {name}: download the model anew")
            found[name] = entry
    index = folder / INDEX
    for name, place in indexed(index).items():
        if name not in found or found[name].file.name != place:
            raise ConfigError(
                f"{index} says that {place} holds {name}, and {folder / place} does not: they are of two models, or one is "
                "damaged; download the model anew"
            )
    return found


def refuse_placeholder(file: Path) -> None:
    """Raises `ConfigError` where a file is missing, no file, empty, or what git leaves in place of a large one."""
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
                raise ValueError("its header would be too long")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        start = 8 + length
        end = start + max((one["data_offsets"][1] for one in header.values()), default=0)
        if file.stat().st_size == end:
            safe_open(file, "np")  # which refuses all else that is wrong
            return {
                name: Entry(file, start + one["data_offsets"][0], one["dtype"], tuple(one["shape"]))
                for name, one in header.items()
            }
    except UNREADABLE as error:
        raise ConfigError(f"the weights in {file} cannot be read ({kind_and_text(error)}): download it anew") from error
    raise ConfigError(
        f"the weights in {file} have {file.stat().st_size:,} bytes, and by the file's own header they have {end:,}: "
        "it is cut off or damaged; download it anew"
    )
