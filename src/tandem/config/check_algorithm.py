"""Whether the parts of an algorithm fit together; the demands themselves are data, in `compatibility`."""

import re
from collections.abc import Iterator

from tandem.config.compatibility import Demands, demands
from tandem.config.experiment import TrainConfig

TERM = re.compile(r"(?:^|\+)\s*(?:[-\d.eE]+\s*\*\s*)?([A-Za-z_]\w*)(?=\s*(?:\(|\+|$))")
"""The name of each term of a sum of rewards."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

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
    for reward in _rewards(config):
        if "*" in reward and ".py:" not in reward:
            yield (
                f"{choice} contradicts the factors of reward={reward!r}, because {demand.named_rewards} and brings it to "
                "variance 1; leave them out, and weigh with algorithm.advantage.weights='NAME=FACTOR,…'"
            )
    yield from _weights_of_rewards(config)


def _rewards(config: TrainConfig) -> list[str]:
    """All that the run names, without repeats."""
    sources = (config.train_dataset.sources, config.valid_dataset.sources)
    return list(dict.fromkeys([config.reward, *(one.reward for some in sources for one in some if one.reward)]))


def _weights_of_rewards(config: TrainConfig) -> Iterator[str]:
    """`algorithm.advantage.weights`: its form, and its names where the rewards tell theirs."""
    key, text = "algorithm.advantage.weights", config.algorithm.advantage.knobs.get("weights", "")
    rewards = _rewards(config)
    names = {name for reward in rewards for name in TERM.findall(reward)} if all("+" in one for one in rewards) else set()
    for part in filter(None, (part.strip() for part in str(text).split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if not name or not NUMBER.fullmatch(number):
            yield f"{key} must be NAME=NUMBER, several with commas between them, such as math=1,format=0.5; got {part!r}"
        elif names and name not in names:
            yield f"{key} names {name!r}, and the rewards are {', '.join(sorted(names))}; name one of them, or leave it out"
