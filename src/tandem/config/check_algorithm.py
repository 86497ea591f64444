"""Checks of the parts of an algorithm, by their records: names, knobs, and what they demand of the rest."""

import re
from collections.abc import Iterator, Mapping

from tandem.config.algorithm import Component
from tandem.config.arithmetic import rewards_of
from tandem.config.experiment import TrainConfig
from tandem.config.nearest import nearest_names
from tandem.config.parts import PARTS, PartRecord, part_of

TERM = re.compile(r"(?:^|\+)\s*(?:[-\d.eE]+\s*\*\s*)?([A-Za-z_]\w*)(?=\s*(?:\(|\+|$))")
"""The name of each term of a sum of rewards."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

SEQUENCE = "its ratio is one for the whole trajectory, and a weight of single tokens would undo that"
NAMED = "it judges each named reward by itself"


def demands(config: TrainConfig) -> tuple[tuple[str, PartRecord], ...]:
    """(key=value, record) of the advantage and of the policy loss."""
    advantage, loss = config.algorithm.advantage.name, config.algorithm.policy_loss.name
    return (
        (f"algorithm.advantage={advantage}", part_of("advantage", advantage)),
        (f"algorithm.policy_loss={loss}", part_of("policy_loss", loss)),
    )


def corrects_itself(config: TrainConfig) -> bool:
    """True if stale tokens need no further correction, or may not be trained on at all."""
    return any(part.corrects_itself or part.on_policy for _, part in demands(config))


def part_problems(config: TrainConfig) -> Iterator[str]:
    """Names that are not known, knobs that are wrong, and what contradicts what, each with the reason and the remedy."""
    algorithm, filled = config.algorithm, {"max_tokens": config.gconfig.max_new_tokens}
    for kind in ("advantage", "policy_loss", "aggregation", "filter", "token_filter"):
        yield from component_problems(kind, f"algorithm.{kind}", getattr(algorithm, kind), filled)
    correction = {"weight": Component(algorithm.correction.weight), "reject": algorithm.correction.reject}
    for name, chosen in correction.items():
        yield from component_problems(f"correction.{name}", f"algorithm.correction.{name}", chosen)
    for i, shaping in enumerate(algorithm.shaping):
        yield from component_problems("shaping", f"algorithm.shaping[{i}]", shaping, filled)
    yield from _bounds(config)
    yield from _group(config)
    yield from _whitening(config)
    for choice, part in demands(config):
        yield from _on_policy(config, choice, part)
        yield from _weight(config, choice, part)
        yield from _named_rewards(config, choice, part)


def component_problems(
    kind: str, key: str, component: Component, filled: Mapping[str, float] | None = None
) -> Iterator[str]:
    """Problems of one choice: its name, its knobs. ``filled``: values of knobs where none is set."""
    part, in_file = part_of(kind, component.name), component.name.rpartition(":")[0].endswith(".py")
    if not part.known:
        if not in_file:  # the signature of my_file.py:function is checked when it is loaded
            near = nearest_names(component.name, PARTS[kind])
            yield f"{key}={component.name} is not known; {near}, or my_file.py:function"
        return
    values = {name: rule.default for name, rule in part.knobs.items()} | dict(component.knobs)
    values |= {name: value for name, value in (filled or {}).items() if name in part.knobs and values[name] is None}
    for name, value in component.knobs.items():
        if name in part.knobs:
            if not part.knobs[name].allows(value):
                yield f"{key}.{name} must be {part.knobs[name].rule()}, got {value}"
        elif not in_file:
            there = f"it has {', '.join(part.knobs)}" if part.knobs else "it has no knobs"
            users = [other for other, its in PARTS[kind].items() if name in its.knobs]
            other = " or ".join(users) or f"another {kind}"
            yield f"{key}.{name}={value} is not used by {component.name}; {there}. Leave it out, or choose {other}"
    for name, rule in part.knobs.items():
        low, high = values[name], values.get(rule.at_most)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            yield f"{key}.{name} must be at most {key}.{rule.at_most} ({high}), got {low}"


def _bounds(config: TrainConfig) -> Iterator[str]:
    correction = config.algorithm.correction
    part = part_of("correction.weight", correction.weight)
    for bound, value in (("low", correction.low), ("high", correction.high)):
        if value and part.knobs and bound not in part.knobs:
            users = " or ".join(name for name, its in PARTS["correction.weight"].items() if bound in its.knobs)
            yield (
                f"algorithm.correction.{bound}={value:g} is not used with weight={correction.weight}: set "
                f"algorithm.correction.weight={users}, or leave it out"
            )
    if part.drops_outside and correction.highest < 1:
        yield (
            f"algorithm.correction.high must be at least 1 with weight={correction.weight}, got {correction.highest:g}; "
            "tokens of the current policy have ratio 1 and would all be dropped"
        )
    if part.drops_outside and correction.low >= correction.highest:
        yield (
            f"algorithm.correction.low must be below algorithm.correction.high ({correction.highest:g}), "
            f"got {correction.low:g}; every token would be dropped"
        )


def _group(config: TrainConfig) -> Iterator[str]:
    advantage, n = config.algorithm.advantage.name, config.gconfig.n_samples
    if not part_of("advantage", advantage).needs_group:
        return
    compares = f"for algorithm.advantage={advantage}, which compares the samples of a prompt, got"
    if n < 2:
        yield f"gconfig.n_samples must be at least 2 {compares} {n}; every advantage would be 0"
    if config.algorithm.update_samples == 1:
        yield f"algorithm.update_samples must be at least 2 {compares} 1; every advantage would be 0"


def _whitening(config: TrainConfig) -> Iterator[str]:
    algorithm, advantage = config.algorithm, config.algorithm.advantage
    samples = min(config.gconfig.n_samples, algorithm.update_samples or config.gconfig.n_samples)
    if algorithm.whitening == "group" and samples < 2:
        key = "gconfig.n_samples" if config.gconfig.n_samples < 2 else "algorithm.update_samples"
        yield (
            f"{key} must be at least 2 for algorithm.whitening=group, which compares the samples of a prompt, got "
            f"{samples}; raise it, or use algorithm.whitening=batch"
        )
    off = advantage.knobs.get("whitened") is False
    if algorithm.whitening == "batch" and part_of("advantage", advantage.name).whitens and not off:
        yield (
            f"algorithm.whitening=batch changes nothing with algorithm.advantage={advantage.name}, which whitens over the "
            "batch's tokens itself; leave it out, or use algorithm.whitening=group"
        )
    if algorithm.whitening != "none" and off:
        yield (
            f"algorithm.advantage.whitened=false changes nothing with algorithm.whitening={algorithm.whitening}, which "
            "whitens afterwards; leave one of them out"
        )


def _on_policy(config: TrainConfig, choice: str, part: PartRecord) -> Iterator[str]:
    if not part.on_policy:
        return
    updates = config.actor.mini_batches * config.actor.epochs_per_batch
    if config.async_training:
        yield f"{choice} contradicts async_training=true, because {part.on_policy}; set async_training=false"
    if config.rollout.replay.groups:
        yield (
            f"{choice} contradicts rollout.replay.groups={config.rollout.replay.groups}, because {part.on_policy}; "
            "set it to 0"
        )
    if updates > 1:
        yield (
            f"{choice} takes one optimizer step for each batch, because {part.on_policy}; set actor.mini_batches=1 and "
            f"actor.epochs_per_batch=1, got {updates} steps"
        )


def _weight(config: TrainConfig, choice: str, part: PartRecord) -> Iterator[str]:
    correction = config.algorithm.correction
    if correction.weight == "none":
        return
    if part.no_weight:
        yield (
            f"{choice} contradicts algorithm.correction.weight={correction.weight}, because {part.no_weight}; set "
            "algorithm.correction.weight=none (a rule under algorithm.correction.reject may stay)"
        )
    if part.sequence_ratio and correction.level != "sequence":
        yield (
            f"{choice} contradicts algorithm.correction.level={correction.level}, because {SEQUENCE}; set "
            "algorithm.correction.level=sequence"
        )


def _named_rewards(config: TrainConfig, choice: str, part: PartRecord) -> Iterator[str]:
    if not part.needs_named_rewards:
        return
    kl = config.algorithm.kl
    if kl.in_reward:
        yield f"{choice} contradicts algorithm.kl.where=reward, because {NAMED}; set algorithm.kl.where=loss"
    for i, shaping in enumerate(config.algorithm.shaping):
        if not part_of("shaping", shaping.name).keeps_rewards:
            yield (
                f"{choice} contradicts algorithm.shaping[{i}]={shaping.name}, because {NAMED}; leave it out, "
                "or make it a reward with a name"
            )
    for reward in rewards_of(config):
        if "*" in reward and ".py:" not in reward:
            yield (
                f"{choice} contradicts the factors of reward={reward!r}, because {NAMED} and brings it to "
                "variance 1; leave them out, and weigh with algorithm.advantage.weights='NAME=FACTOR,…'"
            )
    yield from _weights_of_rewards(config)


def _weights_of_rewards(config: TrainConfig) -> Iterator[str]:
    """`algorithm.advantage.weights`: its form, and its names where the rewards tell theirs."""
    key, text = "algorithm.advantage.weights", config.algorithm.advantage.knobs.get("weights", "")
    rewards = rewards_of(config)
    names = {name for reward in rewards for name in TERM.findall(reward)} if all("+" in one for one in rewards) else set()
    for part in filter(None, (part.strip() for part in str(text).split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if not name or not NUMBER.fullmatch(number):
            yield f"{key} must be NAME=NUMBER, several with commas between them, such as math=1,format=0.5; got {part!r}"
        elif names and name not in names:
            yield f"{key} names {name!r}, and the rewards are {', '.join(sorted(names))}; name one of them, or leave it out"
