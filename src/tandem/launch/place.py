"""The place of a group of ranks among all ranks of a run on several machines, and the environment variables of a rank."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import psutil

from tandem.config.errors import ConfigError

PLACE = "TANDEM_PLACE"
"""Environment variable with the place of a group: a `Place` as JSON, or ``slurm``, which means Slurm's own variables."""

IFNAME = "GLOO_SOCKET_IFNAME"
INTERNET = (socket.AF_INET, socket.AF_INET6)

RENDEZVOUS, LAUNCHER, TELL, RESTARTS = "TANDEM_RENDEZVOUS", "TANDEM_LAUNCHER", "TANDEM_TELL", "TANDEM_RESTARTS"
"""Environment variables of a rank: the file through which ranks find each other, the process id of the launcher, which the
rank must not outlive, the descriptor of the pipe for its reports, and the number of restarts so far."""

MAX_HOSTS = 65_536
SCONTROL_S = 30.0


@dataclass(frozen=True)
class Place:
    """Ranks ``first`` to ``first + count - 1`` of ``world``, all on this machine.

    Example: with two machines of two ranks each, one group a machine, the second group has
    ``Place(2, 2, 4, 0, 2, "host0", 29500)``.
    """

    first: int
    count: int
    world: int
    local: int
    """Number of the group's first rank among the ranks of this machine."""

    here: int
    """Number of the run's ranks on this machine."""

    address: str
    """The host of rank 0, as the other ranks reach it."""

    port: int
    """A free port on that host. Rank 0 listens there for the other ranks."""

    def variables(self) -> dict[str, str]:
        """Returns the environment variable that tells a group its place: name → value."""
        return {PLACE: json.dumps(asdict(self))}

    def environment(self, index: int) -> dict[str, str]:
        """Returns the environment variables of rank ``index`` of this group, with torchrun's names."""
        return {
            "RANK": str(self.first + index),
            "LOCAL_RANK": str(self.local + index),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.here),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Returns the place that a launcher gave to this process, or None if this process starts all ranks of the run.

    Raises:
        ConfigError: the place is ``slurm``, but a variable of Slurm is missing.
    """
    value = environment.get(PLACE)
    if value is None:
        return None
    return slurm_place(environment) if value == "slurm" else Place(**json.loads(value))


def slurm_place(environment: Mapping[str, str]) -> Place:
    """Returns the place of one task of a Slurm step, which is one rank.

    Raises:
        ConfigError: a variable of Slurm is missing; the message names it.
    """
    try:
        rank, world = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        local, node = int(environment["SLURM_LOCALID"]), int(environment["SLURM_NODEID"])
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]
        host, port = first_host(environment["SLURM_JOB_NODELIST"]), int(environment["MASTER_PORT"])
    except KeyError as missing:
        raise ConfigError(f"{PLACE}=slurm, but {missing} is not set: srun has not started this process") from None
    tasks_by_node = [
        int(number) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))
    ]
    return Place(
        rank, 1, world, local, tasks_by_node[node], _reachable(host, environment.get("SLURM_LAUNCH_NODE_IPADDR")), port
    )


def _reachable(host: str, address: str | None) -> str:
    """Returns the host, or ``address`` if the host's name cannot be resolved, because Slurm's name of a node may not be in
    DNS."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return address or host
    return host


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's list of nodes, by ``scontrol show hostnames`` or, on nodes without scontrol, by
    `hostnames`."""
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    return hostnames(nodes)[0]


def hostnames(nodes: str) -> list[str]:
    """Expands Slurm's list of hosts, in its order.

    Example: ``hostnames("n[08-10,3],login")`` is ``["n08", "n09", "n10", "n3", "login"]``

    Raises:
        ConfigError: the text is not such a list, or has more than `MAX_HOSTS` hosts.
    """
    hosts: list[str] = []
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if not parts or ",".join(parts) != nodes:
        raise ConfigError(f"{nodes!r} is not a list of hosts such as n[01-04,7],login")
    for part in parts:
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        choices = [list(_numbers(piece, nodes)) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        if len(hosts) + math.prod(map(len, choices)) > MAX_HOSTS:
            raise ConfigError(f"the list of hosts {nodes!r} has more than {MAX_HOSTS} hosts")
        hosts += ["".join(words) for words in product(*choices)]
    return hosts


def _numbers(ranges: str, nodes: str) -> Iterator[str]:
    """Expands ranges: ``08-10,3`` gives ``08``, ``09``, ``10``, ``3``. Raises `ConfigError`, which names ``nodes``."""
    for text in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        low, high = (bounds[1], bounds[2] or bounds[1]) if bounds else ("1", "0")
        if not 0 <= int(high) - int(low) < MAX_HOSTS:
            raise ConfigError(f"{nodes!r} is not a list of hosts such as n[01-04,7],login: {text!r} is not a range")
        yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))


def interface_to(address: str, port: int) -> str | None:
    """Returns the network interface over which this machine reaches an address, or None if it cannot be determined."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            local_address = probe.getsockname()[0]
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    names = (name for name, addresses in interfaces if any(entry.address == local_address for entry in addresses))
    return next(names, None)


def free_port() -> int:
    """Returns a port of this machine that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, count: int, rendezvous: Path, place: Place | None = None) -> dict[str, str]:
    """Returns the environment variables of rank ``rank`` of a group of ``count`` ranks. ``place``: the group's place in the
    run; None if it is the only group."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    own = own if place is None else place.environment(rank)
    variables = own | {RENDEZVOUS: str(rendezvous), LAUNCHER: str(os.getpid())}
    # on one machine the loopback interface suffices, whatever the host name resolves to
    name = _interface() if place is None else os.environ.get(IFNAME) or interface_to(place.address, place.port)
    # hides messages of torch's stores
    quiet = {} if place is None else {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    return variables | quiet | ({IFNAME: name} if name else {})


def _interface() -> str:
    """Returns the network interface over which the ranks of one machine exchange CPU tensors."""
    return os.environ.get(IFNAME) or ("lo" if sys.platform == "linux" else "lo0")


def check_interface() -> None:
    """Checks that the network interface for the ranks has an address. Raises `ConfigError` if not."""
    reachable = [name for name, found in psutil.net_if_addrs().items() if any(one.family in INTERNET for one in found)]
    if not set(_interface().split(",")) & set(reachable):
        raise ConfigError(
            f"ranks exchange tensors over the network interface {_interface()}, which has no address here (there are: "
            f"{', '.join(reachable) or 'none'}). In a container without a network `ip link set lo up` gives lo one; "
            f"{IFNAME} names another interface; one rank (actor.backend=fsdp:d1) needs none"
        )
