"""Whether the parts of an algorithm fit together; the demands themselves are data, in `compatibility`."""

from collections.abc import Iterator

from tandem.config.compatibility import Demands, demands
from tandem.config.experiment import TrainConfig

HARMLESS_SHAPING = ("mask_truncated",)
"""It drops samples and leaves rewards as they are."""


def corrects_itself(config: TrainConfig) -> bool:
    """Whether stale tokens need no further correction, or may not be trained on at all."""
    chosen = demands(config.algorithm.advantage.name, config.algorithm.policy_loss.name)
    return any(demand.corrects_itself or demand.on_policy for _, demand in chosen)


def combinations(config: TrainConfig) -> Iterator[str]:
    """What contradicts what, each with the reason and the remedy."""
    for choice, demand in demands(config.algorithm.advantage.name, config.algorithm.policy_loss.name):
        yield from _on_policy(config, choice, demand)
        yield from _weight(config, choice, demand)
        yield from _named_rewards(config, choice, demand)


def _on_policy(config: TrainConfig, choice: str, demand: Demands) -> Iterator[str]:
    if not demand.on_policy:
        return
    updates = config.actor.mini_batches * config.actor.epochs_per_batch
    if config.async_training:
        yield f"{choice} contradicts async_training=true, because {demand.on_policy}; set async_training=false"
    if config.rollout.replay.groups:
        yield (
            f"{choice} contradicts rollout.replay.groups={config.rollout.replay.groups}, because {demand.on_policy}; "
            "set it to 0"
        )
    if updates > 1:
        yield (
            f"{choice} takes one optimizer step for each batch, because {demand.on_policy}; set actor.mini_batches=1 and "
            f"actor.epochs_per_batch=1, got {updates} steps"
        )


def _weight(config: TrainConfig, choice: str, demand: Demands) -> Iterator[str]:
    correction = config.algorithm.correction
    if correction.weight == "none":
        return
    if demand.no_weight:
        yield (
            f"{choice} contradicts algorithm.correction.weight={correction.weight}, because {demand.no_weight}; set "
            "algorithm.correction.weight=none (a rule under algorithm.correction.reject may stay)"
        )
    if demand.sequence_weight and correction.level != "sequence":
        yield (
            f"{choice} contradicts algorithm.correction.level={correction.level}, because {demand.sequence_weight}; set "
            "algorithm.correction.level=sequence"
        )


def _named_rewards(config: TrainConfig, choice: str, demand: Demands) -> Iterator[str]:
    if not demand.named_rewards:
        return
    kl = config.algorithm.kl
    if kl.coefficient > 0 and kl.where == "reward":
        yield f"{choice} contradicts algorithm.kl.where=reward, because {demand.named_rewards}; set algorithm.kl.where=loss"
    for i, shaping in enumerate(config.algorithm.shaping):
        if shaping.name not in HARMLESS_SHAPING:
            yield (
                f"{choice} contradicts algorithm.shaping[{i}]={shaping.name}, because {demand.named_rewards}; leave it out, "
                "or make it a reward with a name"
            )
