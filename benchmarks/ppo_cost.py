"""Measures the cost of critic and reference: PPO's update against GRPO's, and a reference's pass against GRPO's.

    python benchmarks/ppo_cost.py [--path smollm2-135m] [--rounds 5]

Reach: PPO's update with its critic at most 2.2× GRPO's, reference log-probabilities at most 0.45× the actor's update. One
batch of a realistic shape (prompts that groups share, answers of uneven length, every group with spread, so that GRPO can
skip no sequence), random tokens, one optimizer step. *Update*: everything between the rollout and the new weights, for PPO
`compute_values` and the critic's own update included. The three are measured in turns; the ratio is that of the medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from tensordict import TensorDict

from tandem.api.batch import pack
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.train_engine import critic_engine
from tandem.engines.train.engine import SpreadEngine
from tandem.roles.actor import Actor
from tandem.roles.critic import Critic
from tandem.roles.reference import Reference

MOST_PPO, MOST_REFERENCE = 2.2, 0.45


def random_batch(prompts: int, samples: int, prompt_tokens: int, most_tokens: int, vocabulary: int) -> TensorDict:
    """Groups that share a prompt; answers of a tenth of ``most_tokens`` up to all of it; rewards 0 and 1 in each group."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for group in range(prompts):
        prompt = torch.randint(0, vocabulary, (prompt_tokens,), generator=generator)
        for sample in range(samples):
            length = int(torch.randint(most_tokens // 10, most_tokens + 1, (), generator=generator))
            ids = torch.cat([prompt, torch.randint(0, vocabulary, (length,), generator=generator)])
            mask = torch.arange(len(ids)) >= prompt_tokens
            rows.append(
                {
                    "input_ids": ids,
                    "loss_mask": mask,
                    "rollout_logprobs": torch.full((len(ids),), -10.0),
                    "versions": torch.where(mask, 0, -1),
                    "reward": float(sample % 2),
                    "temperature": 1.0,
                    "stop_reason": int(length == most_tokens),
                    "group_id": group,
                    "sample_id": group * samples + sample,
                    "in_statistics": True,
                    "in_loss": True,
                }
            )
    return pack(rows)


def config_of(algorithm: str, path: str) -> TrainConfig:
    """Learning rates of 0: the work is the same, and the weights stay comparable."""
    keys = [f"actor.path={path}", f"algorithm={algorithm}", "train_dataset.path=addition", "actor.optimizer.lr=0"]
    keys += ["critic.optimizer.lr=0"] if algorithm == "ppo" else []
    return load_config(TrainConfig, None, keys).config


def actor_of(config: TrainConfig) -> Actor:
    """Each with an engine of its own, as in a run."""
    engine = SpreadEngine(config.actor, total_steps=1000)
    return Actor(engine, config.algorithm, config.actor, max_head_offpolicyness=10**6)


def updates(path: str) -> dict[str, Callable[[TensorDict], object]]:
    """The functions that are measured, by name."""
    grpo, ppo = config_of("grpo", path), config_of("ppo", path)
    actors = {name: actor_of(config) for name, config in (("grpo", grpo), ("ppo", ppo))}
    engine = SpreadEngine(critic_engine(ppo.critic, ppo.actor), total_steps=1000, head="scalar")
    critic = Critic(engine, ppo.critic, ppo.actor)
    reference = Reference(SpreadEngine(grpo.actor, total_steps=0))

    def update(name: str, batch: TensorDict) -> TensorDict:
        batch = actors[name].compute_advantages(actors[name].compute_proximal(batch))
        actors[name].ppo_update(batch)
        return batch

    def with_critic(batch: TensorDict) -> None:
        critic.update(update("ppo", critic.compute_values(batch)))

    return {
        "grpo_s": lambda batch: update("grpo", batch),
        "ppo_s": with_critic,
        "reference_s": reference.compute_logprobs,
    }


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--most-tokens", type=int, default=64)
    arguments = parser.parse_args()
    measured = updates(arguments.path)
    batch = random_batch(arguments.prompts, arguments.samples, arguments.prompt_tokens, arguments.most_tokens, 300)
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(arguments.rounds + 1):
        for name, call in measured.items():
            began = time.perf_counter()
            call(batch)
            times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}  # the first one warms up
    ppo, reference = medians["ppo_s"] / medians["grpo_s"], medians["reference_s"] / medians["grpo_s"]
    result = {
        "ppo_to_grpo": ppo,
        "reference_to_update": reference,
        "reached": ppo <= MOST_PPO and reference <= MOST_REFERENCE,
        "tokens": int(batch["cu_seqlens"][-1]),
        **medians,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
