"""The devices of a run: GPUs and cores of a machine, and the machines of the run.

GPUs are numbered as torch numbers them: from 0, among those that are visible to the process (``CUDA_VISIBLE_DEVICES``).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tandem.config.errors import ConfigError
from tandem.config.fleet import TENSOR, Servers, numbered, parse_backend
from tandem.config.rollout import RolloutConfig

ALONE, TOGETHER = 0.9, 0.4
"""Default shares of a device's memory for a server or the embedded engine: on its own device, and on one that it shares with
training."""


@dataclass(frozen=True)
class Seat:
    """One process and its devices."""

    name: str
    """Name of the process, ``rank 0`` or ``vllm-0``."""

    devices: tuple[int, ...]
    memory_share: float | None = None
    """Share of each device's memory that a server may use; None: its own settings decide, such as
    `rollout.engine.kv_cache_gib`."""

    def words(self) -> str:
        """Returns the name, with the number of devices and the share of memory if they are not the usual ones."""
        several = [f"one of its {len(self.devices)} GPUs"] if len(self.devices) > 1 else []
        share = [f"{self.memory_share:.0%} of the memory"] if self.memory_share is not None else []
        return self.name + (f" ({', '.join([*several, *share])})" if several or share else "")


@dataclass(frozen=True)
class DeviceMap:
    """All processes of a run on one machine."""

    ranks: tuple[Seat, ...]
    servers: tuple[Seat, ...]

    def server(self, name: str) -> Seat:
        """Returns the seat of a server by its name. Raises `KeyError` if there is none."""
        return {seat.name: seat for seat in self.servers}[name]


def map_devices(
    servers: Sequence[Servers],
    *,
    ranks: int,
    devices: int,
    placement: Literal["colocate", "decoupled"],
    memory_share: float | None = None,
) -> DeviceMap:
    """Assigns the devices of this machine. Rank ``i`` trains on device ``i``. Servers get consecutive devices, in order:
    with `decoupled` those after the ranks, with `colocate` those of the ranks. Without ranks (an evaluation) they begin at
    0.

    ``ranks``, ``devices``: their numbers on this machine.

    Raises:
        ConfigError: there are too few devices; the message says how many are needed for what.
    """
    if ranks > devices:
        raise ConfigError(f"{ranks} ranks of training need {ranks} GPUs on this machine, and there are {devices}")
    wanted = sum(kind.devices for kind in servers)
    shared = placement == "colocate" and ranks > 0
    first, room = (0, ranks) if shared else (ranks, devices - ranks)
    if wanted > room:
        raise ConfigError(_too_many(servers, wanted, ranks, devices, shared=shared))
    seats: list[Seat] = []
    for name, server in numbered(servers):
        share = (memory_share or (TOGETHER if shared else ALONE)) if server.kind in TENSOR else None
        seats.append(Seat(name, tuple(range(first, first + server.tensor)), share))
        first += server.tensor
    return DeviceMap(tuple(Seat(f"rank {rank}", (rank,)) for rank in range(ranks)), tuple(seats))


def devices_of(
    rollout: RolloutConfig, placement: Literal["colocate", "decoupled"], *, ranks: int, devices: int
) -> DeviceMap:
    """Calls `map_devices` for a configuration. The embedded engine has no seat with `colocate`. With `decoupled` it is
    ``embedded-0``, on the device after the ranks, or on the first device if none is left.
    """
    servers = parse_backend(rollout.backend)
    if servers is not None or placement == "colocate" or devices > ranks:
        started = servers if servers is not None else (Servers("embedded", 1),) if placement == "decoupled" else ()
        share = rollout.fleet.memory_share
        return map_devices(started, ranks=ranks, devices=devices, placement=placement, memory_share=share)
    alone = map_devices((), ranks=ranks, devices=devices, placement=placement)
    return replace(alone, servers=(Seat("embedded-0", (0,)),))


def share_of(devices: DeviceMap, server: str | None) -> float:
    """Returns the default share of its device's memory for an embedded engine. ``server``: name of its seat; None: it runs
    inside the first rank."""
    training = {device for rank in devices.ranks for device in rank.devices}
    engine = devices.server(server).devices if server is not None else (0,)
    return TOGETHER if training & set(engine) else ALONE


def _too_many(servers: Sequence[Servers], wanted: int, ranks: int, devices: int, *, shared: bool) -> str:
    each = " + ".join(f"{kind.count} × {kind.tensor} ({kind})" for kind in servers)
    if shared:
        return (
            f"placement=colocate: servers need {each} = {wanted} GPUs, one server on each, and training has {ranks} on "
            f"this machine; use fewer servers, more ranks (actor.backend), or placement=decoupled with {ranks + wanted} GPUs"
        )
    beside = f"training has {ranks} of the {devices} GPUs" if ranks else f"there are {devices}"
    return (
        f"servers need {each} = {wanted} GPUs of their own, and {beside} on this machine, so {devices - ranks} are left; "
        "use fewer servers or ranks" + (", or placement=colocate, where they share the ranks' devices" if ranks else "")
    )


def visible(devices: Sequence[int], environment: Mapping[str, str]) -> str:
    """Returns ``CUDA_VISIBLE_DEVICES`` for a process that may see only ``devices``, with their names (numbers or UUIDs) in
    the same variable of ``environment``.

    Raises:
        ConfigError: the variable in ``environment`` has too few devices.
    """
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not names:
        return ",".join(map(str, devices))
    if max(devices) >= len(names):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={','.join(names)} names no device for number {max(devices)}")
    return ",".join(names[device] for device in devices)


MACHINE = "machine-"
"""Prefix of the names of folders in the run folder for servers of machines other than the first."""


@dataclass(frozen=True)
class Machines:
    """This machine's number among the machines of the run. All have equally many ranks, numbered machine by machine."""

    number: int = 0
    count: int = 1
    ranks: int = 1
    """Number of ranks on each machine."""

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first rank of each machine."""
        return tuple(range(0, self.count * self.ranks, self.ranks))

    @property
    def folder(self) -> str:
        """Folder, in the run folder, for the files of this machine's servers; empty on the first machine."""
        return f"{MACHINE}{self.number}" if self.number else ""


def machines() -> Machines:
    """Returns this machine's number, from the environment variables of a launcher or torchrun; without them it is the only
    machine."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return Machines(int(os.environ.get("RANK", 0)) // local, max(1, world // local), local)


def usable_cores() -> int:
    """Returns the number of cores that this process may use; in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
