"""Writes and reads states: plain data as JSON, tensors as safetensors. These formats cannot execute code.

Every run has one state of its own, that of the global random generators of its processes.
"""

import itertools
import json
import math
import operator
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from tandem.api.activity import did
from tandem.api.failures import NotWritten
from tandem.api.state import Parted, Stateful, TensorPart, part_of
from tandem.api.team import Team
from tandem.api.weights import in_groups
from tandem.config.errors import ConfigError, TandemError, kind_and_text

PLAIN_FILE, TENSOR_FILES = "state.json", "tensors-*.safetensors"

MARK = "$tensor"
"""Key of the JSON object that stands for a tensor; its value is the tensor's name in the tensor files."""

FILE_BYTES = 2**30
"""Size in bytes at which a tensor file is closed."""

MAX_PLAIN_BYTES = 2**31
"""A larger JSON file is refused before it is read; no state comes near this size."""


class StateDamaged(TandemError, ValueError):
    """Files do not contain a valid state, or not the state of this part."""


def write_tree(team: Team, folder: Path, tree: Mapping[str, Any]) -> None:
    """Writes a tree of plain data and tensors into an empty folder. Collective: every rank of ``team`` passes its tree, with
    the same `Parted` in the same order, and writes its own parts of these. The first rank writes everything else.

    Raises:
        TypeError: a value in the tree is neither plain data nor a tensor; names its path.
        OSError: writing failed.
        RuntimeError: the ranks' parts are not the whole tensors.
    """
    with team.together():  # fails on all ranks before the next collective call, although only rank 0 has some parts
        plain, tensors = split(tree)
    places, total = team.share(lambda: _lay_out(folder, plain, tensors))
    written = 0
    with team.together(), team.whole(_parts_to_write(team, folder, tensors)) as stream:
        try:
            with ExitStack() as stack:
                files = [stack.enter_context(path.open("r+b", buffering=0)) for path in sorted(folder.glob(TENSOR_FILES))]
                for name, part in stream:
                    number, start = places[name]
                    written += _write_part(files[number].fileno(), start, part)
        except OSError as error:  # a network file system may report a full disk when a file is closed
            raise NotWritten(str(error)) from error  # of any rank, it is a failure of the disk for all
    if missing := total - sum(team.gather(written)):
        raise RuntimeError(f"the ranks' parts of the state are {missing} bytes short of the whole")


def read_tree(folder: Path) -> dict[str, Any]:
    """Reads the tree that `write_tree` wrote, with whole tensors on the CPU.

    Raises:
        StateDamaged: a file is missing, or not a valid state.
    """
    path = folder / PLAIN_FILE
    try:
        if path.stat().st_size > MAX_PLAIN_BYTES:
            raise StateDamaged(f"{path} has {path.stat().st_size} bytes; at most {MAX_PLAIN_BYTES} are allowed")
        plain = json.loads(path.read_text(encoding="utf-8"))
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob(TENSOR_FILES))]
            where = {name: file for file in files for name in file.keys()}
            tree = joined(plain, lambda name: where[name].get_tensor(name))
    except StateDamaged:
        raise
    except (OSError, ValueError, TypeError, RecursionError, KeyError, SafetensorError) as error:
        raise StateDamaged(f"{folder} cannot be read: {kind_and_text(error)}") from error
    if not isinstance(tree, dict):
        raise StateDamaged(f"{path} does not hold a state")
    return tree


POOLS = "pool-*"
"""Subfolders of a state, each with the tree of a process that wrote its own parts."""


def read_parts(folder: Path) -> dict[str, Any]:
    """Reads all parts of a run, including those that other processes wrote. Raises as `read_tree`."""
    trees = [read_tree(folder), *map(read_tree, sorted(folder.glob(POOLS)))]
    return {name: part for tree in trees for name, part in tree.items()}


def split(tree: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor | Parted]]:
    """Returns a copy of a tree's plain data, with a mark in place of each tensor, and the tensors by their paths.

    Raises:
        TypeError: a value in the tree is neither plain data nor a tensor; names its path.
    """
    tensors: dict[str, torch.Tensor | Parted] = {}
    return _plain(tree, "", tensors), tensors


def _plain(value: Any, name: str, tensors: dict[str, torch.Tensor | Parted]) -> Any:
    if isinstance(value, (torch.Tensor, Parted)):
        tensors[name] = value.detach() if isinstance(value, torch.Tensor) else value
        return {MARK: name}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key == MARK]
        if wrong:
            raise TypeError(f"the state has a key that is not text, or is reserved, at {name or 'its root'}: {wrong[0]!r}")
        return {key: _plain(item, f"{name}/{key}" if name else key, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy scalar
        return value.item()
    raise TypeError(f"the state has a {type(value).__name__} at {name}; plain data and tensors can be saved")


def joined(plain: Any, tensor: Callable[[str], torch.Tensor | Parted]) -> Any:
    """Reverses `split`. ``tensor``: returns the tensor of a path."""
    if isinstance(plain, dict):
        if plain.keys() == {MARK}:
            return tensor(plain[MARK])
        return {key: joined(item, tensor) for key, item in plain.items()}
    return [joined(item, tensor) for item in plain] if isinstance(plain, list) else plain


def _parts(tensor: torch.Tensor | Parted) -> Sequence[TensorPart]:
    return tensor.parts() if isinstance(tensor, Parted) else [part_of(tensor)]


Places = dict[str, tuple[int, int]]
"""Name of a tensor → the number of its file, and the offset of its first byte."""


def _lay_out(folder: Path, plain: Any, tensors: Mapping[str, torch.Tensor | Parted]) -> tuple[Places, int]:
    """Writes plain data, and the headers of the tensor files. Returns the places of the values, which are not written, and
    their bytes altogether."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAIN_FILE).write_text(json.dumps(plain), encoding="utf-8")
    parts = ((name, _parts(tensor)[0]) for name, tensor in tensors.items())
    empty = ((name, torch.empty(part.shape, dtype=part.values.dtype, device="meta")) for name, part in parts)
    places: Places = {}
    total = 0
    for number, group in enumerate(in_groups(empty, FILE_BYTES)):
        entries: dict[str, dict[str, Any]] = {}
        end = 0
        for name, tensor in sorted(group.items(), key=lambda item: (-item[1].itemsize, item[0])):  # so that all are aligned
            begin, end = end, end + tensor.nbytes
            entries[name] = {"dtype": _name(tensor.dtype), "shape": tensor.shape, "data_offsets": (begin, end)}
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        (folder / TENSOR_FILES.replace("*", f"{number + 1:05}")).write_bytes(len(header).to_bytes(8, "little") + header)
        places |= {name: (number, 8 + len(header) + entry["data_offsets"][0]) for name, entry in entries.items()}
        total += end
    return places, total


@cache
def _name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in the headers of safetensors."""
    return str(json.loads(save({"x": torch.empty(0, dtype=dtype)})[8:])["x"]["dtype"])


def _parts_to_write(
    team: Team, folder: Path, tensors: Mapping[str, torch.Tensor | Parted]
) -> Iterator[tuple[str, TensorPart]]:
    """Yields the parts that this rank writes: its own; if not all ranks see the folder on one system, the first rank writes
    everything, because two machines that write into one file of a shared folder may overwrite each other. Collective."""
    by_itself = len(set(team.gather(_seen_from_here(folder / PLAIN_FILE)))) == 1
    for name in tensors if by_itself else team.share(lambda: list(tensors)):  # a model may be on a part of the ranks
        did("save")
        tensor = tensors.get(name)
        is_mine = team.main or isinstance(tensor, Parted)
        if by_itself:
            parts: Iterable[TensorPart] = _parts(tensor) if tensor is not None and is_mine else ()
        else:
            with team.together():  # otherwise the first rank would wait for the parts of a rank that has failed
                mine = _parts(tensor) if tensor is not None and is_mine else ()
                sent = [replace(part, values=part.values.detach().cpu().contiguous()) for part in mine]
            parts = _received(team, sent)
        yield from ((name, part) for part in parts if part.values.numel())


def _received(team: Team, own: Sequence[TensorPart]) -> Iterator[TensorPart]:
    """Yields the parts of all ranks on the first rank, which receives one at a time. Collective."""
    for source, offer in enumerate(team.gather([replace(part, values=part.values.to("meta")) for part in own])):
        for i, part in enumerate(offer):
            values = own[i].values if source == team.rank else None
            if values is None and team.main:
                values = torch.empty(part.values.shape, dtype=part.values.dtype)
            if values is not None:
                team.send_to_main(_bytes_of(values), source)
            if team.main and values is not None:
                did("save")
                yield replace(part, values=values)


def _seen_from_here(file: Path) -> tuple[str, int, int] | str:
    """Returns what tells a file of this system from all others; containers of one machine are one system. If this rank does
    not see the file, returns something that no other rank returns."""
    try:
        facts = file.stat()
        return Path("/proc/sys/kernel/random/boot_id").read_text(), facts.st_dev, facts.st_ino
    except OSError:  # the file, or a system without the identifier
        return f"{socket.gethostname()} {os.getpid()}"


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor. `view` alone refuses odd strides in dimensions of one entry."""
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def _write_part(file: int, start: int, part: TensorPart) -> int:
    """Writes a part of the tensor that begins at byte ``start`` of an open file; returns the number of bytes.

    Entries are consecutive in the file from the last divided dimension on; such a *row* is written at once.
    """
    values, strides = part.values.detach().cpu(), torch.empty(part.entries, device="meta").stride()
    divided = max((i for i, size in enumerate(values.shape) if size != part.entries[i]), default=0)
    before = [range(at, at + size) for at, size in zip(part.start, values.shape[:divided], strict=False)]
    rows = _bytes_of(values.contiguous()).numpy().reshape(math.prod(values.shape[:divided]), -1)
    for index, row in zip(itertools.product(*before), rows, strict=True):
        first = sum(map(operator.mul, (*index, *part.start[divided:]), strides))
        place, data = start + first * values.itemsize, memoryview(row.data)
        while data:
            count = os.pwrite(file, data, place)
            place, data = place + count, data[count:]
    return values.nbytes


def load_part(name: str, part: Stateful, tree: Mapping[str, Any], where: object) -> None:
    """Loads the state of one part of a run. ``where``: the state's origin, for messages.

    Raises:
        StateDamaged: the tree lacks the part's state, or the part cannot read it.
        ConfigError: the state belongs to another configuration.
    """
    if name not in tree:
        raise StateDamaged(f"{where} has no state of {name!r}; it has {', '.join(sorted(tree))}")
    try:
        part.load_state_dict(tree[name])
    except ConfigError as error:
        raise ConfigError(f"{where} does not fit this run: {error}") from error
    except TandemError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise StateDamaged(f"{where}: the state of {name!r} cannot be read: {kind_and_text(error)}") from error


class RandomStates:
    """The random states of all ranks. If a run is resumed with more ranks, each new rank gets the state of rank 0."""

    def __init__(self, device: str, team: Team):
        """``device``: of this process; a GPU has its own generator."""
        self._device, self._team = device, team

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks. Collective."""
        return {"ranks": self._team.gather(self._here())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rank = self._team.rank
        saved = state["ranks"][rank if rank < len(state["ranks"]) else 0]
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
        of_numpy = saved["numpy"]
        numpy.random.set_state(("MT19937", *(of_numpy[name] for name in ("key", "pos", "has_gauss", "gauss"))))
        torch.set_rng_state(saved["torch"].clone())
        if self._device.startswith("cuda") and saved["cuda"] is not None:
            torch.cuda.set_rng_state(saved["cuda"].clone(), self._device)

    def _here(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        of_numpy: Any = numpy.random.get_state()  # its type is that of both forms, a tuple and a dict
        _, key, pos, has_gauss, spare = of_numpy
        cuda = torch.cuda.get_rng_state(self._device) if self._device.startswith("cuda") else None
        return {
            "python": [version, list(words), gauss],
            "numpy": {"key": key.tolist(), "pos": pos, "has_gauss": has_gauss, "gauss": spare},
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }
