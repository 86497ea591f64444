"""Opens a model and lays it over the ranks."""

import logging
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.holders import Holder, Replica, Sharded
from tandem.engines.train.ranks import Ranks
from tandem.models.context_parallel import divides_heads, refuse_uneven_heads
from tandem.models.load import load_causal_lm, load_scalar_model
from tandem.models.packed import PackedModel
from tandem.models.streaming import Unfilled, open_unfilled
from tandem.models.tensor_parallel import cut

log = logging.getLogger(__name__)

Head = Literal["lm", "scalar", "both"]


def open_spread(
    config: TrainEngineConfig, ranks: Ranks, device: torch.device, dtype: torch.dtype, head: Head
) -> tuple[PackedModel, Holder]:
    """The model of ``config`` on this rank, computing in ``dtype``, and what holds its weights.

    Raises:
        ConfigError: it cannot be opened, or not be divided so.
    """
    unfilled = None if ranks.group is None else _open_unfilled(config, device, head)
    model = _load(config, device, head) if unfilled is None else unfilled.model
    if ranks.context is not None:
        model.context = replace(ranks.context, way=_context_way(config, ranks, model))
    pieces = None if ranks.tensor is None else cut(model, ranks.tensor, ranks.key)

    def fill(module: nn.Module) -> None:
        if unfilled is not None:
            unfilled.fill(module, pieces)

    if ranks.shards is None:
        fill(model)
        return model, Replica(model, dtype, pieces)
    layers = model.model.model.layers
    return model, Sharded(model, layers, dtype, ranks.shards, pieces, fill, config.gradient_sync)


def _open_unfilled(config: TrainEngineConfig, device: torch.device, head: Head) -> Unfilled | None:
    """The model without memory, if its files can be read in pieces."""
    unfilled = open_unfilled(config.path, device, head, chunk_tokens=config.logprob_chunk_tokens)
    if unfilled is None:
        log.warning(
            "%s is read as a whole on every rank, which costs memory for a moment: its files do not hold the tensors "
            "one by one under their names. Save it once as a safetensors folder with this version of transformers",
            config.path,
        )
    elif config.gradient_checkpointing:
        unfilled.model.enable_gradient_checkpointing(config.selective_checkpointing)
    return unfilled


def _load(config: TrainEngineConfig, device: torch.device, head: Head) -> PackedModel:
    if head == "scalar":
        return load_scalar_model(
            config.path,
            torch.float32,
            device,
            config.gradient_checkpointing,
            selective_checkpointing=config.selective_checkpointing,
        )
    return load_causal_lm(
        config.path,
        torch.float32,
        device,
        config.gradient_checkpointing,
        selective_checkpointing=config.selective_checkpointing,
        chunk_tokens=config.logprob_chunk_tokens,
        value_head=head == "both",
    )


def _context_way(config: TrainEngineConfig, ranks: Ranks, model: PackedModel) -> Literal["all_to_all", "gather"]:
    """How ranks that share tokens attend.

    Raises:
        ConfigError: they shall exchange heads, and there are too few.
    """
    way, layout = config.context_parallel, ranks.layout
    if way == "auto":
        return "all_to_all" if divides_heads(model.architecture, layout.tensor * layout.context) else "gather"
    if way == "all_to_all":
        refuse_uneven_heads(model.architecture, layout.tensor, layout.context, ranks.key)
    return way
