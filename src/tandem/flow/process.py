"""Sets up the process before tensors are made: threads, device, ranks, seeds, inference backend; watches other machines.

Also forms teams of ranks, and lets all ranks of a run use a model that is on only some of them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed
import torch.distributed as dist
from torch.distributed import TCPStore

from tandem.api.activity import activity
from tandem.api.engines import LossFn, Outputs, TrainEngine, TrainPart
from tandem.api.lazy_torch import TensorDict
from tandem.api.team import Team
from tandem.config.allocation import BackendMachine, choose_backend
from tandem.config.arithmetic import folder_of, placement, rollout_here, trainer_ranks
from tandem.config.devices import DeviceMap, Machines, devices_of, machines, usable_cores
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, RecoverConfig, TrainConfig
from tandem.config.fleet import FleetConfig, kinds_of, parse_backend
from tandem.config.load import Resolved
from tandem.config.preference import DistillConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.train_engine import parse_layout
from tandem.engines.inference.check import engine_threads, installed_servers, servers_here
from tandem.engines.inference.decoder import compute_dtype
from tandem.engines.inference.kernels import kernels
from tandem.launch.rank import follow_launcher, has_launcher, meeting_place
from tandem.models import cpu_attention
from tandem.models.allocator import keep_freed_memory, return_freed_memory
from tandem.models.hardware import choose_device, resolve_dtype, uses_gpu
from tandem.state.resuming import value_before
from tandem.state.run_folder import RunFolder

log = logging.getLogger(__name__)

LOGGED_AFTER_S = 15.0
"""Seconds of silence after which another machine is reported in the log."""

EVERY_S, JOIN_S = 1.0, 2.0

CONNECT = timedelta(seconds=10)

LEFT = 2**40
"""A count of at least this value says that the machine has shut down normally."""


class OtherMachines:
    """Detects silent machines. On the first rank of each machine, a thread keeps incrementing a counter in the store."""

    def __init__(
        self,
        here: Machines,
        host: str,
        port: int,
        patience_s: float | None,
        *,
        logged_after_s: float = LOGGED_AFTER_S,
        every_s: float = EVERY_S,
    ):
        """``host``, ``port``: of the store. ``patience_s``: longest silence of a machine in seconds; None: no limit."""
        self._patience_s, self._logged_after_s, self._every_s = patience_s, logged_after_s, every_s
        now = time.monotonic()
        self._heard = {number: now for number in range(here.count) if number != here.number}
        self._silent: set[int] = set()
        self._end = threading.Event()
        arguments = (here.number, host, port)
        self._thread = threading.Thread(target=self._count, args=arguments, name="other-machines", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def words(self) -> Mapping[str, str]:
        """Returns {"cut_off": message} if a machine has been silent for too long, so that the launcher ends the run; else
        {}."""
        for number, heard in self._heard.items():
            silent_s = time.monotonic() - heard
            text = f"machine {number} has been silent for {silent_s:.0f} s: it is down, or its network is cut off"
            if self._patience_s is not None and silent_s > self._patience_s:
                return {"cut_off": f"{text} (recover.cut_off_after_s)"}
            if (silent_s > self._logged_after_s) != (number in self._silent):
                self._silent ^= {number}
                log.warning("%s", text if number in self._silent else f"machine {number} answers again")
        return {}

    def close(self) -> None:
        """Tells the other machines that this one shuts down normally, so that they do not report it as silent."""
        self._end.set()
        self._thread.join(JOIN_S)

    def _count(self, number: int, host: str, port: int) -> None:
        seen: dict[int, int] = {}
        while not self._end.is_set():
            with contextlib.suppress(RuntimeError):  # the connection broke, or rank 0 and its store have ended
                store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
                while not self._end.wait(self._every_s):
                    store.add(f"machine-{number}", 1)
                    for other in self._heard:
                        count = store.add(f"machine-{other}", 0)
                        if count != seen.get(other):
                            seen[other] = count
                            self._heard[other] = float("inf") if count >= LEFT else time.monotonic()
                store.add(f"machine-{number}", LEFT)
            self._end.wait(self._every_s)


BACKEND = "rollout.backend"

ON_GPUS = "cpu:gloo,cuda:nccl"
"""Backends of ``torch.distributed`` on GPUs. Python objects and CPU tensors are sent over gloo: a rank that waits in an NCCL
call keeps its GPU busy, and a server may be generating on this GPU meanwhile."""

C = TypeVar("C", bound=BaseConfig)


@dataclass(frozen=True)
class Process:
    """The place of this process in the run: device, threads and rank."""

    device: str
    threads: int
    rank: int = 0
    world_size: int = 1
    shared_threads: int | None = None
    """CPU threads of all ranks of this machine together; None: this process is alone."""

    team: Team = field(default_factory=Team)
    """All ranks of the run."""

    ranks_here: int = 1
    """Ranks of the run on this machine."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only rank that logs and writes."""
        return self.rank == 0

    def generation_threads(self, placement: str, engines: int) -> int:
        """Returns the CPU threads for each of the run's ``engines``: with *colocate* an equal share of the threads of all
        ranks, which wait while engines generate; otherwise the threads of this rank."""
        together = min(self.threads * self.world_size // engines, self.shared_threads or self.threads)
        return together if placement == "colocate" else self.threads


def training_threads(config: BaseConfig, threads: int) -> int:
    """Returns the CPU threads for training: ``threads`` less those of engines that generate at the same time.

    More threads than cores would wait for each other at every matrix product.
    """
    if not isinstance(config, TrainConfig) or placement(config) == "colocate":
        return threads
    rollout = rollout_here(config)
    return max(1, threads - engine_threads(rollout, placement="decoupled", threads=threads) * servers_here(rollout))


def devices_here(config: TrainConfig) -> DeviceMap | None:
    """Assigns the GPUs of this machine to the ranks and servers of a run; None on a CPU.

    Raises:
        ConfigError: there are too few GPUs, see `map_devices`.
    """
    if not uses_gpu(config.device):
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", parse_layout(config.actor.backend).ranks))
    return devices_of(rollout_here(config), placement(config), ranks=ranks, devices=torch.cuda.device_count())


def start_process(config: BaseConfig) -> Process:
    """Sets threads, seeds, the allocator and the process group (if this is one of several ranks).

    Raises:
        ConfigError: see `choose_device`; `actor.backend` names another number of ranks than were started; or
            `recover.max_restarts` is set, and no launcher of Tandem started this process.
    """
    if config.deterministic:  # before the first CUDA matmul; otherwise cuBLAS may sum in another order each time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = choose_device(config.device, config.actor.backend)
    cuda = device != "cpu"
    if cuda and isinstance(config, TrainConfig) and config.rollout.weights.terms.on_gpu:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")  # they have no CUDA IPC handle
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    ranks = trainer_ranks(config)
    if ranks != world_size:
        raise ConfigError(
            f"actor.backend={config.actor.backend} wants {ranks} rank(s), but {world_size} was started; `tandem train` "
            f"starts them itself, a script of yours needs: torchrun --nproc-per-node {ranks} my_script.py …"
        )
    if config.recover.max_restarts and not has_launcher():
        raise ConfigError(
            f"recover.max_restarts={config.recover.max_restarts} is for a command that starts its ranks itself (tandem "
            "train, sft …); leave it out, and use the option of the command that starts the ranks: torchrun --max-restarts"
        )
    others: list[OtherMachines] = []
    follow_launcher(lambda: {**activity(), "spins": cuda, **(others[0].words() if others else {})})
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1 and not torch.distributed.is_initialized():
        # ranks wait for rank 0's batch, so a collective must not time out before the executor does
        patience = timedelta(seconds=getattr(getattr(config, "rollout", None), "wait_timeout_s", 3600.0) + 600)
        torch.distributed.init_process_group(
            ON_GPUS if cuda else "gloo",
            init_method=meeting_place(),
            rank=rank,
            world_size=world_size,
            timeout=patience,
        )
        atexit.register(torch.distributed.destroy_process_group)
    here, cut_off_s = machines(), config.recover.cut_off_after_s
    alike = alike_machines(here)
    if isinstance(config, TrainConfig) and parse_backend(config.rollout.backend) and not alike:
        raise ConfigError(
            "servers of rollout.backend are beside the first rank of each machine, and these machines have different "
            "numbers of ranks, or ranks that are not numbered machine by machine: start the same number of ranks on each "
            "machine, beginning with rank 0 on the first machine"
        )
    if cut_off_s != RecoverConfig().cut_off_after_s and not (has_launcher() and alike and here.count > 1):
        raise ConfigError(
            f"recover.cut_off_after_s={cut_off_s} is for several machines of `tandem launch`, all with the same number "
            "of ranks; leave it out"
        )
    if has_launcher() and alike and here.count > 1 and rank in here.firsts:
        store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        others.append(OtherMachines(here, *store, cut_off_s))
    cores = usable_cores()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = config.threads or max(1, cores // ranks_here)
    torch.set_num_threads(training_threads(config, threads) if not cuda else threads)
    return_freed_memory(None)  # an earlier run of this process may have set a limit
    keep_freed_memory()
    random.seed(config.seed)
    numpy.random.seed(config.seed)
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(config.deterministic)
    together = max(threads, min(cores, threads * ranks_here))
    return Process(device, threads, rank, world_size, shared_threads=together, ranks_here=ranks_here)


def alike_machines(here: Machines) -> bool:
    """Tells whether all machines have the same number of ranks, numbered machine by machine. Collective."""
    rank = int(os.environ.get("RANK", 0))
    in_order = rank % here.ranks == int(os.environ.get("LOCAL_RANK", rank))
    return set(Team().gather((here.ranks, in_order))) == {(here.ranks, True)}


# ------------------------------------------------------------------ rollout.backend=auto


def decided(resolved: Resolved[C], machine: BackendMachine | None = None) -> Resolved[C]:
    """Replaces `rollout.backend=auto` by the chosen backend, and gives the reason as the key's source. ``machine``: the
    machine to choose for; None: this one.

    Raises:
        ConfigError: `device=cuda` without a GPU; or the run is resumed, and its earlier backend is unknown.
    """
    config = resolved.config
    if not isinstance(config, (TrainConfig, DistillConfig)) or config.rollout.backend != "auto":
        return resolved
    before = value_before(folder_of(config), BACKEND)
    written = {key for key, source in resolved.sources.items() if source != "default"}
    choice = choose_backend(config, machine or machine_here(config), before, written)
    fleet = FleetConfig() if choice.backend == "embedded" else config.rollout.fleet
    rollout = replace(config.rollout, backend=choice.backend, fleet=fleet)
    return Resolved(replace(config, rollout=rollout), {**resolved.sources, BACKEND: f"auto: {choice.reason}"})


def machine_here(config: TrainConfig | DistillConfig) -> BackendMachine:
    """Describes this machine for the choice of a backend. Installed servers are looked for only if there is a GPU.

    Raises:
        ConfigError: `device=cuda` without a GPU.
    """
    if not uses_gpu(config.device):
        return BackendMachine()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", parse_layout(config.actor.backend).ranks))
    return BackendMachine(torch.cuda.device_count(), ranks, installed_servers(config.rollout), machines().count)


def backend_line(resolved: Resolved[TrainConfig | DistillConfig]) -> str:
    """Returns one line with the backend and the reason for it."""
    return f"{BACKEND}={resolved.config.rollout.backend} ({resolved.sources.get(BACKEND, 'default')})"


# ------------------------------------------------------------------ compiled kernels


def kernels_here(rollout: RolloutConfig, device: str) -> str | None:
    """Returns the kernels of Tandem's engine on a CPU, ``compiled`` or ``torch``; None on a GPU or with another engine."""
    own_engines = kinds_of(rollout.backend, rollout.fleet) & {"embedded", "tandem"}
    if device != "cpu" or not own_engines:
        return None
    dtype = compute_dtype(resolve_dtype(rollout.dtype, device), torch.device(device))
    return "compiled" if kernels(dtype) is not None else "torch"


def training_kernels_here(config: BaseConfig, device: str) -> str | None:
    """Returns the kernels of training on a CPU, ``compiled`` or ``torch``; None on a GPU."""
    if device != "cpu":
        return None
    dtype = resolve_dtype(config.actor.dtype, device)
    return "compiled" if cpu_attention.kernel(dtype) is not None else "torch"


def keep_kernels(config: BaseConfig, process: Process, folder: RunFolder | None) -> None:
    """Records in the run folder which kernels train and generate, on rank 0. Warns if a resumed run would use other kernels
    than before. Collective.

    Raises:
        ConfigError: a deterministic run would use other kernels, which round differently.
    """
    with process.team.together():
        if folder is None:
            return
        # The `run.json` of an older run may not name kernels; such a run used torch's operators.
        resumed = folder.info.get("resumed")
        goes_on = bool(resumed and resumed[-1]["was"] != "unknown" and any(folder.checkpoints.glob("step_*")))
        others = resumed[-1].get("versions") if resumed and config.deterministic else {}
        if others:
            changes = ", ".join(f"{name} {pair}" for name, pair in others.items())
            log.warning(
                "the run goes on with other versions, which may round differently despite deterministic=true: %s", changes
            )
        choices = {"training_kernels": ("trained", training_kernels_here(config, process.device))}
        if isinstance(config, TrainConfig):
            choices["kernels"] = "generated", kernels_here(config.rollout, process.device)
        for key, (verb, present) in choices.items():
            if present is None or (before := folder.remember(key, "torch" if goes_on else present)) == present:
                continue
            remedy = (
                "set TANDEM_KERNELS=0" if before == "torch" else "install g++ (or set CXX), and leave TANDEM_KERNELS=0 out"
            )
            change = f"{folder.path} has {verb} with {KERNELS[before]} so far, and would go on with {KERNELS[present]}"
            if config.deterministic:
                raise ConfigError(
                    f"{change}, which round differently: with deterministic=true that is refused. To go on as before, "
                    f"{remedy}; or begin another run with trial_name=…"
                )
            log.warning("%s, which round differently. To go on as before, %s", change, remedy)


KERNELS = {"compiled": "the compiled kernels", "torch": "torch's operators"}


def log_choice(resolved: Resolved[TrainConfig | DistillConfig], process: Process) -> None:
    """Writes the choice of the backend to the run's log, whose folder must be open; on a GPU also to the terminal."""
    log.info("%s", backend_line(resolved))
    if process.is_main and process.device != "cpu":
        print(backend_line(resolved), file=sys.stderr)


T = TypeVar("T")


def form_team(ranks: Sequence[int], everyone: Team) -> Team:
    """Returns the team of these ranks; its main rank is the lowest. Collective over ``everyone``, all ranks of the run."""
    chosen = tuple(sorted(set(ranks)))
    assert chosen and chosen[0] >= 0 and chosen[-1] < everyone.size, f"ranks {chosen} of {everyone.size}"
    if len(chosen) == everyone.size:
        return everyone
    if chosen not in everyone.parts:
        everyone.parts[chosen] = Team(dist.new_group(list(chosen)))
    return everyone.parts[chosen]


def form_generators(ranks: Sequence[int], everyone: Team, patience_s: float) -> Team | None:
    """Forms a separate team of the generating ranks, so that their messages do not mix with those of training; None if only
    one rank generates. ``patience_s``: longest time for a batch, in seconds; messages between these ranks time out 600 s
    later. Collective over ``everyone``."""
    if len(ranks) == 1 or everyone.size == 1:
        return None
    return Team(dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=patience_s + 600)))


class TeamEngine(TrainEngine):
    """The engine of a model that is on some of the ranks, usable on all: its ranks compute, and every rank gets the result.

    Roles and scripts call it on all ranks, as they call a model that is on all ranks. Every rank raises any rank's failure.
    """

    def __init__(self, engine: TrainEngine | None, everyone: Team, first: int = 0):
        """``engine``: the model's engine; None on ranks without it. ``first``: its lowest rank. ``everyone``: all ranks."""
        self.engine, self._everyone, self._first = engine, everyone, first

    def _everywhere(self, compute: Callable[[TrainEngine], T]) -> T:
        """Computes on the ranks of the model, which all get the same result, and sends it from the first to all ranks."""
        result: Any = None
        with self._everyone.together():
            if self.engine is not None:
                result = compute(self.engine)
        return self._everyone.share(lambda: result, self._first)

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """Implements `TrainEngine.train_batch`."""
        return self._everywhere(lambda engine: engine.train_batch(batch, loss_fn, entropy=entropy))

    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """Implements `TrainEngine.eval_batch`."""
        return self._everywhere(lambda engine: engine.eval_batch(batch, loss_fn, entropy=entropy))

    def forward(self, batch: TensorDict, *, entropy: bool = False) -> Outputs:
        """Implements `TrainEngine.forward`."""

        def compute(engine: TrainEngine) -> TensorDict:
            outputs = engine.forward(batch, entropy=entropy)._asdict().items()
            return TensorDict({name: column for name, column in outputs if column is not None and column.numel()})

        columns, device = self._everywhere(compute), batch["input_ids"].device
        outputs = {name: columns[name].to(device) for name in Outputs._fields if name in columns.keys()}
        return Outputs(**{"logprobs": torch.zeros(0, device=device)} | outputs)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Implements `TrainEngine.weights`; a rank without the model gets no tensors."""
        return iter(()) if self.engine is None else self.engine.weights(dtype)

    def save(self, folder: Path) -> None:
        """Implements `TrainEngine.save`."""
        self._everywhere(lambda engine: engine.save(folder))

    def load(self, folder: Path) -> None:
        """Implements `TrainEngine.load`."""
        self._everywhere(lambda engine: engine.load(folder))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Implements `TrainEngine.load_weights`; every rank reads the stream, because producing it may be collective."""
        with self._reading(weights) as stream:
            if self.engine is not None:
                self.engine.load_weights(stream)

    @contextlib.contextmanager
    def using(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Implements `TrainEngine.using`."""
        with contextlib.ExitStack() as stack:
            with self._reading(weights) as stream:
                if self.engine is not None:
                    stack.enter_context(self.engine.using(stream))
            yield

    @contextlib.contextmanager
    def _reading(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Yields the stream of weights to a block. Whatever the block leaves unread is read afterwards, on every rank."""
        with self._everyone.together(), self._everyone.whole(weights) as stream:
            yield stream
            for _ in stream:
                pass

    def state_dict(self) -> dict[str, Any]:
        """Implements `TrainEngine.state_dict`; empty on a rank without the model."""
        return {} if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `TrainEngine.load_state_dict`."""
        if self.engine is not None:
            self.engine.load_state_dict(state)

    def late_writer(self, state: Mapping[str, Any]) -> Callable[[Path], None] | None:
        """Implements `TrainEngine.late_writer`, on the first rank of the model."""
        return None if self.engine is None else self.engine.late_writer(state)

    def offload(self, parts: tuple[TrainPart, ...], scratch: Path | None = None) -> int:
        """Implements `TrainEngine.offload`."""
        return 0 if self.engine is None else self.engine.offload(parts, scratch)

    def onload(self, parts: tuple[TrainPart, ...]) -> int:
        """Implements `TrainEngine.onload`."""
        return 0 if self.engine is None else self.engine.onload(parts)

    def num_bytes(self) -> dict[TrainPart, int]:
        """Implements `TrainEngine.num_bytes`."""
        return {} if self.engine is None else self.engine.num_bytes()
