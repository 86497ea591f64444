"""The layout of a model and its float32 master weights over processes; frozen parameters have no masters.

`Replica`: one process has the whole model. `Sharded`: FSDP2 gives each process a part; under tensor parallelism "the whole
model" is a rank's piece of each matrix. Both have ``masters``, the parameters that the optimizer updates, whose ``.grad`` is
complete after the backward passes and `finish_gradients`. (`zero`: DeepSpeed keeps gradients and masters its own way.)
"""

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
from tandem.engines.train.gathering import buckets, gather_rows
from tandem.models.sums import add_to, square_sum
from tandem.models.tensor_parallel import Pieces


class Holder(ABC):
    """A model that computes in one dtype and is trained in float32."""

    model: nn.Module
    masters: dict[str, nn.Parameter]
    """Name in ``model`` → float32 parameter that is trained; tied parameters once."""

    frozen: dict[str, nn.Parameter]
    """Name → parameter that is not trained, in the compute dtype: most of the model beside adapters, otherwise none."""

    pieces: Pieces | None = None
    """The cuts of matrices under tensor parallelism; None without it."""

    in_host_memory: bool = False
    """True if masters, gradients and moments are in host memory, and stay there when the rest moves."""

    lent: bool = False
    """True while other weights are in the model: see `restored`."""

    borrowed: frozenset[str] = frozenset()
    """Names in ``frozen`` whose memory belongs to another holder."""

    _lender: "Holder | None" = None
    _borrowers: "tuple[weakref.ref[Holder], ...]" = ()

    @property
    def device(self) -> torch.device:
        """The device on which ranks exchange numbers."""
        return next(iter((self.masters or self.frozen).values())).device

    @abstractmethod
    def publish(self) -> None:
        """Updates the weights that the model computes with after masters have changed."""

    @abstractmethod
    def _gather(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Gathers a master or frozen parameter (its piece on this rank, if it is cut) from all shards, cast before it
        travels."""

    @abstractmethod
    def _put(self, name: str, value: torch.Tensor) -> None:
        """Overwrites the tensor that `_gather` returns."""

    def compute(self, *arguments: Any) -> Any:
        """Runs the model's forward pass."""
        return self.model(*arguments)

    def accumulate(self, *, last: bool) -> None:
        """Prepares the next backward pass of a step. ``last``: no other follows."""

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the loss's gradients to ``.grad``."""
        loss.backward()

    def adamw(self, groups: list[dict[str, Any]], **settings: Any) -> Any:
        """Makes the optimizer of the masters in ``groups``; it has ``step``, ``zero_grad``, ``param_groups`` and ``state``,
        as torch's."""
        return torch.optim.AdamW(groups, fused=True, **settings)

    def moments(self, adamw: Any) -> dict[str, dict[str, Any]]:
        """Moments and number of steps of each master that has any, in the form of a state (see `state_of`)."""
        state = adamw.state
        return {
            name: {what: self.state_of(name, x) for what, x in state[master].items()}
            for name, master in self.masters.items()
            if master in state
        }

    def take_moments(self, adamw: Any, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replaces the moments of ``adamw`` by whole ones; each rank cuts its part out of them."""
        adamw.state.clear()
        for name, found in moments.items():
            adamw.state[self.masters[name]] = {what: self.laid_out(name, x) for what, x in found.items()}

    def held(self, name: str) -> nn.Parameter:
        """This rank's master or frozen parameter."""
        return self.masters[name] if name in self.masters else self.frozen[name]

    def full(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole master or frozen parameter, on the device; ``dtype`` None keeps its own. Collective if it is sharded or
        cut."""
        return self._put_together(name, self._gather(name, dtype))

    def fulls(self, names: Iterable[str], dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """`full` of each name in order; a tensor is valid until the next is taken."""
        return (self.full(name, dtype) for name in names)

    def _put_together(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        return piece if self.pieces is None else self.pieces.whole(name, piece)

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor."""
        own = self.held(name).shape
        return own if self.pieces is None else self.pieces.shape(name, own)

    def assign(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a parameter with the whole tensor ``value``, which must be equal on every rank."""
        self._put(name, value if self.pieces is None else self.pieces.piece(name, value))
        if name in self.frozen:
            self._forget_features()

    def _forget_features(self) -> None:
        """Forgets features of images and sounds, which must be computed again after frozen weights have changed."""
        media = getattr(self.model, "media", None)
        if media is not None:
            media.forget()

    def state_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | Parted:
        """A master, or a moment with the same layout, in the form of a state: with a function that makes it whole if
        matrices are cut, otherwise unchanged. Numbers without a shape stay as they are."""
        pieces = self.pieces
        if pieces is None or not tensor.dim():
            return tensor
        return Parted(lambda: pieces.whole(name, _whole(tensor)), lambda: pieces.part(name, part_of(tensor)))

    def laid_out(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """A copy of a whole tensor, on the device of the master ``name`` and cut like it."""
        master = self.masters[name]
        cut = whole if self.pieces is None or not whole.dim() else self.pieces.piece(name, whole)
        if not isinstance(master, DTensor) or not whole.dim():
            return cut.to(master.device, copy=True)
        return _divided(cut, master)

    def finish_gradients(self) -> None:
        """Completes gradients after the last backward pass: sums those of which ranks that share matrices have a part
        each."""
        if self.pieces is None:
            return
        masters = [self.masters[name] for name in sorted(self.pieces.summed)]
        parts = [_local(master.grad) for master in masters if master.grad is not None]
        if parts:
            together = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(together, group=self.pieces.group)
            for part, total in zip(parts, together.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A block that may overwrite weights; after it all weights are as before, to the bit."""
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
        """A block in which the model computes in float32 with its rounded weights; yields False if it cannot.

        Nothing may be trained or published inside.
        """
        yield False

    def borrow(self, names: Iterable[str], lender: "Holder") -> None:
        """Makes these frozen parameters share the lender's memory, wherever the lender moves it."""
        self.borrowed, self._lender = frozenset(names), lender
        lender._borrowers = (*(one for one in lender._borrowers if one() is not None), weakref.ref(self))
        self._point()

    def _point(self) -> None:
        for name in self.borrowed:
            assert self._lender is not None
            self.frozen[name].data = self._lender.frozen[name].data

    def lend_again(self) -> None:
        """Gives borrowers the new memory of frozen parameters that have moved."""
        for borrower in filter(None, (one() for one in self._borrowers)):
            borrower._point()

    def move(self, device: torch.device | str) -> None:
        """Moves the model and its masters, but no borrowed parameters."""
        for name in self.borrowed:
            self.frozen[name].data = torch.empty(0, dtype=self.frozen[name].dtype)
        self.model.to(device)
        self._point()
        self.lend_again()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, this rank's part) of every master and frozen parameter with memory of its own."""
        for name, parameter in (self.masters | self.frozen).items():
            if name not in self.borrowed:
                yield name, _local(parameter.detach())

    def copies(self) -> list[torch.Tensor]:
        """The model's rounded copies of the masters, which `publish` makes."""
        return []

    def square_sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum of the squares of a gradient, ``[]`` float64."""
        return gradient.pow(2).sum(dtype=torch.float64)

    def square_sums(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of the squares of several gradients, ``[]`` float64. On a GPU a few kernels read each gradient once and sum
        float32 in a tree, so the result depends on the cuts of parameters."""
        if gradients and gradients[0].is_cuda:
            return torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
        sums = [self.square_sum(gradient) for gradient in gradients]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)

    def local_gradients(self) -> Iterator[torch.Tensor]:
        """Yields this rank's part of every gradient."""
        for _, gradient in self.named_local_gradients():
            yield gradient

    def named_local_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields this rank's part of every gradient, with the master's name."""
        for name, master in self.masters.items():
            if master.grad is not None:
                yield name, _local(master.grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a whole tensor on the device of its mesh, because shards in host memory cannot be gathered there."""
    if not isinstance(tensor, DTensor):
        return tensor
    return _moved(tensor, tensor.device_mesh.device_type).full_tensor()


def _divided(value: torch.Tensor, master: DTensor) -> DTensor:
    """A copy of ``value``, which every rank has, cut and placed like ``master``."""
    mesh = master.device_mesh
    # src_data_rank=None: every rank cuts its own part out of the tensor that it has
    cut = distribute_tensor(value.to(mesh.device_type, copy=True), mesh, master.placements, src_data_rank=None)
    return _moved(cut, master.to_local().device.type)


def _moved(tensor: DTensor, device: str) -> DTensor:
    """A copy of the tensor with its shards on another kind of device."""
    local = tensor.to_local()
    if local.device.type == device:
        return tensor
    shape, stride = tensor.shape, tensor.stride()
    there, placements = local.to(device), tensor.placements
    return DTensor.from_local(there, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _parted(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """(parameters that are trained, parameters that are frozen), each by name."""
    named = dict(model.named_parameters())
    return {n: p for n, p in named.items() if p.requires_grad}, {n: p for n, p in named.items() if not p.requires_grad}


class Replica(Holder):
    """A model that is whole in one process.

    In float32 masters and model are the same tensors. In bfloat16 the model has rounded copies, which are made once a step;
    a copy's gradient is added to its master's in float32 as soon as it is complete.
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
        exact = self.masters is self._parameters  # float32: as in all earlier runs, to the bit
        return super().square_sum(gradient) if exact else square_sum(gradient)

    def copies(self) -> list[torch.Tensor]:
        return [] if self.masters is self._parameters else [parameter.data for parameter in self._parameters.values()]

    def _gather(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        rounded = self._parameters.get(name)
        held = rounded if rounded is not None and rounded.dtype == dtype else self.held(name)  # that is cast already
        return held.detach() if dtype is None else held.detach().to(dtype)

    @torch.no_grad()
    def _put(self, name: str, value: torch.Tensor) -> None:
        self.held(name).copy_(value)

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[bool]:
        """Makes all parameters float32 copies of themselves, which is exact; the rounded ones come back afterwards."""
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
    """FSDP2: each layer is gathered in the compute dtype when it is needed; gradients are reduced in float32."""

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
            mesh: shards, or replicas by shards.
            fill: loads a module's weights, just before it is sharded.
            gradient_sync: how often gradients are summed over ranks.
            offload: keeps shards of masters, gradients and moments in host memory, where the optimizer runs; a layer is
                brought to the device while it is computed.
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
        # the embedding is also the head, or as large: keep it gathered between its two uses
        fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=place, reshard_after_forward=False)
        self.model, self.pieces, self._gradient_sync = model, pieces, gradient_sync
        self._mesh, self.in_host_memory = mesh, offload
        self.masters, self.frozen = _parted(model)

    def accumulate(self, *, last: bool) -> None:
        """Prepares the next backward pass. Until gradients are summed over ranks, each rank has all gradients of its own
        sequences; afterwards its shard of the sum."""
        assert isinstance(self.model, FSDPModule)
        if self._gradient_sync == "step":
            self.model.set_requires_gradient_sync(last)
        else:
            self.model.set_requires_all_reduce(last)  # between replicas once in any case: it costs no memory

    def publish(self) -> None:
        """Frees parameters that a forward pass without a backward pass left gathered, so that the next pass gathers the new
        values."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.publish()  # what is gathered is no part of this rank's, and goes
        yield from super().tensors()

    @property
    def device(self) -> torch.device:
        return torch.device(self._mesh.device_type)

    def _gather(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        (whole,) = self._gather_together([name], dtype)
        return whole

    def fulls(self, names: Iterable[str], dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Yields whole tensors, see `Holder.fulls`; small ones travel together, up to `BUCKET_BYTES`."""
        for bucket in buckets(names, lambda name: self.held(name).numel() * (dtype or self.held(name).dtype).itemsize):
            for name, piece in zip(bucket, self._gather_together(bucket, dtype), strict=True):
                yield self._put_together(name, piece)

    def _gather_together(self, names: Sequence[str], dtype: torch.dtype | None) -> Iterator[torch.Tensor]:
        """Gathers several tensors by one exchange."""
        mesh = self._mesh
        held = [self.held(name).detach() for name in names]
        shards = [_local(one).to(mesh.device_type, dtype or one.dtype) for one in held]
        # replicas of the shards, if there are any, are the mesh's first dimension
        return gather_rows(shards, [one.shape for one in held], mesh.get_group(mesh.ndim - 1))

    @torch.no_grad()
    def _put(self, name: str, value: torch.Tensor) -> None:
        held = self.held(name)
        assert isinstance(held, DTensor)
        _local(held).copy_(_local(_divided(value.to(held.dtype), held)))

    def state_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | Parted:
        if self.in_host_memory and tensor.dim():
            return Parted(lambda: _whole(tensor), lambda: part_of(tensor))
        return super().state_of(name, tensor)

    def move(self, device: torch.device | str) -> None:
        if not self.in_host_memory:
            super().move(device)
