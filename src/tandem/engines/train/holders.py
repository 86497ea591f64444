"""Holders: the layout of a model and its float32 master weights over processes. Frozen parameters have no masters.

`Replica`: one process has the whole model. `Sharded`: FSDP2 gives each process a part. Under tensor parallelism, "the whole
model" is the rank's piece of each matrix. Both have ``masters``, the parameters that the optimizer updates, whose ``.grad``
is complete after the backward passes and `finish_gradients`. (`zero`: DeepSpeed has its own layout of gradients and
masters.)

`gather_rows` gathers whole tensors from the ranks' rows, many small tensors in one exchange.
"""

import atexit
import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tandem.api.state import Parted, part_of
from tandem.models.native import add_to, square_sum
from tandem.models.tensor_parallel import Pieces

BUCKET_BYTES = 32 * 2**20
"""Maximum bytes of one exchange, unless a single tensor is larger."""

ALIGNED = 16
"""Each tensor in an exchange begins at a multiple of this many bytes, which is valid for every dtype."""


def buckets(names: Iterable[str], num_bytes: Callable[[str], int], most: int = BUCKET_BYTES) -> Iterator[list[str]]:
    """Yields the names in order, in lists of at most ``most`` bytes each, or of one name that has more."""
    bucket: list[str] = []
    filled = 0
    for name in names:
        size = num_bytes(name)
        if bucket and filled + size > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += size
    if bucket:
        yield bucket


gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers tensors of equal size from all ranks. Newer versions of torch deprecate the second name."""


def gather_rows(
    shards: Sequence[torch.Tensor], shapes: Sequence[torch.Size], group: dist.ProcessGroup | None
) -> Iterator[torch.Tensor]:
    """Gathers whole tensors and yields them in order. Collective; all communication comes before the first tensor.

    ``shards``: this rank's rows of each tensor as FSDP2 cuts them: every rank has equally many rows, the last ranks fewer or
    none. ``shapes``: shapes of the whole tensors.
    """
    size = dist.get_world_size(group)
    rows = [-(-shape[0] // size) for shape in shapes]
    widths = [count * shape[1:].numel() * shard.itemsize for count, shape, shard in zip(rows, shapes, shards, strict=True)]
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + -(-width // ALIGNED) * ALIGNED)
    sent = shards[0].new_empty(starts[-1], dtype=torch.uint8)
    for start, shard in zip(starts, shards, strict=False):
        data = shard.contiguous().flatten().view(torch.uint8)
        sent[start : start + len(data)] = data
    received = sent.new_empty(size * len(sent))
    gather_equal(received, sent, group=group)  # as bytes, because gloo does not support every dtype
    del sent
    kinds = [shard.dtype for shard in shards]
    by_rank = received.view(size, -1)

    def wholes() -> Iterator[torch.Tensor]:
        for start, width, shape, dtype in zip(starts, widths, shapes, kinds, strict=False):
            filled = by_rank[:, start : start + width].reshape(-1).view(dtype)  # padding is at the end
            yield filled[: shape.numel()].view(shape)

    return wholes()


def form_group(device: torch.device) -> None:
    """Initialises torch.distributed with this process alone if it is not initialised, for libraries that need a group."""
    if not dist.is_initialized():
        kind = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


class Holder(ABC):
    """A model that computes in one dtype and is trained in float32."""

    model: nn.Module
    masters: dict[str, nn.Parameter]
    """Name in ``model`` → float32 parameter that is trained; tied parameters come once."""

    frozen: dict[str, nn.Parameter]
    """Name → parameter that is not trained, in the compute dtype. With adapters: most of the model; otherwise empty."""

    pieces: Pieces | None = None
    """The pieces into which tensor parallelism cuts matrices; None without it."""

    in_host_memory: bool = False
    """True if masters, gradients and moments are always in host memory; `move` does not change this."""

    lent: bool = False
    """True while the model has other weights temporarily, see `restored`."""

    borrowed: frozenset[str] = frozenset()
    """Names in ``frozen`` whose memory belongs to another holder."""

    _lender: "Holder | None" = None
    _borrowers: "tuple[weakref.ref[Holder], ...]" = ()

    @property
    def device(self) -> torch.device:
        """The device on which ranks communicate."""
        return next(iter((self.masters or self.frozen).values())).device

    @abstractmethod
    def publish(self) -> None:
        """Updates the weights that the model computes with after masters have changed."""

    @abstractmethod
    def _gather(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Gathers a master or frozen parameter from all shards, cast to ``dtype`` before it is sent. Under tensor
        parallelism, gathers only this rank's piece."""

    @abstractmethod
    def _put(self, name: str, value: torch.Tensor) -> None:
        """Overwrites the tensor that `_gather` returns."""

    def compute(self, *arguments: Any) -> Any:
        """Runs the model's forward pass."""
        return self.model(*arguments)

    def accumulate(self, *, last: bool) -> None:
        """Prepares the next backward pass of a step. ``last``: True for the last pass of the step."""

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the loss's gradients to ``.grad``."""
        loss.backward()

    def adamw(self, groups: list[dict[str, Any]], **settings: Any) -> Any:
        """Constructs the optimizer of the masters in ``groups``, with ``step``, ``zero_grad``, ``param_groups`` and
        ``state`` as torch's optimizers have."""
        return torch.optim.AdamW(groups, fused=True, **settings)

    def moments(self, adamw: Any) -> dict[str, dict[str, Any]]:
        """Returns the moments and the number of steps of each master that has been updated, as `state_of` gives them."""
        state = adamw.state
        return {
            name: {what: self.state_of(name, x) for what, x in state[master].items()}
            for name, master in self.masters.items()
            if master in state
        }

    def take_moments(self, adamw: Any, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replaces the moments of ``adamw``. ``moments`` has whole tensors, out of which each rank cuts its part."""
        adamw.state.clear()
        for name, tensors in moments.items():
            adamw.state[self.masters[name]] = {what: self.laid_out(name, x) for what, x in tensors.items()}

    def parameter(self, name: str) -> nn.Parameter:
        """Returns the master or frozen parameter ``name`` of this rank, which may be only a part of the whole tensor."""
        return self.masters[name] if name in self.masters else self.frozen[name]

    def full(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the whole tensor of a master or frozen parameter, on the device. ``dtype``: None keeps its dtype.
        Collective if parameters are sharded or cut."""
        return self._put_together(name, self._gather(name, dtype))

    def fulls(self, names: Iterable[str], dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Yields `full` of each name in order; a tensor is valid until the next one is requested."""
        return (self.full(name, dtype) for name in names)

    def _put_together(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        return piece if self.pieces is None else self.pieces.whole(name, piece)

    def shape(self, name: str) -> torch.Size:
        """Returns the shape of the whole tensor."""
        held = self.parameter(name).shape
        return held if self.pieces is None else self.pieces.shape(name, held)

    def assign(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a parameter by the whole tensor ``value``, which must be equal on every rank."""
        self._put(name, value if self.pieces is None else self.pieces.piece(name, value))
        if name in self.frozen:
            self._forget_features()

    def _forget_features(self) -> None:
        """Drops cached features of images and sounds, which are outdated after frozen weights have changed."""
        media = getattr(self.model, "media", None)
        if media is not None:
            media.forget()

    def state_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | Parted:
        """Returns a master, or a moment with the same layout, as the value for a state: a `Parted` if it is spread over
        ranks, otherwise the tensor itself. Scalars are returned unchanged."""
        pieces = self.pieces
        if not tensor.dim() or (pieces is None and not isinstance(tensor, DTensor)):
            return tensor
        if pieces is None:
            return Parted(name, lambda: [part_of(tensor)])
        return Parted(name, lambda: [pieces.part(name, part_of(tensor))])

    def laid_out(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a whole tensor as a copy, on the device of the master ``name`` and cut like it."""
        master = self.masters[name]
        cut = whole if self.pieces is None or not whole.dim() else self.pieces.piece(name, whole)
        if not isinstance(master, DTensor) or not whole.dim():
            return cut.to(master.device, copy=True)
        return _divided(cut, master)

    def finish_gradients(self) -> None:
        """Completes gradients after the last backward pass. Under tensor parallelism, parameters that are not cut have a
        partial gradient on each rank; these are summed."""
        if self.pieces is None:
            return
        masters = [self.masters[name] for name in sorted(self.pieces.summed)]
        parts = [_local(master.grad) for master in masters if master.grad is not None]
        if parts:
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=self.pieces.group)
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A block that may overwrite weights. Afterwards all weights are restored exactly."""
        parameters = self.masters | self.frozen
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.lent = True
        try:
            yield
        finally:
            self.lent = False
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(before[name])
            self._forget_features()
            self.publish()

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[bool]:
        """A block in which the model computes in float32 with its rounded weights; yields False if that is not possible.

        Nothing may be trained or published inside.
        """
        yield False

    def borrow(self, names: Iterable[str], lender: "Holder") -> None:
        """Makes these frozen parameters share the lender's memory, also after the lender has moved it."""
        self.borrowed, self._lender = frozenset(names), lender
        lender._borrowers = (*(borrower for borrower in lender._borrowers if borrower() is not None), weakref.ref(self))
        self._point()

    def _point(self) -> None:
        for name in self.borrowed:
            assert self._lender is not None
            self.frozen[name].data = self._lender.frozen[name].data

    def lend_again(self) -> None:
        """Points borrowers to the new memory after frozen parameters have moved."""
        for borrower in filter(None, (reference() for reference in self._borrowers)):
            borrower._point()

    def move(self, device: torch.device | str) -> None:
        """Moves the model and its masters to a device, except for borrowed parameters."""
        for name in self.borrowed:
            self.frozen[name].data = torch.empty(0, dtype=self.frozen[name].dtype)
        self.model.to(device)
        self._point()
        self.lend_again()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, this rank's part) of every master and frozen parameter that is not borrowed."""
        for name, parameter in (self.masters | self.frozen).items():
            if name not in self.borrowed:
                yield name, _local(parameter.detach())

    def copies(self) -> list[torch.Tensor]:
        """Returns the model's rounded copies of the masters, which `publish` updates; empty if there are none."""
        return []

    def square_sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the squares of a gradient, ``[]`` float64."""
        return gradient.pow(2).sum(dtype=torch.float64)

    def square_sums(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the sum of the squares of several gradients, ``[]`` float64. On a GPU a few fused kernels sum in float32,
        so the rounding depends on how parameters are sharded."""
        if gradients and gradients[0].is_cuda:
            return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
        sums = [self.square_sum(gradient) for gradient in gradients]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)

    def local_masters(self) -> list[torch.Tensor]:
        """Returns this rank's part of each master."""
        return [_local(master) for master in self.masters.values()]

    def named_local_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields this rank's part of every gradient, with the master's name."""
        for name, master in self.masters.items():
            if master.grad is not None:
                yield name, _local(master.grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _divided(value: torch.Tensor, master: DTensor) -> DTensor:
    """Returns a copy of ``value``, which every rank has, sharded and placed like ``master``."""
    mesh = master.device_mesh
    # src_data_rank=None: every rank cuts its part out of its own copy, without communication
    cut = distribute_tensor(value.to(mesh.device_type, copy=True), mesh, master.placements, src_data_rank=None)
    local = cut.to_local().to(_local(master).device)
    return DTensor.from_local(local, mesh, master.placements, run_check=False, shape=cut.shape, stride=cut.stride())


def _parted(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Returns (trained parameters, frozen parameters), each by name."""
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if p.requires_grad}, {n: p for n, p in named.items() if not p.requires_grad}


class Replica(Holder):
    """A whole model in one process.

    In float32, masters and model are the same tensors. In bfloat16, the model has rounded copies, which are updated once per
    step; the gradient of a copy is added to that of its master in float32 as soon as it is complete.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, pieces: Pieces | None = None):
        self.model, self.pieces = model, pieces
        self._parameters, self.frozen = _parted(model)
        self.masters = self._parameters
        if dtype != torch.float32:
            self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self._parameters.items()}
            for name, parameter in self._parameters.items():
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(self._collector(self.masters[name]))

    @staticmethod
    def _collector(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                add_to(master.grad, parameter.grad)
            parameter.grad = None

        return collect

    @torch.no_grad()
    def publish(self) -> None:
        if self.masters is not self._parameters:
            for name, parameter in self._parameters.items():
                parameter.copy_(self.masters[name])

    def square_sum(self, gradient: torch.Tensor) -> torch.Tensor:
        exact = self.masters is self._parameters  # float32: keeps results bit-identical to earlier runs
        return super().square_sum(gradient) if exact else square_sum(gradient)

    def copies(self) -> list[torch.Tensor]:
        return [] if self.masters is self._parameters else [parameter.data for parameter in self._parameters.values()]

    def _gather(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        rounded = self._parameters.get(name)
        held = rounded if rounded is not None and rounded.dtype == dtype else self.parameter(name)  # avoids another cast
        return held.detach() if dtype is None else held.detach().to(dtype)

    @torch.no_grad()
    def _put(self, name: str, value: torch.Tensor) -> None:
        self.parameter(name).copy_(value)

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[bool]:
        """Converts all parameters to float32, which is exact; afterwards the rounded ones are restored."""
        parameters = list(self.model.parameters())
        rounded = [parameter.data for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.data = parameter.data.to(torch.float32)
            yield True
        finally:
            for parameter, before in zip(parameters, rounded, strict=True):
                parameter.data = before

    def move(self, device: torch.device | str) -> None:
        super().move(device)
        if self.masters is not self._parameters:
            for master in self.masters.values():
                master.data = master.data.to(device)


class Sharded(Holder):
    """A model sharded by FSDP2: each layer is gathered in the compute dtype when needed; gradients are reduced in
    float32."""

    def __init__(
        self,
        model: nn.Module,
        layers: nn.ModuleList,
        dtype: torch.dtype,
        mesh: DeviceMesh,
        pieces: Pieces | None = None,
        fill: Callable[[nn.Module], None] = lambda _: None,
        gradient_sync: Literal["step", "micro_batch"] = "step",
        offload: bool = False,
    ):
        """Shards a model.

        Args:
            mesh: ``[shards]`` or ``[replicas, shards]``.
            fill: loads a module's weights just before the module is sharded.
            gradient_sync: gradients are summed over ranks once per optimizer step, or per micro-batch.
            offload: keeps shards of masters, gradients and moments in host memory, where the optimizer runs; a layer is
                copied to the device while it is computed.
        """
        precision = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # temperatures stay float32
        )
        place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
        for layer in layers:
            fill(layer)
            fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=place)
        fill(model)
        # the embedding may also be the head (tied): keep the root's parameters gathered between the two uses
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=place, reshard_after_forward=False)
        self.model, self.pieces, self._gradient_sync = model, pieces, gradient_sync
        self._mesh, self.in_host_memory = mesh, offload
        self.masters, self.frozen = _parted(model)

    def accumulate(self, *, last: bool) -> None:
        """Prepares the next backward pass. Until gradients are summed over ranks, each rank has the full gradients of its
        own sequences; afterwards it has its shard of the sum."""
        assert isinstance(self.model, FSDPModule)
        if self._gradient_sync == "step":
            self.model.set_requires_gradient_sync(last)
        else:
            self.model.set_requires_all_reduce(last)  # between replicas once per step in any case: it costs no memory

    def publish(self) -> None:
        """Frees parameters that are still gathered after a forward pass without a backward pass, so that the next pass
        gathers the new values."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.publish()  # frees gathered parameters, which do not count as this rank's
        yield from super().tensors()

    @property
    def device(self) -> torch.device:
        return torch.device(self._mesh.device_type)

    def _gather(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        (whole,) = self._gather_together([name], dtype)
        return whole

    def fulls(self, names: Iterable[str], dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Yields whole tensors, see `Holder.fulls`; small ones are gathered together, up to `BUCKET_BYTES`."""
        for bucket in buckets(
            names, lambda name: self.parameter(name).numel() * (dtype or self.parameter(name).dtype).itemsize
        ):
            for name, piece in zip(bucket, self._gather_together(bucket, dtype), strict=True):
                yield self._put_together(name, piece)

    def _gather_together(self, names: Sequence[str], dtype: torch.dtype | None) -> Iterator[torch.Tensor]:
        """Gathers several tensors in one exchange."""
        mesh = self._mesh
        held = [self.parameter(name).detach() for name in names]
        shards = [_local(parameter).to(mesh.device_type, dtype or parameter.dtype) for parameter in held]
        # the last dimension of the mesh is the shards; the first one is the replicas, if there are any
        return gather_rows(shards, [parameter.shape for parameter in held], mesh.get_group(mesh.ndim - 1))

    @torch.no_grad()
    def _put(self, name: str, value: torch.Tensor) -> None:
        held = self.parameter(name)
        assert isinstance(held, DTensor)
        _local(held).copy_(_local(_divided(value.to(held.dtype), held)))

    def move(self, device: torch.device | str) -> None:
        if not self.in_host_memory:
            super().move(device)
