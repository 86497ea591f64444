"""Batches, losses and engines for the tests of the training engine; importable by child processes."""

from pathlib import Path

import torch
from tensordict import TensorDict

from tandem.api.batch import pack
from tandem.config.train_engine import OptimizerConfig, TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine


def random_batch(lengths, *, seed=0, vocab_size=304) -> TensorDict:
    """Sequences with random tokens, masks, temperatures and loss weights."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        mask = torch.rand(length, generator=generator) > 0.3
        mask[0] = False
        rows.append(
            {
                "input_ids": torch.randint(0, vocab_size, (length,), generator=generator),
                "loss_mask": mask,
                "advantages": torch.randn(length, generator=generator),
                "temperature": 0.5 + torch.rand((), generator=generator),
            }
        )
    batch = pack(rows)
    batch["loss_weights"] = torch.rand(sum(lengths), generator=generator) * batch["loss_mask"] / sum(lengths)
    return batch


def weighted_nll(outputs, view):
    """A loss per token, with an entropy bonus where there is entropy."""
    losses = -outputs.logprobs * view["advantages"] * view["loss_mask"]
    if outputs.entropy is not None:
        losses = losses - 0.1 * outputs.entropy
    metrics = {"logprob": outputs.logprobs.detach(), "length": view["cu_seqlens"].diff().float()}
    return losses, metrics | {f"{name}/max": value for name, value in metrics.items()}


def engine_on(
    folder: Path,
    *,
    max_tokens=1000,
    dtype="float32",
    ranks=1,
    total_steps=10,
    chunk_tokens=1024,
    checkpointing=False,
    device="cpu",
    head="lm",
    **optimizer,
) -> SpreadEngine:
    options = {"lr": 1e-2, "max_grad_norm": None, "weight_decay": 0.1, **optimizer}
    config = TrainEngineConfig(
        path=str(folder),
        backend=f"fsdp:d{ranks}",
        dtype=dtype,
        optimizer=OptimizerConfig(**options),
        max_tokens_per_micro_batch=max_tokens,
        logprob_chunk_tokens=chunk_tokens,
        gradient_checkpointing=checkpointing,
    )
    return SpreadEngine(config, total_steps=total_steps, device=device, head=head)


def weights_of(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Euclidean, over all weights."""
    return sum(float((a[name] - b[name]).detach().double().pow(2).sum()) for name in a) ** 0.5
