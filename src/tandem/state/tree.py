"""Writes and reads states: plain data as JSON, tensors as safetensors. These formats cannot execute code.

Every run has one state of its own, that of the global random generators of its processes.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open

from tandem.api.activity import did
from tandem.api.state import Parted, Stateful
from tandem.api.team import Team
from tandem.api.weights import in_groups, save_tensors
from tandem.config.errors import ConfigError, TandemError, kind_and_text

PLAIN_FILE, TENSOR_FILES = "state.json", "tensors-*.safetensors"

MARK = "$tensor"
"""Key of the JSON object that stands for a tensor; its value is the tensor's name in the tensor files."""

FILE_BYTES = 2**30
"""Size in bytes at which a tensor file is closed; it also limits how many gathered bytes rank 0 has in memory."""

MAX_PLAIN_BYTES = 2**31
"""A larger JSON file is refused before it is read; no state comes near this size."""


class StateDamaged(TandemError, ValueError):
    """Files do not contain a valid state, or not the state of this part."""


def write_tree(team: Team, folder: Path, tree: Mapping[str, Any], *, writes: bool) -> None:
    """Writes a tree of plain data and tensors into an empty folder. Collective if tensors are spread over ranks: every rank
    of ``team`` passes its tree with the same `Parted` in the same order, and only the rank with ``writes`` writes files.

    Raises:
        TypeError: a value in the tree is neither plain data nor a tensor; names its path.
        OSError: writing failed.
    """
    with team.together():  # fails on all ranks before the first collective call, although only rank 0 has some parts
        plain, tensors = split(tree)
    with team.whole(_gathered(tensors, writes=writes)) as stream:
        if not writes:
            for _ in stream:
                pass
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAIN_FILE).write_text(json.dumps(plain), encoding="utf-8")
        _write_tensors(folder, stream)


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


def _gathered(tensors: Mapping[str, torch.Tensor | Parted], *, writes: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole tensors on the CPU. ``writes``: False on ranks that only take part in gathering."""
    for name, tensor in tensors.items():
        did("save")
        if isinstance(tensor, Parted):
            yield name, tensor.gather().cpu()
        elif writes:
            yield name, tensor.cpu()


def _write_tensors(folder: Path, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    for number, group in enumerate(in_groups(stream, FILE_BYTES), 1):
        places: set[int] = set()
        for name, tensor in group.items():
            storage = tensor.untyped_storage()
            if storage.nbytes() != tensor.nbytes or storage.data_ptr() in places or not tensor.is_contiguous():
                # safetensors needs contiguous tensors that share no memory
                group[name] = tensor.clone(memory_format=torch.contiguous_format)
            places.add(storage.data_ptr())
        save_tensors(group, folder / TENSOR_FILES.replace("*", f"{number:05}"))


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
