"""States on disk: plain data as JSON, tensors as safetensors. Nothing in these files can name code."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from tandem.api.activity import did
from tandem.api.state import Parted, Stateful
from tandem.api.team import Team
from tandem.api.weight_files import in_groups, save_tensors
from tandem.config.errors import ConfigError, TandemError, kind_and_text

PLAIN_FILE, TENSOR_FILES = "state.json", "tensors-*.safetensors"
MARK = "$tensor"
"""Key of what stands in place of a tensor: its name in the tensor files."""

FILE_BYTES = 2**30
"""A tensor file is closed once it holds so much: rank 0 never has more of what is sharded in memory."""

MAX_PLAIN_BYTES = 2**31
"""No state of ours comes near; a file that is larger is refused before it is read."""


class StateDamaged(TandemError, ValueError):
    """Files that are no state, or not the state of this part."""


def write_tree(team: Team, folder: Path, tree: Mapping[str, Any], *, writes: bool) -> None:
    """Writes a tree of plain data and tensors into an empty folder. Collective where tensors are sharded: every rank of
    ``team`` gives its own tree with the same sharded tensors in the same order; only the one that ``writes`` leaves files.

    Raises:
        TypeError: something in the tree is neither plain data nor a tensor; names where.
        OSError: the disk refuses.
    """
    tensors: dict[str, torch.Tensor | Parted] = {}
    with team.together():  # before the first collective call: rank 0 has parts that the others have not
        plain = _split(tree, "", tensors)
    with team.whole(_gathered(tensors, all_of_them=writes)) as stream:
        if not writes:
            for _ in stream:
                pass
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAIN_FILE).write_text(json.dumps(plain), encoding="utf-8")
        _write_tensors(folder, stream)


def read_tree(folder: Path) -> dict[str, Any]:
    """The tree that `write_tree` wrote, every tensor whole, on the CPU.

    Raises:
        StateDamaged: a file is missing, or is no state.
    """
    path = folder / PLAIN_FILE
    try:
        if path.stat().st_size > MAX_PLAIN_BYTES:
            raise StateDamaged(f"{path} has {path.stat().st_size} bytes, which no state has")
        plain = json.loads(path.read_text(encoding="utf-8"))
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob(TENSOR_FILES))]
            where = {name: file for file in files for name in file.keys()}
            tree = _joined(plain, where)
    except (OSError, ValueError, TypeError, RecursionError, KeyError, SafetensorError) as error:
        if isinstance(error, StateDamaged):
            raise
        raise StateDamaged(f"{folder} cannot be read: {kind_and_text(error)}") from error
    if not isinstance(tree, dict):
        raise StateDamaged(f"{path} holds no state")
    return tree


POOLS = "pool-*"
"""Folders inside a state, each with the tree of a process that wrote its own parts."""


def read_parts(folder: Path) -> dict[str, Any]:
    """All parts of a run, also those that other processes wrote. Raises as `read_tree`."""
    trees = [read_tree(folder), *map(read_tree, sorted(folder.glob(POOLS)))]
    return {name: part for tree in trees for name, part in tree.items()}


def _split(value: Any, name: str, tensors: dict[str, torch.Tensor | Parted]) -> Any:
    """Returns the plain data; puts each tensor into ``tensors`` under its path."""
    if isinstance(value, (torch.Tensor, Parted)):
        tensors[name] = value.detach() if isinstance(value, torch.Tensor) else value
        return {MARK: name}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key == MARK]
        if wrong:
            raise TypeError(f"the state has a key that is no text, or reserved, at {name or 'its root'}: {wrong[0]!r}")
        return {key: _split(item, f"{name}/{key}" if name else key, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy's
        return value.item()
    raise TypeError(f"the state has a {type(value).__name__} at {name}; plain data and tensors can be saved")


def _joined(plain: Any, where: Mapping[str, Any]) -> Any:
    if isinstance(plain, dict):
        if plain.keys() == {MARK}:
            return where[plain[MARK]].get_tensor(plain[MARK])
        return {key: _joined(item, where) for key, item in plain.items()}
    return [_joined(item, where) for item in plain] if isinstance(plain, list) else plain


def _gathered(tensors: Mapping[str, torch.Tensor | Parted], *, all_of_them: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors on the CPU, one after another; a rank that writes nothing takes part in gathering only."""
    for name, tensor in tensors.items():
        did("save")
        if isinstance(tensor, Parted):
            yield name, tensor.gather().cpu()
        elif isinstance(tensor, DTensor):
            yield name, tensor.full_tensor().cpu()
        elif all_of_them:
            yield name, tensor.cpu()


def _write_tensors(folder: Path, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    for number, group in enumerate(in_groups(stream, FILE_BYTES), 1):
        places: set[int] = set()
        for name, tensor in group.items():
            storage = tensor.untyped_storage()
            if storage.nbytes() != tensor.nbytes or storage.data_ptr() in places or not tensor.is_contiguous():
                # safetensors wants memory of each one's own
                group[name] = tensor.clone(memory_format=torch.contiguous_format)
            places.add(storage.data_ptr())
        save_tensors(group, folder / TENSOR_FILES.replace("*", f"{number:05}"))


def load_part(name: str, part: Stateful, tree: Mapping[str, Any], where: object) -> None:
    """Gives one part of a run its state.

    Raises:
        StateDamaged: it is missing in the tree, or the part cannot read it.
        ConfigError: the part was made from another configuration.
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
