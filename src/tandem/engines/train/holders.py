"""How a model and its float32 master weights lie over the processes.

`Replica`: one process has all of it. `Sharded`: FSDP2 gives each process a part. Both show the same: ``masters``, the
parameters that the optimizer moves, whose ``.grad`` is complete after the backward passes.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class Holder(ABC):
    """A model that computes in one dtype and is trained in float32."""

    model: nn.Module
    masters: dict[str, nn.Parameter]
    """Name in ``model`` → float32 parameter; tied ones once."""

    @abstractmethod
    def publish(self) -> None:
        """After the masters have changed: the model computes with their new values."""

    @abstractmethod
    def full(self, name: str) -> torch.Tensor:
        """The whole master, on the device; collective where it is sharded."""

    @abstractmethod
    def assign(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a master with the whole tensor ``value``; every rank calls it with the same value."""

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """After this block all masters are as before it, to the bit."""
        before = {name: master.detach().clone() for name, master in self.masters.items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.copy_(before[name])
            self.publish()

    def move(self, device: torch.device | str) -> None:
        """Moves model and masters."""
        self.model.to(device)

    def local_gradients(self) -> Iterator[torch.Tensor]:
        """This rank's part of every gradient there is."""
        for master in self.masters.values():
            if master.grad is not None:
                yield master.grad.to_local() if isinstance(master.grad, DTensor) else master.grad


class Replica(Holder):
    """All in one process.

    In float32 masters and model are the same tensors. In bfloat16 the model has rounded copies, made once a step; their
    gradients are added to the masters' in float32 as soon as each is complete.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model = model
        self._parameters = dict(model.named_parameters())
        self.masters = self._parameters
        if dtype != torch.float32:
            self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self._parameters.items()}
            for name, parameter in self._parameters.items():
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(self._collector(self.masters[name]))

    @staticmethod
    def _collector(master: nn.Parameter):
        def collect(parameter: torch.Tensor) -> None:
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return collect

    @torch.no_grad()
    def publish(self) -> None:
        if self.masters is not self._parameters:
            for name, parameter in self._parameters.items():
                parameter.copy_(self.masters[name])

    def full(self, name: str) -> torch.Tensor:
        return self.masters[name].detach()

    @torch.no_grad()
    def assign(self, name: str, value: torch.Tensor) -> None:
        self.masters[name].copy_(value)

    def move(self, device: torch.device | str) -> None:
        super().move(device)
        if self.masters is not self._parameters:
            for master in self.masters.values():
                master.data = master.data.to(device)


class Sharded(Holder):
    """FSDP2: each layer is gathered in the compute dtype when it is needed; gradients are reduced in float32."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList, dtype: torch.dtype, mesh: DeviceMesh):
        precision = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # temperatures stay float32
        )
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        # the embedding is also the head, or as large: keep it gathered between its two uses
        fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        self.model = model
        self.masters = dict(model.named_parameters())

    def publish(self) -> None:
        """Lets go of what a forward pass without a backward one left gathered: the next one gathers the new values."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full(self, name: str) -> torch.Tensor:
        return self.masters[name].detach().full_tensor()

    @torch.no_grad()
    def assign(self, name: str, value: torch.Tensor) -> None:
        master = self.masters[name]
        # src_data_rank=None: every rank cuts its own part out of the tensor that it has
        master.copy_(distribute_tensor(value.to(master), master.device_mesh, master.placements, src_data_rank=None))


def laid_out(whole: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A copy of a whole tensor, on the device of ``master`` and cut as it is; numbers without a shape are not cut."""
    value = whole.to(master.device, copy=True)
    if not isinstance(master, DTensor) or not whole.dim():
        return value
    return distribute_tensor(value, master.device_mesh, master.placements, src_data_rank=None)


def sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums in place; without a group there is one rank."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def group_and_mesh(
    group: dist.ProcessGroup | None, device: torch.device
) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
    """The group to communicate in and its mesh; None for a process alone."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return None, None
    if group is dist.group.WORLD:
        return group, init_device_mesh(device.type, (dist.get_world_size(),))
    return group, DeviceMesh.from_group(group, device.type)
