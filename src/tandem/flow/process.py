"""Facts that are settled once a process, before tensors are made: threads, device, ranks, seeds, and which engine
generates."""

import atexit
import logging
import os
import random
import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TypeVar

import numpy
import torch
import torch.distributed

from tandem.api.activity import activity
from tandem.api.team import Team
from tandem.config.arithmetic import placement, rollout_here, trainer_ranks
from tandem.config.backend import parse_layout
from tandem.config.choose_backend import BackendMachine, choose_backend
from tandem.config.cores import usable_cores
from tandem.config.devices import DeviceMap, devices_of
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import FleetConfig, kinds_of, parse_backend
from tandem.config.load import Resolved
from tandem.config.machines import Machines, machines
from tandem.config.preference import DistillConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.state import RecoverConfig
from tandem.engines.inference.build import engine_threads, servers_here
from tandem.engines.inference.check import installed_servers
from tandem.engines.inference.fused_weights import compute_dtype
from tandem.engines.inference.kernels import kernels
from tandem.flow.other_machines import OtherMachines
from tandem.launch.rank import follow_launcher, has_launcher, meeting_place
from tandem.models import cpu_attention
from tandem.models.allocator import keep_freed_memory, return_freed_memory
from tandem.models.precision import resolve_dtype
from tandem.state.resuming import value_before
from tandem.state.run_folder import RunFolder, run_path

log = logging.getLogger(__name__)

BACKEND = "rollout.backend"
ON_GPUS = "cpu:gloo,cuda:nccl"
"""Objects and tensors of the CPU go over gloo: a rank that waits in an NCCL call keeps its GPU busy, on which a server may
generate meanwhile."""

C = TypeVar("C", bound=BaseConfig)


@dataclass(frozen=True)
class Process:
    """This process among those of the run."""

    device: str
    threads: int
    rank: int = 0
    world_size: int = 1
    shared_threads: int | None = None
    """CPU threads of all ranks of this machine together; None: there is no other."""

    team: Team = field(default_factory=Team)
    """All ranks of the run."""

    ranks_here: int = 1
    """Ranks of the run on this machine."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone logs and writes."""
        return self.rank == 0

    def generation_threads(self, placement: str, engines: int) -> int:
        """CPU threads for one of so many engines of the run: its part of those of all ranks, which wait for the engines
        (*colocate*), else those of this rank."""
        together = min(self.threads * self.world_size // engines, self.shared_threads or self.threads)
        return together if placement == "colocate" else self.threads


def training_threads(config: BaseConfig, threads: int) -> int:
    """CPU threads of training: all, but for those of engines that generate at the same time.

    More threads than cores would wait for each other at every matrix product.
    """
    if not isinstance(config, TrainConfig) or placement(config) == "colocate":
        return threads
    rollout = rollout_here(config)
    return max(1, threads - engine_threads(rollout, placement="decoupled", threads=threads) * servers_here(rollout))


def uses_gpu(device: str) -> bool:
    """True if `device`, which is `auto`, `cpu` or `cuda`, stands for a GPU here.

    Raises:
        ConfigError: `cuda` where there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU here; use device=cpu, or install a CUDA build of torch")
    return device != "cpu" and torch.cuda.is_available()


def choose_device(config: BaseConfig) -> str:
    """`cpu`, or this rank's GPU.

    Raises:
        ConfigError: `device=cuda` without a GPU, or more ranks on this machine than it has GPUs.
    """
    if not uses_gpu(config.device):
        return "cpu"
    ranks, there = parse_layout(config.actor.backend).ranks, torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if here > there:
        raise ConfigError(
            f"actor.backend={config.actor.backend} has {here} ranks on this machine, each with a GPU of its own, and torch "
            f"sees {there}; use fewer ranks, or device=cpu"
        )
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"


def devices_here(config: TrainConfig) -> DeviceMap | None:
    """The GPUs of this machine that ranks and servers of a run use; None on a CPU.

    Raises:
        ConfigError: they are too few, see `map_devices`.
    """
    if not uses_gpu(config.device):
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", parse_layout(config.actor.backend).ranks))
    return devices_of(rollout_here(config), placement(config), ranks=ranks, devices=torch.cuda.device_count())


def start_process(config: BaseConfig) -> Process:
    """Sets threads, seeds, the allocator and the process group (when started as one of several ranks).

    Raises:
        ConfigError: see `choose_device`; or `actor.backend` names another number of ranks than were started, or nobody is
            there to start them again.
    """
    if config.deterministic:  # before CUDA's first product: without it, cuBLAS may add in another order each time
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = choose_device(config)
    cuda = device != "cpu"
    if cuda and isinstance(config, TrainConfig) and config.rollout.weights.terms.on_gpu:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")  # its blocks have no CUDA handle
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    wanted = trainer_ranks(config)
    if wanted != world_size:
        raise ConfigError(
            f"actor.backend={config.actor.backend} wants {wanted} rank(s), but {world_size} was started; `tandem train` "
            f"starts them itself, a script of yours needs: torchrun --nproc-per-node {wanted} my_script.py …"
        )
    if config.recover.max_restarts and not has_launcher():
        raise ConfigError(
            f"recover.max_restarts={config.recover.max_restarts} is for a command that starts its ranks itself (tandem "
            "train, sft …); leave it out, and give it to the command that starts them: torchrun --max-restarts"
        )
    others: list[OtherMachines] = []
    follow_launcher(lambda: {**activity(), "spins": cuda, **(others[0].words() if others else {})})
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1 and not torch.distributed.is_initialized():
        # ranks wait for rank 0's batch: no collective may give up before the executor does
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
            "servers of rollout.backend are beside the first rank of each machine, and these machines have unlike numbers "
            "of ranks, or ranks that do not follow each other: start the same number "
            "on each machine, and the first machine's first"
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
    return_freed_memory(None)  # an earlier run of the process may have kept to a limit
    keep_freed_memory()
    random.seed(config.seed)
    numpy.random.seed(config.seed)
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(config.deterministic)
    together = max(threads, min(cores, threads * ranks_here))
    return Process(device, threads, rank, world_size, shared_threads=together, ranks_here=ranks_here)


def alike_machines(here: Machines) -> bool:
    """True if all machines have the same number of ranks, numbered machine by machine. Collective."""
    rank = int(os.environ.get("RANK", 0))
    in_order = rank % here.ranks == int(os.environ.get("LOCAL_RANK", rank))
    return set(Team().gather((here.ranks, in_order))) == {(here.ranks, True)}


# ------------------------------------------------------------------ rollout.backend=auto


def decided(resolved: Resolved[C], machine: BackendMachine | None = None) -> Resolved[C]:
    """The same configuration, its backend decided; the source of the key is the reason. ``machine``: another one than this.

    Raises:
        ConfigError: `device=cuda` where there is none; or nobody knows what the run that goes on began with.
    """
    config = resolved.config
    if not isinstance(config, (TrainConfig, DistillConfig)) or config.rollout.backend != "auto":
        return resolved
    before = value_before(run_path(config.run.root, config.experiment_name, config.trial_name), BACKEND)
    written = {key for key, source in resolved.sources.items() if source != "default"}
    choice = choose_backend(config, machine or machine_here(config), before, written)
    fleet = FleetConfig() if choice.backend == "embedded" else config.rollout.fleet
    rollout = replace(config.rollout, backend=choice.backend, fleet=fleet)
    return Resolved(replace(config, rollout=rollout), {**resolved.sources, BACKEND: f"auto: {choice.reason}"})


def machine_here(config: TrainConfig | DistillConfig) -> BackendMachine:
    """This machine, for a run. Servers are only looked for where there is a GPU.

    Raises:
        ConfigError: `device=cuda` where there is none.
    """
    if not uses_gpu(config.device):
        return BackendMachine()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", parse_layout(config.actor.backend).ranks))
    return BackendMachine(torch.cuda.device_count(), ranks, installed_servers(config.rollout), machines().count)


def backend_line(resolved: Resolved[TrainConfig | DistillConfig]) -> str:
    """The backend and its reason, in a line."""
    return f"{BACKEND}={resolved.config.rollout.backend} ({resolved.sources.get(BACKEND, 'default')})"


# ------------------------------------------------------------------ compiled kernels


def kernels_here(rollout: RolloutConfig, device: str) -> str | None:
    """``compiled`` or ``torch``: the kernels of our own engine on a CPU; None where there is no choice."""
    ours = kinds_of(rollout.backend, rollout.fleet) & {"embedded", "tandem"}
    if device != "cpu" or not ours:
        return None
    dtype = compute_dtype(resolve_dtype(rollout.dtype, device), torch.device(device))
    return "compiled" if kernels(dtype) is not None else "torch"


def training_kernels_here(config: BaseConfig, device: str) -> str | None:
    """``compiled`` or ``torch``: what the passes of training compute with on a CPU; None where there is no choice."""
    if device != "cpu":
        return None
    dtype = resolve_dtype(config.actor.dtype, device)
    return "compiled" if cpu_attention.kernel(dtype) is not None else "torch"


def keep_kernels(config: BaseConfig, process: Process, folder: RunFolder | None) -> None:
    """Writes down which kernels train, and which generate, on rank 0. A run that goes on with others is told so. Collective.

    Raises:
        ConfigError: it is deterministic, and would compute other numbers.
    """
    with process.team.together():
        if folder is None:
            return
        # A run that began before there were kernels for what it does has a `run.json` that does not name any.
        resumed = folder.info.get("resumed")
        goes_on = bool(resumed and resumed[-1]["was"] != "unknown" and any(folder.checkpoints.glob("step_*")))
        others = resumed[-1].get("versions") if resumed and config.deterministic else {}
        if others:
            told = ", ".join(f"{name} {pair}" for name, pair in others.items())
            log.warning(
                "the run goes on with other versions, which may round differently in spite of deterministic=true: %s", told
            )
        choices = {"training_kernels": ("trained", training_kernels_here(config, process.device))}
        if isinstance(config, TrainConfig):
            choices["kernels"] = "generated", kernels_here(config.rollout, process.device)
        for key, (has, now) in choices.items():
            if now is None or (before := folder.remember(key, "torch" if goes_on else now)) == now:
                continue
            remedy = (
                "set TANDEM_KERNELS=0" if before == "torch" else "install g++ (or set CXX), and leave TANDEM_KERNELS=0 out"
            )
            what = f"{folder.path} has {has} with {KERNELS[before]} so far, and would go on with {KERNELS[now]}"
            if config.deterministic:
                raise ConfigError(
                    f"{what}, which round differently: with deterministic=true that is refused. To go on as before, "
                    f"{remedy}; or begin another run with trial_name=…"
                )
            log.warning("%s, which round differently. To go on as before, %s", what, remedy)


KERNELS = {"compiled": "the compiled kernels", "torch": "torch's operators"}


def log_choice(resolved: Resolved[TrainConfig | DistillConfig], process: Process) -> None:
    """Writes the decision into the log of the run, whose folder is open, and on the terminal where there are GPUs."""
    log.info("%s", backend_line(resolved))
    if process.is_main and process.device != "cpu":
        print(backend_line(resolved), file=sys.stderr)
