"""One batch that every preset can learn from, and actors for presets."""

import torch

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.train_engine import ActorConfig, OptimizerConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.roles.actor import Actor
from tandem.roles.reference import Reference
from tests.roles.batches import rollout_batch

GROUPS = [
    [(1.0, 3), (0.0, 5), (1.0, 2), (0.5, 2)],
    [(0.0, 4), (0.0, 1), (0.0, 3)],
    [(0.5, [2, 3]), (0.0, 4), (1.0, 2)],
    [(1.0, 6), (0.0, 2), (0.0, 3), (0.0, 2)],
]
GREEDY = {3, 6, 9, 14}
"""Sequences that are a group's greedy sample."""


def algorithm_of(preset, *overrides):
    """The `algorithm` section that a preset stands for."""
    given = ["train_dataset.path=addition", f"algorithm={preset}", *overrides]
    return load_config(TrainConfig, None, given).config.algorithm


def full_batch(folder, *, drift=0.15, seed=0):
    """Groups of several sizes, a sample of two trajectories, greedy samples, two named rewards, values, a reference; the
    sampler is the model itself, but for ``drift``."""
    batch = rollout_batch(GROUPS, seed=seed)
    count, total = len(batch["reward"]), len(batch["input_ids"])
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(size):
        return torch.randn(size, generator=generator)

    logprobs = engine_on(folder).forward(batch).logprobs
    greedy = torch.tensor([i in GREEDY for i in range(count)])
    batch["rollout_logprobs"] = (logprobs + drift * normal(total)) * batch["loss_mask"]
    batch["reference_logprobs"] = (logprobs + 0.5 * normal(total)) * batch["loss_mask"]
    batch["values"] = 0.3 * normal(total)
    batch["bootstrap_value"] = 0.3 * normal(count)
    batch["stop_reason"] = torch.tensor([i % 3 == 0 for i in range(count)]).long()
    batch["rewards/right"] = batch["reward"].clone()
    batch["rewards/short"] = batch["cu_seqlens"].diff().float()
    batch["greedy"] = greedy
    batch["in_loss"], batch["in_statistics"] = ~greedy, ~greedy
    return batch


def engine_on(folder, *, max_tokens=1000, ranks=1, config=None):
    return SpreadEngine(config or actor_config(folder, max_tokens=max_tokens, ranks=ranks), total_steps=100)


def actor_config(folder, *, max_tokens=1000, ranks=1, mini_batches=1):
    """An optimizer whose step is nearly proportional to the gradient, so that rounding stays rounding."""
    return ActorConfig(
        path=str(folder),
        backend=f"fsdp:d{ranks}",
        dtype="float32",
        optimizer=OptimizerConfig(lr=0.05, eps=0.1, max_grad_norm=None),
        max_tokens_per_micro_batch=max_tokens,
        mini_batches=mini_batches,
    )


def preset_actor(folder, preset, *overrides, max_tokens=1000, ranks=1, mini_batches=1, version=0):
    """An actor with the preset's algorithm; the reference's log-probabilities are in the batch."""
    config = actor_config(folder, max_tokens=max_tokens, ranks=ranks, mini_batches=mini_batches)
    return Actor(
        engine_on(folder, config=config),
        algorithm_of(preset, *overrides),
        config,
        reference=Reference(None),
        max_new_tokens=10,
        version=version,
    )
