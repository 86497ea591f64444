"""Whether the parts of an algorithm fit together; the demands themselves are data, in `compatibility`."""

from collections.abc import Container, Iterator

from tandem.config.compatibility import Demands, demands
from tandem.config.experiment import TrainConfig

HARMLESS_SHAPING = ("mask_truncated",)
"""It drops samples and leaves rewards as they are."""


def corrects_itself(config: TrainConfig) -> bool:
    """Whether stale tokens need no further correction, or may not be trained on at all."""
    chosen = demands(config.algorithm.advantage.name, config.algorithm.policy_loss.name)
    return any(demand.corrects_itself or demand.on_policy for _, demand in chosen)


def combinations(config: TrainConfig, written: Container[str] = ()) -> Iterator[str]:
    """What contradicts what, each with the reason and the remedy. ``written``: the keys that the user set himself."""
    for choice, demand in demands(config.algorithm.advantage.name, config.algorithm.policy_loss.name):
        yield from _on_policy(config, choice, demand)
        yield from _weight(config, choice, demand)
        yield from _named_rewards(config, choice, demand)
    yield from _kl(config, written)


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


def _kl(config: TrainConfig, written: Container[str]) -> Iterator[str]:
    kl = config.algorithm.kl
    off = kl.coefficient == 0
    if kl.importance and (off or kl.where == "reward"):
        why = "algorithm.kl.coefficient is 0" if off else "the KL is in the reward, which has no gradient"
        yield f"algorithm.kl.importance=true is not used, because {why}; leave it out, or put the KL into the loss"
    if kl.target is not None and off:
        yield (
            f"algorithm.kl.target={kl.target:g} is not used, because algorithm.kl.coefficient is 0, and 0 cannot grow; set "
            "algorithm.kl.coefficient to where it shall begin, for example 0.01"
        )
    if kl.target is None and "algorithm.kl.horizon" in written and kl.horizon != type(kl)().horizon:
        yield f"algorithm.kl.horizon={kl.horizon:g} is not used, because algorithm.kl.target is null: leave it out"
