"""Batches as the executor makes them, and actors on a tiny model."""

import dataclasses

import torch
from tensordict import TensorDict

from tandem.api.batch import pack
from tandem.config.algorithm import AlgorithmConfig, Component
from tandem.config.train_engine import ActorConfig, OptimizerConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.roles.actor import Actor

PROMPT = 3


def rollout_batch(groups, *, seed=0, vocab_size=304, **columns) -> TensorDict:
    """``groups``: for each prompt its samples as (reward, trained tokens); a sample of several trajectories gives a list of
    their numbers of trained tokens. ``columns``: further sequence fields, one value for each trajectory, in order."""
    generator = torch.Generator().manual_seed(seed)
    rows, sample_id = [], 0
    for group_id, samples in enumerate(groups):
        for reward, tokens in samples:
            for trained in tokens if isinstance(tokens, list) else [tokens]:
                size = PROMPT + trained
                mask = torch.arange(size) >= PROMPT
                rows.append(
                    {
                        "input_ids": torch.randint(3, vocab_size, (size,), generator=generator),
                        "loss_mask": mask,
                        "rollout_logprobs": -5.0 + 0.3 * torch.randn(size, generator=generator),
                        "versions": torch.where(mask, 0, -1),
                        "expired": torch.zeros(size, dtype=torch.bool),
                        "reward": reward,
                        "temperature": 1.0,
                        "stop_reason": 0,
                        "group_id": 100 + group_id,
                        "sample_id": 1000 - sample_id,
                        "in_statistics": True,
                        "in_loss": True,
                    }
                )
            sample_id += 1
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return pack(rows)


def tiny_actor(folder, *, mini_batches=1, epochs=1, max_tokens=1000, lr=1e-2, actor=None, **algorithm) -> Actor:
    """``algorithm``: fields of `AlgorithmConfig`, components by name; ``actor``: arguments of `Actor`."""
    config = ActorConfig(
        path=str(folder),
        dtype="float32",
        optimizer=OptimizerConfig(lr=lr, max_grad_norm=None),
        max_tokens_per_micro_batch=max_tokens,
        mini_batches=mini_batches,
        epochs_per_batch=epochs,
    )
    engine = SpreadEngine(config, total_steps=10)
    return Actor(engine, algorithm_config(**algorithm), config, **(actor or {}))


def algorithm_config(**fields) -> AlgorithmConfig:
    """Components may be given by name."""
    plain = {"correction", "kl", "entropy_coefficient", "whitening"}
    made = {
        name: value if name in plain or not isinstance(value, str) else Component(value) for name, value in fields.items()
    }
    return dataclasses.replace(AlgorithmConfig(), **made)


def weights_of(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.engine.weights()}


def moved(before, after) -> float:
    """Largest change of a weight."""
    return max(float((before[name] - after[name]).abs().max()) for name in before)


def step(actor: Actor, batch: TensorDict) -> dict[str, float]:
    """All three stages."""
    return actor.ppo_update(actor.compute_advantages(actor.compute_proximal(batch)))
