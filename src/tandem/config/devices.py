"""The GPUs of a machine that training ranks and inference servers use.

Devices are counted as torch counts them, from 0, among those that the process may see (``CUDA_VISIBLE_DEVICES``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tandem.config.errors import ConfigError
from tandem.config.fleet import TENSOR, Servers, numbered, parse_backend
from tandem.config.rollout import RolloutConfig

ALONE, TOGETHER = 0.9, 0.4
"""Default share of a device's memory that a server or the embedded engine takes: of a device of its own, and of one that it
shares with training."""


@dataclass(frozen=True)
class Seat:
    """One process and its devices."""

    name: str
    """``rank 0``, or ``vllm-0``."""

    devices: tuple[int, ...]
    memory_share: float | None = None
    """Part of each device's memory that a server may take; None: it takes what its settings say, such as
    `rollout.engine.kv_cache_gib`."""

    def words(self) -> str:
        """Its name, and what it takes of each of its devices."""
        several = [f"one of its {len(self.devices)} GPUs"] if len(self.devices) > 1 else []
        share = [f"{self.memory_share:.0%} of the memory"] if self.memory_share is not None else []
        return self.name + (f" ({', '.join([*several, *share])})" if several or share else "")


@dataclass(frozen=True)
class DeviceMap:
    """All processes of a run on one machine."""

    ranks: tuple[Seat, ...]
    servers: tuple[Seat, ...]

    def server(self, name: str) -> Seat:
        """Raises `KeyError` for one that is not there."""
        return {seat.name: seat for seat in self.servers}[name]


def map_devices(
    servers: Sequence[Servers],
    *,
    ranks: int,
    devices: int,
    placement: Literal["colocate", "decoupled"],
    memory_share: float | None = None,
) -> DeviceMap:
    """Rank ``i`` trains on device ``i``. Servers follow in order, each on neighbouring devices: behind the ranks if the
    placement is decoupled, on the ranks' own devices if it is colocate. Without ranks (an evaluation) they begin at 0.

    ``ranks`` and ``devices`` are those of this machine.

    Raises:
        ConfigError: more devices are wanted than there are; says how many by whom.
    """
    if ranks > devices:
        raise ConfigError(f"{ranks} ranks of training need {ranks} GPUs on this machine, and there are {devices}")
    wanted = sum(one.devices for one in servers)
    shared = placement == "colocate" and ranks > 0
    first, room = (0, ranks) if shared else (ranks, devices - ranks)
    if wanted > room:
        raise ConfigError(_too_many(servers, wanted, ranks, devices, shared=shared))
    seats: list[Seat] = []
    for name, one in numbered(servers):
        share = (memory_share or (TOGETHER if shared else ALONE)) if one.kind in TENSOR else None
        seats.append(Seat(name, tuple(range(first, first + one.tensor)), share))
        first += one.tensor
    return DeviceMap(tuple(Seat(f"rank {rank}", (rank,)) for rank in range(ranks)), tuple(seats))


def devices_of(
    rollout: RolloutConfig, placement: Literal["colocate", "decoupled"], *, ranks: int, devices: int
) -> DeviceMap:
    """Reads a configuration for `map_devices`. The one engine inside the run has no seat of its own if the
    placement is colocate; if it is decoupled it is ``embedded-0``, behind the ranks, or on the first device if none is left.
    """
    servers = parse_backend(rollout.backend)
    if servers is not None or placement == "colocate" or devices > ranks:
        given = servers if servers is not None else (Servers("embedded", 1),) if placement == "decoupled" else ()
        share = rollout.fleet.memory_share
        return map_devices(given, ranks=ranks, devices=devices, placement=placement, memory_share=share)
    alone = map_devices((), ranks=ranks, devices=devices, placement=placement)
    return replace(alone, servers=(Seat("embedded-0", (0,)),))


def share_of(devices: DeviceMap, server: str | None) -> float:
    """Default share of its device's memory for an embedded engine, by its seat; without one it is inside the first rank."""
    training = {device for rank in devices.ranks for device in rank.devices}
    own = devices.server(server).devices if server is not None else (0,)
    return TOGETHER if training & set(own) else ALONE


def _too_many(servers: Sequence[Servers], wanted: int, ranks: int, devices: int, *, shared: bool) -> str:
    each = " + ".join(f"{one.count} × {one.tensor} ({one})" for one in servers)
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
    """``CUDA_VISIBLE_DEVICES`` of a process that is to see only these, named as ``environment`` names them: they may be
    numbers or UUIDs.

    Raises:
        ConfigError: the environment names fewer.
    """
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not names:
        return ",".join(map(str, devices))
    if max(devices) >= len(names):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={','.join(names)} names no device for number {max(devices)}")
    return ",".join(names[device] for device in devices)
