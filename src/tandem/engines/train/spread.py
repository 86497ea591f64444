"""Opens a model and lays it over the ranks."""

import logging
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.config.errors import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.check import check_train_engine
from tandem.engines.train.holders import Holder, Replica, Sharded
from tandem.engines.train.ranks import Ranks, form_group
from tandem.engines.train.zero import ZeroHolder
from tandem.models.adapter_beside import AdapterBeside
from tandem.models.adapter_folder import read_adapter
from tandem.models.catalog import resolve
from tandem.models.compiled import compile_layers, compiles
from tandem.models.context_parallel import divides_heads
from tandem.models.foreign import read_hf_config
from tandem.models.heads import ClassLabel, is_token_classifier
from tandem.models.load import load_causal_lm, load_scalar_model
from tandem.models.lora import fill_adapters, put_adapters
from tandem.models.media.features import freeze_towers
from tandem.models.packed import PackedModel
from tandem.models.streaming import PREFIX, Unfilled, open_unfilled
from tandem.models.tensor_parallel import cut_matrices

log = logging.getLogger(__name__)

Head = Literal["lm", "scalar", "both"]


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
    """The model of ``config`` on this rank, computing in ``dtype``, and what holds its weights.

    With ``config.lora`` its own weights are frozen in ``dtype``, and adapters lie beside them. A model that is not
    ``trained`` is frozen as a whole, and has no float32 masters; under DeepSpeed it is held as a trained one.
    ``adapter``: of a frozen model on one rank. ``class_label``: the class that a scalar head gives.

    Raises:
        ConfigError: it cannot be opened, or not be divided so.
    """
    check_train_engine(config, resolve(config.path), ranks.layout, device, dtype, head, ranks.key, class_label)
    if trained and is_token_classifier(read_hf_config(resolve(config.path))):
        raise ConfigError(f"{config.path} classifies tokens: it can judge steps, and cannot be trained on here")
    # what is kept in host memory is read layer by layer too: it may not fit on the GPU as a whole
    piecewise = class_label is None and (ranks.group is not None or config.offload)  # a head of several classes is small
    unfilled = _open_unfilled(config, device, head) if piecewise else None
    frozen = not trained and ranks.layout.zero is None
    held = torch.float32 if config.lora.rank is None and not frozen else dtype
    if adapter is not None and dtype == torch.float32:
        held = adapter.dtype  # the base is rounded as it was beside the adapter; rounding it twice is rounding it once
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
    if ranks.context is not None:
        model.context = replace(ranks.context, way=_context_way(config, ranks, model))
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
    # gradients go to host memory only once they are reduced: with each micro-batch, else the GPU would hold them all
    sync = "micro_batch" if config.offload else config.gradient_sync or "step"
    return model, Sharded(model, layers, dtype, shards, pieces, fill, sync, config.offload)


def _alone(device: torch.device) -> DeviceMesh:
    """This process, as FSDP wants it."""
    form_group(device)
    return init_device_mesh(device.type, (1,))


def _open_unfilled(config: TrainEngineConfig, device: torch.device, head: Head) -> Unfilled | None:
    """The model without memory, if its files can be read in pieces."""
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
    """Torch's seed on the first rank, on all of them. Collective."""
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


def _context_way(config: TrainEngineConfig, ranks: Ranks, model: PackedModel) -> Literal["all_to_all", "gather"]:
    """The attention of ranks that share tokens."""
    way, layout = config.context_parallel, ranks.layout
    if way == "auto":
        return "all_to_all" if divides_heads(model.architecture, layout.tensor * layout.context) else "gather"
    return way
