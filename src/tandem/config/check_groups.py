"""Checks of groups, prompts and earlier batches against the rest of the configuration."""

from collections.abc import Container, Iterator

from tandem.config.arithmetic import workflow_of
from tandem.config.check_algorithm import NAMED, corrects_itself
from tandem.config.experiment import TrainConfig
from tandem.config.parts import part_of


def groups(config: TrainConfig, written: Container[str] = ()) -> Iterator[str]:
    """A message for each contradiction. ``written``: the keys that the user set."""
    yield from _part(config)
    if config.algorithm.labels == "majority":
        yield from _majority(config, written)
    yield from _program(config, written)
    yield from _curriculum(config)
    yield from _replay(config, written)
    yield from _first_token(config, written)


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


def _first_token(config: TrainConfig, written: Container[str]) -> Iterator[str]:
    sampling, correction = config.gconfig, config.algorithm.correction
    hot = sampling.first_token_temperature
    if hot is not None and not sampling.train_first_token and sampling.max_new_tokens < 2:
        yield "gconfig.first_token_temperature masks the first token, and gconfig.max_new_tokens=1 leaves no other to learn"
    none = correction.weight == correction.reject.name == "none" and not corrects_itself(config)
    if hot is not None and sampling.train_first_token and none and "algorithm.correction.weight" not in written:
        yield (
            f"gconfig.train_first_token=true trains on tokens drawn at temperature {hot:g}, but algorithm.correction.weight "
            "is none; use truncate or mask, write algorithm.correction.weight=none, or leave gconfig.train_first_token out"
        )
