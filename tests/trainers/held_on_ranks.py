"""What training engines really hold, in bytes; importable by child processes."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tandem.config.train_engine import LoRAConfig, OptimizerConfig, TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tests.engines_train.steps import random_batch, weighted_nll

LENGTHS = (7, 5, 9, 6)
MOST = 32
"""Tokens of a micro-batch, so that a step of four times these lengths has several."""


def config_of(folder: Path, backend: str, *, rank: int | None = None, dtype: str = "float32", **more) -> TrainEngineConfig:
    """Of a tiny engine, with adapters of this rank."""
    lora, optimizer = LoRAConfig(rank=rank), OptimizerConfig(lr=1e-2)
    options = {"lora": lora, "optimizer": optimizer, "max_tokens_per_micro_batch": MOST, **more}
    return TrainEngineConfig(path=str(folder), backend=backend, dtype=dtype, **options)


def local(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this process's parts; what shares its memory once."""
    found = {}
    for tensor in tensors:
        part = tensor.detach()
        part = part.to_local() if isinstance(part, DTensor) else part
        if part.numel():
            found[part.data_ptr()] = part.nbytes
    return sum(found.values())


def held_by(engine: SpreadEngine) -> dict[str, int]:
    """Bytes of weights and moments, after a step."""
    holder = engine.holder
    engine.train_batch(random_batch(LENGTHS), weighted_nll)
    if engine.ranks.layout.zero is not None:
        return _held_by_deepspeed(holder)
    weights = [*holder.masters.values(), *engine.model.parameters()]
    moments = [x for state in engine.optimizer.adamw.state.values() for x in state.values() if x.dim()]
    return {"weights": local(weights), "optimizer": local(moments), "gradients": gradients_between(engine)}


def gradients_between(engine: SpreadEngine) -> int:
    """Most bytes of gradients when a micro-batch of a step begins: of shards, and of what is not summed over ranks yet."""
    seen = []

    def loss(outputs, view):
        groups = [m._get_fsdp_state()._fsdp_param_group for m in engine.model.modules() if isinstance(m, FSDPModule)]
        held = [p for group in groups if group is not None for p in group.fsdp_params]
        whole = [x for p in held for x in (p.unsharded_accumulated_grad, getattr(p, "_unsharded_param", None))]
        whole = [getattr(x, "grad", None) if isinstance(x, torch.nn.Parameter) else x for x in whole]
        own = [master.grad for master in engine.holder.masters.values()]
        seen.append(local(gradient for gradient in (*whole, *own) if gradient is not None))
        return weighted_nll(outputs, view)

    engine.train_batch(random_batch(LENGTHS * 4), loss)
    return max(seen)


def _held_by_deepspeed(holder) -> dict[str, int]:
    zero = holder.zero
    flat = zero.fp16_partitioned_groups_flat if holder.stage == 3 else zero.bit16_groups_flat
    shared = {tensor.untyped_storage().data_ptr() for tensor in flat}
    masters = [piece for piece in holder.local_masters() if piece.untyped_storage().data_ptr() not in shared]
    moments = [x for state in zero.optimizer.state.values() for x in state.values() if x.dim()]
    found = {"weights": local(flat), "masters": local(masters), "optimizer": local(moments)}
    return found | ({"buffer": local([zero.grad_partitions_flat_buffer])} if holder.stage == 3 else {})


def held_under(folder: Path, cases: dict[str, dict], ranks: int) -> dict[str, dict[str, int]]:
    """Name of a case → what this rank holds under it. ``cases``: arguments of `config_of`."""
    return {name: held_by(SpreadEngine(config_of(folder, **case), total_steps=9)) for name, case in cases.items()}
