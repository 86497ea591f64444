"""The ranks that train one model, their groups, and the model spread over them.

A model that cannot be trained here is refused by its configuration, before weights are read.

`Totals` are the metrics of a step, summed over micro-batches and ranks.
"""

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig

from tandem.api.activity import did
from tandem.api.team import Team
from tandem.api.weights import is_complete
from tandem.config.errors import ConfigError
from tandem.config.train_engine import Layout, TrainEngineConfig, layout_problems, parse_layout
from tandem.engines.train.holders import Holder, Replica, Sharded, form_group
from tandem.engines.train.zero import ZeroHolder, import_deepspeed
from tandem.models.architecture import Architecture
from tandem.models.catalog import AdapterBeside, resolve
from tandem.models.context_parallel import Context, divides_heads, refuse_uneven_heads
from tandem.models.foreign import read_hf_config
from tandem.models.load import (
    PREFIX,
    ClassLabel,
    Unfilled,
    is_token_classifier,
    load_causal_lm,
    load_scalar_model,
    open_unfilled,
    prepare_classifier,
    refuse_classifier,
)
from tandem.models.lora import fill_adapters, put_adapters, read_adapter
from tandem.models.media.families import family_of
from tandem.models.media.family import freeze_towers
from tandem.models.packed import PackedModel, compile_layers, compiles, refuse_without_compiler
from tandem.models.tensor_parallel import cut_matrices

log = logging.getLogger(__name__)

Head = Literal["lm", "scalar", "both"]

Numbers = tuple[float, dict[str, tuple[float, int]], dict[str, float]]
"""(loss, metric → (sum, count), metric → maximum)."""


class Totals:
    """Sums of the loss and of metrics over the micro-batches of a step; `gather` divides metrics by their counts.

    Sums stay on the device, in float64, until `gather`, so that the host does not wait for each micro-batch.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(
        self,
        loss: torch.Tensor,
        metrics: Mapping[str, torch.Tensor],
        trained: torch.Tensor,
        num_tokens: int,
        num_sequences: int,
    ) -> None:
        """Adds a micro-batch: its loss, ``[T]`` metrics over the tokens ``trained [K]`` and ``[N]`` metrics over sequences.
        If a name ends in ``/max``, the maximum is kept instead of a sum.

        Raises:
            ValueError: a metric has neither length T nor length N.
        """
        did()  # counts a micro-batch
        self._loss = loss.double() if self._loss is None else self._loss + loss.double()
        for name, value in metrics.items():
            if value.shape == (num_tokens,):
                chosen = value[trained]
            elif value.shape == (num_sequences,):
                chosen = value
            else:
                raise ValueError(
                    f"metric {name!r} must be [T] = [{num_tokens}] or [N] = [{num_sequences}], got {list(value.shape)}"
                )
            if not name.endswith("/max"):
                total = chosen.double().sum()
                self._sums[name] = self._sums[name] + total if name in self._sums else total
                self._counts[name] = self._counts.get(name, 0) + chosen.numel()
            elif chosen.numel():
                largest = chosen.max().double()
                before = self._maxima.get(name, torch.full_like(largest, -math.inf))
                self._maxima[name] = torch.fmax(before, largest)  # ignores NaN

    def _numbers(self) -> Numbers:
        """Returns all sums as plain numbers. The host waits for the device here, once."""
        if self._loss is None:
            return 0.0, {}, {}
        numbers = torch.stack([self._loss, *self._sums.values(), *self._maxima.values()]).tolist()
        sums, maxima = numbers[1 : 1 + len(self._sums)], numbers[1 + len(self._sums) :]
        counted = {name: (total, self._counts[name]) for name, total in zip(self._sums, sums, strict=True)}
        return numbers[0], counted, dict(zip(self._maxima, maxima, strict=True))

    def gather(self, group: dist.ProcessGroup | None, *, counts: bool = True) -> dict[str, float]:
        """Returns over all ranks the sum of the ``loss`` and the mean of each metric; metrics without entries are left out.

        ``counts``: False on a rank that has computed the same as another rank.
        """
        local: Numbers = self._numbers() if counts else (0.0, {}, {})
        parts = [local]
        if group is not None:
            parts = [local] * dist.get_world_size(group)
            dist.all_gather_object(parts, local, group=group)
        sums: dict[str, tuple[float, int]] = {}
        maxima: dict[str, float] = {}
        for _, rank_sums, rank_maxima in parts:
            for name, value in rank_maxima.items():
                maxima[name] = max(maxima.get(name, value), value)
            for name, (total, count) in rank_sums.items():
                before = sums.get(name, (0.0, 0))
                sums[name] = before[0] + total, before[1] + count
        means = {name: total / count for name, (total, count) in sums.items() if count}
        return {"loss": sum(loss for loss, _, _ in parts), **means, **maxima}


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model, and the position of this rank.

    Rank ``((r·data + d)·context + c)·tensor + t`` has position (r, d, c, t). Neighbours are in one tensor-parallel group,
    because these communicate most.
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
    """This rank's tensor-parallel group, whose ranks have pieces of the same matrices; None without tensor parallelism."""

    context: Context | None = None
    """This rank's context-parallel group, whose ranks divide the tokens of a sequence; None without context parallelism."""

    key: str = "actor.backend"
    """Configuration key of the layout, for errors."""

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
        """Number of ranks over which FSDP or DeepSpeed averages gradients. The loss is multiplied by it, because a step
        needs the sum."""
        if self.layout.zero is not None:
            return self.layout.data
        return 1 if self.shards is None else self.layout.batches * self.layout.context

    @property
    def is_first_with_batch(self) -> bool:
        """True if this rank reports for all ranks that compute the same sequences."""
        return self.rank % (self.layout.context * self.layout.tensor) == 0

    @property
    def is_first_with_shard(self) -> bool:
        """True for exactly one of the ranks that hold the same part of a parameter which tensor parallelism does not cut.
        Only this rank's part enters sums over ranks."""
        return self.rank % self.layout.tensor == 0 and self.is_in_first_replica

    @property
    def is_in_first_replica(self) -> bool:
        """True for exactly one of the ranks that hold the same part of a parameter which tensor parallelism cuts: the rank
        in the first replica. Only this rank's part enters sums over ranks."""
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
    size = 1 if group is None else dist.get_world_size(group)
    kind = "fsdp" if layout.zero is None else f"deepspeed:zero{layout.zero}"
    if size != layout.ranks:
        raise ConfigError(
            f"{key} is {backend!r}, which is {layout.ranks} rank(s), but {size} process(es) take part; "
            f"set it to {kind}:d{size}, or start as many processes as it says"
        )
    if group is None or size == 1:
        return Ranks(layout, key=key)
    rank = dist.get_rank(group)
    if layout.zero is None and layout.tensor == layout.context == layout.replicas == 1:
        whole = group is dist.group.WORLD
        line = init_device_mesh(device.type, (size,)) if whole else DeviceMesh.from_group(group, device.type)
        return Ranks(layout, group, rank, line, key=key)
    if group is not dist.group.WORLD:
        raise ConfigError(f"{key}={backend} needs all processes; for a part of them use fsdp:d{size}")
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
    """Returns this rank's context-parallel group. Every rank makes all groups, in the same order, as torch requires."""
    if layout.context == 1:
        return None
    context = None
    stride, block = layout.tensor, layout.tensor * layout.context
    for first, tensor in itertools.product(range(0, layout.ranks, block), range(layout.tensor)):
        members = [first + tensor + stride * i for i in range(layout.context)]
        group = dist.new_group(members)
        if rank in members:
            context = Context(group, members.index(rank), layout.context)
    return context


def sum_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sums ``value`` over the ranks of ``group`` in place, and returns it. Without a group, does nothing."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def check_train_engine(
    config: TrainEngineConfig,
    folder: Path,
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
    head: str,
    key: str,
    class_label: ClassLabel | None = None,
    *,
    reads_weights: bool = True,
) -> Architecture:
    """Checks that an engine of ``config`` can train the model in ``folder`` with this ``layout``; returns its architecture.
    The folder may lack weights.

    ``head``, ``class_label``: see `SpreadEngine`. ``key``: configuration key of ``config.backend``. ``reads_weights``:
    also checks the headers of the files of weights; False if the caller opens these files next.

    Raises:
        ConfigError: the model does not fit the head, its architecture is not supported exactly, or the layout cannot divide
            it; or a library or a compiler is missing.
    """
    hf_config = read_hf_config(folder)
    architecture = Architecture.from_config(hf_config)
    if head == "scalar":
        prepare_classifier(folder, hf_config, class_label)
    else:
        refuse_classifier(folder, hf_config)
    _check_media(config, folder, hf_config, layout, key)
    check_layout(config, layout, key, cpu=device.type == "cpu", rounded=dtype != torch.float32)
    refuse_uneven_heads(architecture.num_heads, architecture.num_kv_heads, layout.tensor, key)
    if layout.zero is not None:
        import_deepspeed(device)
    if config.compile:
        refuse_without_compiler(device)
    if reads_weights and is_complete(folder):
        if head == "scalar":
            load_scalar_model(folder, device="meta", class_label=class_label)
        else:
            load_causal_lm(folder, device="meta")
    return architecture


def _check_media(config: TrainEngineConfig, folder: Path, hf_config: PretrainedConfig, layout: Layout, key: str) -> None:
    """Raises `ConfigError` if a model that reads images or sounds does not fit its settings, or another model has such
    settings."""
    family, written = family_of(folder, hf_config), f"{key}={config.backend}"
    towers = {} if family is None else family.towers
    role = key.rpartition(".")[0]
    for setting, names in (("freeze", config.freeze), ("lora.towers", config.lora.towers)):
        for name in names:
            if name not in towers:
                raise ConfigError(
                    f"{role}.{setting} has {name!r}, and {folder} "
                    + (f"has the parts {', '.join(towers)}" if towers else "reads text alone: leave it out")
                )
    if family is None:
        return
    if layout.tensor > 1 or layout.context > 1 or layout.zero is not None:
        raise ConfigError(
            f"{folder} reads {' and '.join(family.kinds)}, and {written} does not divide its towers: use "
            f"fsdp:d{layout.ranks}"
        )


def check_layout(config: TrainEngineConfig, layout: Layout, key: str, *, cpu: bool, rounded: bool) -> None:
    """Checks that the settings are compatible with the layout (configuration key ``key``). ``cpu``: the device is a CPU.
    ``rounded``: the compute dtype is not float32.

    Raises:
        ConfigError: they are not compatible.
    """
    written = f"{key}={config.backend}"
    for problem in layout_problems(layout, written, config):
        raise ConfigError(problem)
    if config.lora.rank is not None and (layout.tensor > 1 or layout.zero is not None):
        why = "DeepSpeed has no adapters here" if layout.zero is not None else "t cuts every matrix, but no adapter"
        raise ConfigError(f"lora does not go with {written}: {why}; use fsdp:d{layout.data}")
    if config.offload and cpu:
        raise ConfigError(
            "actor.offload=true copies layers from host memory to a GPU while they are computed, which has no use without a "
            "GPU: leave it out"
        )
    if layout.zero == 1 and rounded:
        raise ConfigError(
            "stage 1 of DeepSpeed adds up gradients in another way where the model computes in bfloat16, which is not "
            f"supported: use deepspeed:zero2:d{layout.data}, or actor.dtype=float32"
        )


def open_spread(
    config: TrainEngineConfig,
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
    head: Head,
    trained: bool = True,
    adapter: AdapterBeside | None = None,
    class_label: ClassLabel | None = None,
) -> tuple[PackedModel, Holder]:
    """Opens the model of ``config`` on this rank, with ``dtype`` as compute dtype; returns the model and its holder.

    With ``config.lora`` the model's weights are frozen in ``dtype``, and adapters are added. A model that is not ``trained``
    is frozen as a whole and has no float32 masters, except under DeepSpeed. ``adapter``: only for a frozen model on one
    rank. ``class_label``: the class whose score a scalar head gives.

    Raises:
        ConfigError: the model cannot be opened, or the layout cannot divide it.
    """
    folder, key = resolve(config.path), ranks.key
    check_train_engine(config, folder, ranks.layout, device, dtype, head, key, class_label, reads_weights=False)
    if trained and is_token_classifier(read_hf_config(folder)):
        raise ConfigError(f"{config.path} is a token classifier: it can judge steps, but cannot be trained here")
    # with offload the model is also read layer by layer, because it may not fit on the GPU as a whole
    piecewise = class_label is None and (ranks.group is not None or config.offload)
    unfilled = _open_unfilled(config, device, head) if piecewise else None
    frozen = not trained and ranks.layout.zero is None
    held = torch.float32 if config.lora.rank is None and not frozen else dtype
    if adapter is not None and dtype == torch.float32:
        held = adapter.dtype  # the adapter was trained on a base rounded to this dtype
    model = _load(config, device, head, held, class_label) if unfilled is None else unfilled.model
    if adapter is not None:
        assert frozen and unfilled is None, "several ranks read merged weights"
        put_adapters(model, config.lora, held, seed=0)
        fill_adapters(model, read_adapter(adapter.folder)[0])
    if frozen:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
    elif config.lora.rank is not None:
        drawn = put_adapters(model, config.lora, dtype, _common_seed(ranks, device))
        if unfilled is not None:
            files = {**unfilled.files, **{name.removeprefix(PREFIX): values for name, values in drawn.items()}}
            unfilled = replace(unfilled, files=files)
    if not frozen:
        for parameter in freeze_towers(model, config.freeze):
            parameter.data = parameter.data.to(dtype)
    if ranks.context is not None:  # all-to-all, if the number of heads allows it
        divides = divides_heads(model.architecture, ranks.layout.tensor * ranks.layout.context)
        model.context = replace(ranks.context, way="all_to_all" if divides else "gather")
    pieces = None if ranks.tensor is None else cut_matrices(model, ranks.tensor, ranks.key)
    if compiles(config, device):
        compile_layers(model, device)

    def fill(module: nn.Module) -> None:
        if unfilled is not None:
            unfilled.fill(module, pieces)

    layers = model.decoder.layers
    assert isinstance(layers, nn.ModuleList)
    if ranks.layout.zero is not None:
        return model, ZeroHolder(model, layers, dtype, ranks.layout, device, fill)
    shards = _alone(device) if config.offload and ranks.group is None else ranks.shards
    if shards is None:
        fill(model)
        return model, Replica(model, dtype, pieces)
    # with offload, gradients are reduced after each micro-batch, because only reduced ones move to host memory
    sync = "micro_batch" if config.offload else config.gradient_sync or "step"
    return model, Sharded(model, layers, dtype, shards, pieces, fill, sync, config.offload)


def _alone(device: torch.device) -> DeviceMesh:
    """Returns a device mesh of this process alone, which FSDP needs."""
    form_group(device)
    return init_device_mesh(device.type, (1,))


def _open_unfilled(config: TrainEngineConfig, device: torch.device, head: Head) -> Unfilled | None:
    """Opens the model without allocating its weights; None, with a warning, if its files cannot be read tensor by tensor."""
    unfilled = open_unfilled(config.path, device, head, chunk_tokens=config.chunk_tokens)
    if unfilled is None:
        log.warning(
            "%s is read as a whole on every rank, which costs memory for a moment: its files do not hold the tensors "
            "one by one under their names. Save it once as a safetensors folder with this version of transformers",
            config.path,
        )
    elif config.gradient_checkpointing:
        unfilled.model.enable_gradient_checkpointing(config.selective_checkpointing)
    return unfilled


def _common_seed(ranks: Ranks, device: torch.device) -> int:
    """Returns the torch seed of the first rank on all ranks. Collective."""
    seed = torch.tensor([torch.initial_seed() % 2**62], device=device)
    if ranks.group is not None:
        dist.broadcast(seed, dist.get_global_rank(ranks.group, 0), group=ranks.group)
    return int(seed)


def _load(
    config: TrainEngineConfig, device: torch.device, head: Head, dtype: torch.dtype, class_label: ClassLabel | None
) -> PackedModel:
    if head == "scalar":
        return load_scalar_model(
            config.path,
            dtype,
            device,
            config.gradient_checkpointing,
            selective_checkpointing=config.selective_checkpointing,
            class_label=class_label,
        )
    return load_causal_lm(
        config.path,
        dtype,
        device,
        config.gradient_checkpointing,
        selective_checkpointing=config.selective_checkpointing,
        chunk_tokens=config.chunk_tokens,
        value_head=head == "both",
    )
