"""The ranks that train one model, and their groups by what they divide: batch, parameters, matrices, tokens."""

import atexit
import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.api.failures import ConfigError
from tandem.api.team import Team
from tandem.config.backend import Layout, parse_layout
from tandem.models.context_parallel import Context


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model, and the place of this rank among them.

    Rank ``((r·data + d)·context + c)·tensor + t`` has place (r, d, c, t): neighbours share matrices, because they
    communicate most.
    """

    layout: Layout
    group: dist.ProcessGroup | None = None
    """Process group of all these ranks; None for a single process."""

    rank: int = 0
    """This process's rank in ``group``."""

    shards: DeviceMesh | None = None
    """Mesh over which FSDP shards parameters, ``[shards]`` or ``[replicas, shards]``; None if each rank keeps its parameters
    whole."""

    tensor: dist.ProcessGroup | None = None
    """Group of the ranks that share matrices with this one; None if it shares them with nobody."""

    context: Context | None = None
    """Group of the ranks that share tokens with this one; None if it shares them with nobody."""

    key: str = "actor.backend"
    """The configuration key where the layout was written, for errors."""

    @property
    def team(self) -> Team:
        """The ranks as a team."""
        return Team.alone() if self.group is None else Team(self.group)

    @property
    def batch(self) -> int:
        """Index of this rank's micro-batch among those that are computed at the same time."""
        return self.rank // (self.layout.context * self.layout.tensor)

    @property
    def sums(self) -> int:
        """Number of ranks over which FSDP or DeepSpeed averages gradients; a step needs their sum, so it multiplies by
        this."""
        if self.layout.zero is not None:
            return self.layout.data
        return 1 if self.shards is None else self.layout.batches * self.layout.context

    @property
    def is_first_with_batch(self) -> bool:
        """True if this rank reports for all ranks that compute the same sequences."""
        return self.rank % (self.layout.context * self.layout.tensor) == 0

    @property
    def is_first_with_shard(self) -> bool:
        """True if this rank counts its part of an uncut parameter; other ranks may keep the same part."""
        return self.rank % self.layout.tensor == 0 and self.is_in_first_replica

    @property
    def is_in_first_replica(self) -> bool:
        """True if this rank counts its part of a cut parameter; other replicas keep the same part."""
        return self.rank < self.layout.ranks // self.layout.replicas


def form_ranks(backend: str, group: dist.ProcessGroup | None, device: torch.device, key: str = "actor.backend") -> Ranks:
    """Forms the ranks of ``backend``. Collective.

    Args:
        group: None takes the default group if torch.distributed is initialised, otherwise this process alone.
        key: the configuration key of ``backend``, for errors.

    Raises:
        ConfigError: the group has another number of ranks than the backend.
    """
    layout = parse_layout(backend, key)
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    there = 1 if group is None else dist.get_world_size(group)
    kind = "fsdp" if layout.zero is None else f"deepspeed:zero{layout.zero}"
    if there != layout.ranks:
        raise ConfigError(
            f"{key} is {backend!r}, which is {layout.ranks} rank(s), but {there} process(es) take part; "
            f"set it to {kind}:d{there}, or start as many processes as it says"
        )
    if group is None or there == 1:
        return Ranks(layout, key=key)
    rank = dist.get_rank(group)
    if layout.zero is None and layout.tensor == layout.context == layout.replicas == 1:
        whole = group is dist.group.WORLD
        line = init_device_mesh(device.type, (there,)) if whole else DeviceMesh.from_group(group, device.type)
        return Ranks(layout, group, rank, line, key=key)
    if group is not dist.group.WORLD:
        raise ConfigError(f"{key}={backend} needs all processes; a part of them can be fsdp:d{there}")
    if layout.zero is not None:
        return Ranks(layout, group, rank, key=key)
    sizes = (layout.replicas, layout.shards, layout.tensor)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replica", "shard", "tensor"))
    shards = None
    if layout.replicas > 1:
        shards = mesh["replica", "shard"]
    elif layout.shards > 1:
        shards = mesh["shard"]
    tensor = mesh["tensor"].get_group() if layout.tensor > 1 else None
    return Ranks(layout, group, rank, shards, tensor, _context(layout, rank), key)


def _context(layout: Layout, rank: int) -> Context | None:
    """The ranks that share this one's tokens. Every rank makes all groups, in the same order."""
    if layout.context == 1:
        return None
    found = None
    stride, block = layout.tensor, layout.tensor * layout.context
    for first, tensor in itertools.product(range(0, layout.ranks, block), range(layout.tensor)):
        members = [first + tensor + stride * i for i in range(layout.context)]
        group = dist.new_group(members)
        if rank in members:
            found = Context(group, members.index(rank), layout.context)
    return found


def sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums ``value`` over ``group`` in place. Without a group there is one rank, and nothing to do."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def form_group(device: torch.device) -> None:
    """Makes a process group of this process alone if there is none, for libraries that need one."""
    if not dist.is_initialized():
        kind = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave_group)


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
