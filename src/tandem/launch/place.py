"""The place of a group of ranks among all ranks of a run that spreads over machines, and how it is told to them."""

import json
import math
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product

import psutil

from tandem.config.errors import ConfigError

PLACE = "TANDEM_PLACE"
"""The variable that tells a group its place: a `Place` as JSON, or ``slurm``: read it from Slurm's variables."""

MAX_HOSTS = 65_536
SCONTROL_S = 30.0


@dataclass(frozen=True)
class Place:
    """Ranks ``first`` to ``first + count - 1`` of ``world``, all on this machine.

    Example: two machines with two ranks each, one group a machine: ``Place(2, 2, 4, 0, 2, "host0", 29500)`` is the second.
    """

    first: int
    count: int
    world: int
    local: int
    """Number of the first of them among the ranks of this machine."""

    here: int
    """Ranks of the run on this machine."""

    address: str
    """The host of rank 0, as the others reach it."""

    port: int
    """A free port there: rank 0 opens it, and all meet in it."""

    def told(self) -> dict[str, str]:
        """The environment of a group that is to take this place."""
        return {PLACE: json.dumps(asdict(self))}

    def environment(self, index: int) -> dict[str, str]:
        """The variables of the rank at ``index`` of this group, as torchrun names them."""
        return {
            "RANK": str(self.first + index),
            "LOCAL_RANK": str(self.local + index),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.here),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def place_of(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher gave to this process; None: it starts all ranks of the run.

    Raises:
        ConfigError: it names Slurm, and the variables of Slurm are not there.
    """
    told = environment.get(PLACE)
    if told is None:
        return None
    return slurm_place(environment) if told == "slurm" else Place(**json.loads(told))


def slurm_place(environment: Mapping[str, str]) -> Place:
    """The place of one task of a Slurm step, which is one rank.

    Raises:
        ConfigError: a variable of Slurm is missing; says which.
    """
    try:
        rank, world = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        local, node = int(environment["SLURM_LOCALID"]), int(environment["SLURM_NODEID"])
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment["SLURM_TASKS_PER_NODE"]
        host, port = first_host(environment["SLURM_JOB_NODELIST"]), int(environment["MASTER_PORT"])
    except KeyError as missing:
        raise ConfigError(f"{PLACE}=slurm, but {missing} is not set: this is no task of a step that srun started") from None
    here = [int(number) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))]
    return Place(rank, 1, world, local, here[node], _reachable(host, environment.get("SLURM_LAUNCH_NODE_IPADDR")), port)


def _reachable(host: str, address: str | None) -> str:
    """The host, or its address where no name service knows it: a node's name in Slurm need not be its name in DNS."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return address or host
    return host


def first_host(nodes: str) -> str:
    """The first host of Slurm's list of nodes, as ``scontrol show hostnames`` has it, which compute nodes may lack."""
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
        ConfigError: it is no such list, or has more than `MAX_HOSTS` hosts.
    """
    found: list[str] = []
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if not parts or ",".join(parts) != nodes:
        raise ConfigError(f"{nodes!r} is no list of hosts such as n[01-04,7],login")
    for part in parts:
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        choices = [list(_numbers(piece, nodes)) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        if len(found) + math.prod(map(len, choices)) > MAX_HOSTS:
            raise ConfigError(f"the list of hosts {nodes!r} has more than {MAX_HOSTS} hosts")
        found += ["".join(words) for words in product(*choices)]
    return found


def _numbers(ranges: str, nodes: str) -> Iterator[str]:
    """``08-10,3`` → ``08``, ``09``, ``10``, ``3``."""
    for one in ranges.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", one)
        low, high = (bounds[1], bounds[2] or bounds[1]) if bounds else ("1", "0")
        if not 0 <= int(high) - int(low) < MAX_HOSTS:
            raise ConfigError(f"{nodes!r} is no list of hosts such as n[01-04,7],login: {one!r} is no range")
        yield from (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))


def interface_to(address: str, port: int) -> str | None:
    """The network interface over which this machine reaches an address; None if nobody knows."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(target)  # sends nothing
            own = asking.getsockname()[0]
    except OSError:
        return None
    names = (name for name, found in psutil.net_if_addrs().items() if any(one.address == own for one in found))
    return next(names, None)


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])
