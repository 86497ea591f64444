"""Engines with adapters, and their steps under several layouts; importable by child processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.config.errors import ConfigError
from tandem.config.train_engine import LoRAConfig, OptimizerConfig, TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tests.engines_train.layouts import batch_of_prompts, gone_on, loss_with_scores
from tests.engines_train.steps import random_batch, weighted_nll, weights_of

LAYOUTS = {"sharded": ("d2", "d2 bfloat16"), "others": ("d1c2", "d1r2")}


def lora_on(folder, *, backend="fsdp:d1", head="lm", lr=1e-2, eps=1e-8, dtype="float32", checkpointing=False, **lora):
    options = {"rank": 4} | lora
    config = TrainEngineConfig(
        path=str(folder),
        backend=backend,
        dtype=dtype,
        optimizer=OptimizerConfig(lr=lr, eps=eps, max_grad_norm=None),
        lora=LoRAConfig(**options),
        max_tokens_per_micro_batch=20,
        gradient_checkpointing=checkpointing,
    )
    torch.manual_seed(7)
    return SpreadEngine(config, total_steps=10, head=head)


def adapter_of(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.adapter.weights()}


def trained(engine, steps=3):
    """Adapters that are far from 0."""
    for seed in range(steps):
        engine.train_batch(random_batch((7, 5, 9), seed=seed), weighted_nll)
    return engine


def some_adapter(engine) -> dict[str, torch.Tensor]:
    """Tensors for an adapter in which neither A nor B is 0, so that both have gradients."""
    generator = torch.Generator().manual_seed(1)
    return {n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in adapter_of(engine).items()}


def steps_of_layout(folder: Path, layout: str, out: Path) -> dict:
    """Gradients of the first step, then three steps, a state that another engine goes on from, and what is saved."""
    layout, _, dtype = layout.partition(" ")
    settings = {"backend": f"fsdp:{layout}", "dtype": dtype or "float32", "head": "both"}
    batch = batch_of_prompts()
    gradual = lora_on(folder, lr=1e4, eps=1e4, **settings)  # its step is the gradient
    before = some_adapter(gradual)
    found = {"first": adapter_of(gradual)}
    gradual.load_weights(before.items())
    gradual.train_batch(batch, loss_with_scores)
    found["gradients"] = {name: before[name] - after for name, after in adapter_of(gradual).items()}
    engine = lora_on(folder, **settings)
    found["metrics"] = [engine.train_batch(batch, loss_with_scores) for _ in range(3)]
    found["after"], found["merged"] = adapter_of(engine), weights_of(engine)
    found["outputs"] = engine.forward(batch).logprobs
    with engine.adapter.set_aside():
        found["base"] = engine.forward(batch).logprobs
    engine.save(out / f"{layout}{dtype}")
    state = out / f"{layout}{dtype}-state"
    other = gone_on(engine, lora_on(folder, **settings), state)
    for one in (engine, other):
        one.train_batch(batch, loss_with_scores)
    found["next"], found["resumed"] = adapter_of(engine), adapter_of(other)
    local = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in other.model.named_parameters()}
    found["bytes"] = sum(p.nbytes for n, p in local.items() if "lora_" not in n)
    return found


def steps_of_layouts(folder: Path, layouts: Sequence[str], out: Path, ranks: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if ranks == 1:
        layouts = ["d1", *(["d1 bfloat16"] if "d2 bfloat16" in layouts else [])]
    found: dict[str, Any] = {layout: steps_of_layout(folder, layout, out) for layout in layouts}
    if ranks == 2:
        try:
            lora_on(folder, backend="fsdp:d1t2")
        except ConfigError as error:
            found["refused"] = str(error)
    return found
