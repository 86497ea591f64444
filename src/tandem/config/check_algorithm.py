"""Checks an algorithm: names, knobs and requirements of its parts (by their records), groups, critic and constraint."""

import re
from collections.abc import Container, Iterator, Mapping

from tandem.config.algorithm import Component
from tandem.config.arithmetic import rewards_of, workflow_of
from tandem.config.errors import nearest_names
from tandem.config.experiment import TrainConfig
from tandem.config.keys import leaves
from tandem.config.parts import PARTS, PartRecord, part_of
from tandem.config.train_engine import CriticConfig


def constraint_problems(config: TrainConfig) -> Iterator[str]:
    """Yields a message for each setting that contradicts the constraint. That its cost is a term of the reward is checked
    when the run is planned."""
    constraint, algorithm = config.constraint, config.algorithm
    if constraint.cost is None:
        return
    key = f"constraint.cost={constraint.cost}"
    if algorithm.labels == "majority":
        yield f"{key} contradicts algorithm.labels=majority, which replaces all rewards by a vote; leave one of them out"
    if algorithm.filter.name != "none":
        yield (
            f"{key} contradicts algorithm.filter={algorithm.filter.name}, which leaves out groups by their rewards, so that "
            "the mean cost would be that of the others alone; set algorithm.filter=none"
        )
    if part_of("advantage", algorithm.advantage.name).needs_named_rewards:
        yield (
            f"{key} contradicts algorithm.advantage={algorithm.advantage.name}, which brings each part of the reward to "
            "variance 1, so that the multiplier would change nothing; use algorithm.advantage=grpo"
        )


SHARED = {"shared", "loss_weight", "value_clip"}
"""Keys that are used with `critic.shared=true`."""


def critic_problems(config: TrainConfig) -> Iterator[str]:
    """Yields a message for each key of `critic` that is not used, or whose value leaves the actor no step."""
    advantage, critic, steps = config.algorithm.advantage.name, config.critic, config.total_train_steps
    default = dict(leaves(CriticConfig()))
    changed = {name: value for name, value in leaves(critic) if value != default[name]}
    part = part_of("advantage", advantage)
    if part.known and not part.needs_critic:
        for name, value in changed.items():
            yield (
                f"critic.{name}={value} is not used, because algorithm.advantage={advantage} needs no critic; "
                "use algorithm=ppo, or leave it out"
            )
        return
    if critic.shared:
        for name in sorted(set(changed) - SHARED):
            yield (
                f"critic.{name}={changed[name]} is not used with critic.shared=true, where the critic is a head of the "
                "actor's model and learns in its steps; leave it out, or set critic.shared=false"
            )
    elif "loss_weight" in changed:
        yield (
            f"critic.loss_weight={critic.loss_weight:g} is only for critic.shared=true; leave it out. A critic with its own "
            "optimizer has its own learning rate, critic.optimizer.lr"
        )
    if steps is not None and critic.warmup_steps >= steps:
        yield (
            f"critic.warmup_steps must be below total_train_steps ({steps}), got {critic.warmup_steps}; "
            "the actor would never learn"
        )
    if critic.optimizer.schedule == "constant" and critic.optimizer.min_lr_ratio:
        yield (
            f"critic.optimizer.min_lr_ratio={critic.optimizer.min_lr_ratio:g} is not used by the constant schedule; "
            "set critic.optimizer.schedule to linear or cosine, or leave it out"
        )


def groups(config: TrainConfig, written: Container[str] = ()) -> Iterator[str]:
    """Yields a message for each problem with groups, labels, curriculum or replay. ``written``: the keys that the user
    set."""
    yield from _part(config)
    if config.algorithm.labels == "majority":
        yield from _majority(config, written)
    yield from _program(config, written)
    yield from _curriculum(config)
    yield from _replay(config, written)
    yield from _first_token(config)


def _part(config: TrainConfig) -> Iterator[str]:
    algorithm, n = config.algorithm, config.gconfig.n_samples
    if algorithm.update_samples is not None and algorithm.update_samples > n:
        yield f"algorithm.update_samples must be at most gconfig.n_samples ({n}), got {algorithm.update_samples}"


def _program(config: TrainConfig, written: Container[str]) -> Iterator[str]:
    if "reward" not in written or not config.workflow:
        return
    workflow = workflow_of(config)
    if workflow.name == "program" and workflow.knobs.get("reward_from") == "exit":
        yield (
            f"reward={config.reward} is not used, because workflow_args.reward_from=exit judges by the exit code; leave one "
            "of them out"
        )


def _curriculum(config: TrainConfig) -> Iterator[str]:
    curriculum = config.curriculum
    if curriculum.round_rows is not None and config.train_dataset.sources:
        yield "curriculum.round_rows draws by success rate and train_dataset.sources by weight; keep one of them"
    if curriculum.round_rows is not None and not config.train_dataset.shuffle:
        yield "train_dataset.shuffle=false contradicts curriculum.round_rows, which draws rows anew; leave one of them out"


def _majority(config: TrainConfig, written: Container[str]) -> Iterator[str]:
    algorithm, key = config.algorithm, "algorithm.labels=majority"
    if config.gconfig.n_samples < 2:
        yield f"gconfig.n_samples must be at least 2 for {key}, got {config.gconfig.n_samples}; one sample has no majority"
    advantage = part_of("advantage", algorithm.advantage.name)
    if advantage.needs_greedy:
        yield (
            f"algorithm.advantage={algorithm.advantage.name} compares with a greedy answer, which does not vote; with {key} "
            "use algorithm.advantage=grpo"
        )
    if advantage.needs_named_rewards:
        yield (
            f"algorithm.advantage={algorithm.advantage.name} contradicts {key}, because {NAMED}, and a vote is one reward "
            "without a name; use algorithm.advantage=grpo"
        )
    if workflow_of(config).name == "multi_turn":
        yield (
            f"workflow=multi_turn asks after each turn whether the answer is right, which {key} cannot know; "
            "use workflow=rlvr"
        )
    if "reward" in written and config.reward != TrainConfig.reward and config.evaluate.every_steps is None:
        yield (
            f"reward={config.reward} is not used, because {key} judges by the vote and evaluate.every_steps is null; "
            "leave one of them out"
        )


def _replay(config: TrainConfig, written: Container[str]) -> Iterator[str]:
    replay, correction = config.rollout.replay, config.algorithm.correction
    none = correction.weight == correction.reject.name == "none" and not corrects_itself(config)
    if replay.groups and none and not config.async_training and "algorithm.correction.weight" not in written:
        yield (
            f"rollout.replay.groups={replay.groups} trains on tokens of older versions, but algorithm.correction.weight is "
            "none; use truncate or mask, or write algorithm.correction.weight=none to go without"
        )


def _first_token(config: TrainConfig) -> Iterator[str]:
    if config.gconfig.first_token_temperature is not None and config.gconfig.max_new_tokens < 2:
        yield "gconfig.first_token_temperature masks the first token, and gconfig.max_new_tokens=1 leaves no other to learn"


TERM = re.compile(r"(?:^|\+)\s*(?:[-\d.eE]+\s*\*\s*)?([A-Za-z_]\w*)(?=\s*(?:\(|\+|$))")
"""Matches the name of each term in a sum of rewards."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

SEQUENCE = "its ratio is one for the whole trajectory, and a weight of single tokens would undo that"
NAMED = "it judges each named reward by itself"


def demands(config: TrainConfig) -> tuple[tuple[str, PartRecord], ...]:
    """Returns (key=value, record) of the advantage and of the policy loss."""
    advantage, loss = config.algorithm.advantage.name, config.algorithm.policy_loss.name
    return (
        (f"algorithm.advantage={advantage}", part_of("advantage", advantage)),
        (f"algorithm.policy_loss={loss}", part_of("policy_loss", loss)),
    )


def corrects_itself(config: TrainConfig) -> bool:
    """True if stale tokens need no correction: the algorithm corrects for them itself, or does not allow them."""
    return any(part.corrects_itself or part.on_policy for _, part in demands(config))


def part_problems(config: TrainConfig) -> Iterator[str]:
    """Yields a message, with reason and remedy, for each unknown name, invalid knob and contradiction."""
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
    """Yields a message for each problem with a component's name or knobs. ``filled``: values of knobs that are not set."""
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
            known = f"it has {', '.join(part.knobs)}" if part.knobs else "it has no knobs"
            users = [other for other, record in PARTS[kind].items() if name in record.knobs]
            other = " or ".join(users) or f"another {kind}"
            yield f"{key}.{name}={value} is not used by {component.name}; {known}. Leave it out, or choose {other}"
    for name, rule in part.knobs.items():
        low, high = values[name], values.get(rule.at_most)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            yield f"{key}.{name} must be at most {key}.{rule.at_most} ({high}), got {low}"


def _bounds(config: TrainConfig) -> Iterator[str]:
    correction = config.algorithm.correction
    part = part_of("correction.weight", correction.weight)
    for bound, value in (("low", correction.low), ("high", correction.high)):
        if value and part.knobs and bound not in part.knobs:
            users = " or ".join(name for name, record in PARTS["correction.weight"].items() if bound in record.knobs)
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
    """Yields a message for each wrong entry of `algorithm.advantage.weights`. Names are checked if all rewards are sums."""
    key, text = "algorithm.advantage.weights", config.algorithm.advantage.knobs.get("weights", "")
    rewards = rewards_of(config)
    are_sums = all("+" in reward for reward in rewards)
    names = {name for reward in rewards for name in TERM.findall(reward)} if are_sums else set()
    for part in filter(None, (part.strip() for part in str(text).split(","))):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if not name or not NUMBER.fullmatch(number):
            yield f"{key} must be NAME=NUMBER, several with commas between them, such as math=1,format=0.5; got {part!r}"
        elif names and name not in names:
            yield f"{key} names {name!r}, and the rewards are {', '.join(sorted(names))}; name one of them, or leave it out"
