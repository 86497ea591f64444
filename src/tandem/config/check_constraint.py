"""Rules for the constraint's section."""

from collections.abc import Iterator

from tandem.config.experiment import TrainConfig
from tandem.config.parts import part_of


def constraint_problems(config: TrainConfig) -> Iterator[str]:
    """What contradicts a constraint; that its cost is a term of the reward is seen when the run is planned."""
    constraint, algorithm = config.constraint, config.algorithm
    low, start, high = constraint.min_multiplier, constraint.multiplier, constraint.max_multiplier
    if not low <= start <= high:
        yield (
            f"constraint.multiplier must lie between constraint.min_multiplier ({low:g}) and constraint.max_multiplier "
            f"({high:g}), got {start:g}"
        )
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
