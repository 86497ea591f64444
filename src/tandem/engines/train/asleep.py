"""Offloads parts of a training engine (they *sleep*) to free device memory, and restores them exactly (they *wake*).

On a GPU, parts move to host memory. On a CPU, tensor objects stay and their storage is freed. Tensors that equal those in
the model's folder are read from there again. Others are written to an unnamed temporary file, which vanishes with the
process. A keyed sum of each tensor decides whether it must be written, and verifies the values that are read back.
"""

import ctypes
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tandem.api.activity import did
from tandem.api.engines import TrainPart
from tandem.api.failures import NotWritten, WeightsChanged
from tandem.api.weights import WORDS, KeyedSum, keyed_sum
from tandem.engines.train.holders import Holder
from tandem.engines.train.named_weights import PREFIX
from tandem.engines.train.optimizer import Optimizer
from tandem.models.allocator import give_back, mapped_blocks
from tandem.models.lora import A, B
from tandem.models.stored import CACHE_LINE, TRUNK, Stored, read_whole, stored_tensors

READERS = 2
"""Number of threads that read tensors on waking. Half of the time goes to clearing new pages, which runs in parallel."""


@dataclass
class _Copy:
    """The copy of a storage in a file."""

    name: str
    num_bytes: int
    sum: int | None = None
    """Keyed sum of the copy; None if there is none yet."""

    place: Stored | int | None = None
    """The tensor in the model's folder, or the offset in the temporary file, bytes."""

    woke: tuple[int, int] | None = None
    """At the last waking: the storage that the copy was read into, and torch's version counter of the parameter."""


class _Region(NamedTuple):
    """The elements of a storage from ``start`` to its end."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the region; 0 if the storage is freed."""
        return max(0, self.storage.nbytes() - self.start * self.dtype.itemsize)

    @property
    def flat(self) -> torch.Tensor:
        """The region as a tensor with one dimension, which shares its memory."""
        count = self.num_bytes // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype).set_(self.storage, self.start, (count,), (1,))


class _Asleep(NamedTuple):
    """A region whose memory is freed, and its copy."""

    region: _Region
    copy: _Copy


class EngineMemory:
    """Offloads and restores the parts of one training engine."""

    def __init__(
        self,
        holder: Holder,
        optimizer: Optimizer,
        device: torch.device,
        folder: Path,
        trunk: "EngineMemory | None" = None,
    ):
        """``folder``: the model folder that the engine was opened from. ``trunk``: memory of another engine with the same
        frozen trunk, which both share from now on; only that engine offloads the trunk.

        Raises:
            WeightsChanged: the other engine's trunk has other values.
        """
        self._holder, self._optimizer, self._device, self._folder = holder, optimizer, device, folder
        self._trunk = trunk
        self._asleep: dict[TrainPart, list[_Asleep]] = {}
        self._copies: dict[tuple[TrainPart, str], _Copy] = {}
        self._file: IO[bytes] | None = None
        self._stored: Mapping[str, Stored] | None = None
        self._moved = 0
        if trunk is not None:
            self._share(trunk)

    def _share(self, trunk: "EngineMemory") -> None:
        lender, in_trunk = trunk._holder.frozen, [n for n in self._holder.frozen if n.startswith(PREFIX + TRUNK)]
        names = [name for name in in_trunk if not name.endswith((A, B))]
        asleep = {sleeper.copy.name: sleeper.copy.sum for sleeper in trunk._asleep.get("parameters", ())}
        for name in names:
            own = self._holder.frozen[name].detach()
            same = name in lender and own.dtype == lender[name].dtype and own.shape == lender[name].shape
            if same and name in asleep:
                same = keyed_sum(own.contiguous()) == asleep[name]
            elif same:
                same = torch.equal(own, lender[name].to(own.device))
            if not same:
                raise WeightsChanged(
                    f"{name.removeprefix(PREFIX)!r} in {self._folder} has other numbers than in {trunk._folder}, which was "
                    "the same model when the run was planned: files that a run reads must not change; start it anew"
                )
        self._holder.borrow(names, trunk._holder)

    def require(self, *parts: TrainPart) -> None:
        """Raises `RuntimeError` if one of these parts, or the shared trunk, is offloaded."""
        if self._trunk is not None and "parameters" in parts:
            self._trunk.require("parameters")
        if missing := sorted(self._asleep.keys() & set(parts)):
            words = f"{' and '.join(missing)} of the train engine are offloaded"
            raise RuntimeError(f"{words}; call onload({tuple(missing)}) first")

    def num_bytes(self) -> dict[TrainPart, int]:
        """Returns the measured bytes of each part on the device now."""
        sizes: dict[TrainPart, int] = {}
        for part in ("parameters", "optimizer"):
            kept = sum(tensor.nbytes for _, tensor in self._tensors(part) if tensor.untyped_storage().nbytes())
            sizes[part] = kept + sum(tensor.untyped_storage().nbytes() for tensor in self._rounded(part))
            if self._device.type != "cpu" and part in self._asleep:
                sizes[part] = 0
        sizes["gradients"] = sum(gradient.nbytes for _, gradient in self._holder.named_local_gradients())
        return sizes

    def offload(self, parts: Iterable[TrainPart], scratch: Path | None) -> int:
        self._moved = 0
        if "gradients" in parts:
            self._optimizer.zero_grad()
        for part in parts:
            if part == "gradients" or part in self._asleep:
                continue
            self._asleep[part] = []
            if self._device.type != "cpu":
                self._move(part, torch.device("cpu"))
            elif scratch is not None:
                if part == "parameters":
                    self._leave_mapped_files()
                self._put_all_away(part, scratch)
                for tensor in self._rounded(part):
                    tensor.untyped_storage().resize_(0)
        return self._moved

    def _tensors(self, part: TrainPart) -> Iterator[tuple[str, torch.Tensor]]:
        return self._holder.tensors() if part == "parameters" else self._optimizer.tensors()

    def _rounded(self, part: TrainPart) -> list[torch.Tensor]:
        """Returns the rounded copies of the masters, which belong to the parameters."""
        return self._holder.copies() if part == "parameters" else []

    def onload(self, parts: Iterable[TrainPart]) -> int:
        self._moved = 0
        for part in parts:
            if part not in self._asleep:
                continue
            if self._device.type != "cpu":
                self._move(part, self._device)
            else:
                sleepers = self._asleep[part]
                with mapped_blocks(), ThreadPoolExecutor(READERS, "waking") as reader:  # reads ahead while one is checked
                    for sleeper, read in [(sleeper, reader.submit(self._read, *sleeper)) for sleeper in sleepers]:
                        self._moved += self._check(part, *sleeper, read.result)
                    if sleepers and part == "parameters":
                        for tensor in self._holder.copies():
                            tensor.untyped_storage().resize_(tensor.nbytes)
                        self._holder.publish()
            del self._asleep[part]
        return self._moved

    def _move(self, part: TrainPart, device: torch.device) -> None:
        (self._holder if part == "parameters" else self._optimizer).move(device)
        if device.type == "cpu":  # return the GPU memory, which torch's allocator would keep for itself
            give_back()
        self._moved += sum(region.num_bytes for _, region in self._regions(part))
        self._moved += sum(copy.nbytes for copy in self._rounded(part))

    def _regions(self, part: TrainPart) -> Iterator[tuple[str, _Region]]:
        """Yields each storage of a part once, with the name of one of its tensors."""
        seen: set[int] = set()
        for name, tensor in self._tensors(part):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield name, _Region(storage, tensor.dtype, int(tensor.storage_offset()))

    def _leave_mapped_files(self) -> None:
        """Copies parameters that transformers left in a mapped file to memory of their own, which can be freed.

        The copy keeps the offset from a cache line, because kernels may round differently for another alignment. A run that
        offloads then has the same results as a run that does not.
        """
        for name in (self._holder.masters | self._holder.frozen).keys() - self._holder.borrowed:
            parameter = self._holder.parameter(name)
            if isinstance(parameter.data, DTensor) or parameter.untyped_storage().resizable():
                continue
            beside = parameter.data_ptr() % CACHE_LINE // parameter.dtype.itemsize
            with mapped_blocks():
                own = torch.empty(beside + parameter.numel(), dtype=parameter.dtype)
                parameter.data = own[beside:].view(parameter.shape).copy_(parameter.data)
        self._holder.lend_again()

    def _put_all_away(self, part: TrainPart, scratch: Path) -> None:
        try:
            for name, region in self._regions(part):
                self._asleep[part].append(self._put_away(part, name, region, scratch))
        except OSError as error:
            self.onload((part,))  # restores what was offloaded before the error
            raise NotWritten(
                f"{part} of {self._folder} cannot be offloaded to {scratch}: {error}. Free space there, put run.root on "
                "another disk, or raise memory_limit_gib, and repeat the command: the run goes on from its last checkpoint"
            ) from error

    def _put_away(self, part: TrainPart, name: str, region: _Region, scratch: Path) -> _Asleep:
        did()
        copy = self._copies.get((part, name))
        if copy is None or copy.num_bytes != region.num_bytes:
            copy = self._copies[part, name] = _Copy(name, region.num_bytes)
        if copy.woke is not None and copy.woke == self._state(part, copy, region):
            region.storage.resize_(0)  # unchanged since waking: computing its sum again took a third of the time
            return _Asleep(region, copy)
        flat = region.flat
        total = keyed_sum(flat)
        if copy.place is None and part == "parameters":
            self._look_into_folder(copy, region.dtype, total)
        if copy.sum != total:
            self._write(copy, flat, scratch)
            copy.sum = total
        region.storage.resize_(0)
        return _Asleep(region, copy)

    def _state(self, part: TrainPart, copy: _Copy, region: _Region) -> tuple[int, int] | None:
        """Returns a value that differs once the parameter has changed. None if changes cannot be detected: torch's version
        counter does not count the steps of its fused optimizer."""
        if part != "parameters" or next(iter(self._optimizer.tensors()), None) is not None:
            return None
        parameter = self._holder.parameter(copy.name)
        return None if isinstance(parameter, DTensor) else (region.storage._cdata, parameter._version)

    def _look_into_folder(self, copy: _Copy, dtype: torch.dtype, total: int) -> None:
        """Sets the copy's place to the tensor of this name in the model's folder if both are equal."""
        try:
            if self._stored is None:
                self._stored = stored_tensors(self._folder)
            stored = self._stored.get(copy.name.removeprefix(PREFIX))
            if stored is None or torch.Size(stored.shape).numel() * dtype.itemsize != copy.num_bytes:
                return
            if keyed_sum_of(stored, dtype) == total:
                copy.sum, copy.place = total, stored
        except (OSError, ValueError):
            self._stored = {}  # the folder cannot be read, so all tensors are written

    def _write(self, copy: _Copy, flat: torch.Tensor, scratch: Path) -> None:
        if self._file is None:
            scratch.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115 — open while the engine lives
            weakref.finalize(self, self._file.close)
        if not isinstance(copy.place, int):  # otherwise overwrite its earlier copy in the file
            copy.place = self._file.seek(0, 2)
        self._file.seek(copy.place)
        self._moved += flat.nbytes
        remaining = memory_of(flat)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]

    def _read(self, region: _Region, copy: _Copy) -> None:
        """Allocates the region's memory and reads the copy into it."""
        did()
        region.storage.resize_(region.start * region.dtype.itemsize + copy.num_bytes)
        flat = region.flat
        if isinstance(copy.place, Stored):
            copy.place.read_into(flat, memory_of(flat))
        else:
            assert self._file is not None and copy.place is not None, "it was written when it went to sleep"
            read_whole(self._file, memory_of(flat), copy.place)

    def _check(self, part: TrainPart, region: _Region, copy: _Copy, read: Callable[[], None]) -> int:
        """Verifies a region that is read back; returns its bytes. ``read``: waits until the region has been read.

        Raises:
            WeightsChanged: the region cannot be read, or has other values than before.
        """
        where = str(copy.place.file) if isinstance(copy.place, Stored) else "the file that it was written to"
        try:
            read()
        except OSError as error:
            raise WeightsChanged(f"{copy.name!r} slept, and cannot be read from {where} again: {error}") from error
        if keyed_sum(region.flat) != copy.sum:
            raise WeightsChanged(
                f"{copy.name!r} slept, and {where} has other numbers for it now: files that a run reads must not change "
                "while it runs; start it anew"
            )
        copy.woke = self._state(part, copy, region)
        return copy.num_bytes


def memory_of(flat: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor as bytes."""
    # by its address, because a numpy view would prevent the storage from being resized
    return memoryview((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")


def keyed_sum_of(stored: Stored, dtype: torch.dtype) -> int:
    """Returns the keyed sum of a stored tensor after conversion to ``dtype``."""
    total, remainder = KeyedSum(), torch.empty(0, dtype=dtype)
    whole = 8 * WORDS // dtype.itemsize
    for piece in stored.pieces(dtype):
        remainder = torch.cat((remainder, piece)) if len(remainder) else piece
        while len(remainder) >= whole:
            total.add(remainder[:whole])
            remainder = remainder[whole:]
        remainder = remainder.clone()  # the piece is overwritten by the next one
    if len(remainder):
        total.add(remainder)
    return total.value
