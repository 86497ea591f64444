"""The objects of a run, made from its configuration: each function makes one, so that a script can take them one by one."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.algorithms.registry import FILTERS
from tandem.api.engines import InferenceEngine
from tandem.api.plugins import in_user_code, is_file_spec, load_object
from tandem.api.samples import Group
from tandem.api.workflow import RewardFn, RewardResult, RolloutWorkflow
from tandem.config.arithmetic import max_head_offpolicyness
from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.config.train_engine import TrainEngineConfig
from tandem.data.dataset import Dataset, load_dataset
from tandem.rewards.build import build_reward
from tandem.roles.actor import choose_parts
from tandem.roles.components import choose
from tandem.rollout.executor import MAX_DRAWS, GroupFilter, Rollout
from tandem.rollout.workflows import MultiTurnWorkflow, Repeated, RLVRWorkflow, WholeGroup
from tandem.tracking.sinks.base import find_sink
from tandem.trainers.own_workflow import FunctionWorkflow, checked_workflow, taken_arguments

WORKFLOWS: dict[str, type[RolloutWorkflow]] = {"rlvr": RLVRWorkflow, "multi_turn": MultiTurnWorkflow}


@dataclass(frozen=True)
class Rows:
    """Rows for training, and for evaluation (empty when the run never evaluates)."""

    train: Dataset
    valid: Sequence[dict[str, Any]]


def open_rows(config: BaseConfig) -> Rows:
    """Loads the data sets.

    Raises:
        ConfigError: missing or empty data, missing columns, broken lines; names the file.
    """
    train = load_dataset(config.train_dataset, seed=config.seed, default_split="train")
    if not config.evaluate.every_steps:
        return Rows(train, ())
    valid = load_dataset(validation_config(config), seed=config.seed, default_split="test")
    return Rows(train, valid[: config.evaluate.max_rows])


def validation_config(config: BaseConfig) -> DatasetConfig:
    """`valid_dataset`; without a path the test split of the training data, with what `valid_dataset` changes of it."""
    valid = config.valid_dataset
    if valid.path is not None or valid.sources:
        rows = DatasetConfig(path=valid.path, sources=valid.sources)
    else:
        rows = replace(config.train_dataset, split=None, max_rows=None)
    names = ("split", "prompt_column", "answer_column", "max_rows", "size", "prompt_suffix")
    return replace(rows, **{name: getattr(valid, name) for name in names if getattr(valid, name) is not None})


class RewardBySource(RewardFn):
    """Gives each row to the reward of its data set."""

    def __init__(self, default: RewardFn, by_name: Mapping[str, RewardFn]):
        self.default, self.by_name = default, by_name

    def of(self, row: Mapping[str, Any]) -> RewardFn:
        """The reward of a row."""
        name = row.get("reward_name")
        return self.by_name[name] if name else self.default

    async def __call__(self, *, row: Mapping[str, Any], **rest: Any) -> RewardResult:
        """See `RewardFn`."""
        return await self.of(row)(row=row, **rest)

    def close(self) -> None:
        """Closes all of them."""
        for reward in (self.default, *self.by_name.values()):
            reward.close()


def check_columns(reward: RewardBySource, rows: Iterable[Mapping[str, Any]]) -> None:
    """Asks the reward of each data set, at its first row, whether the columns that it needs are there.

    Raises:
        ConfigError: one is missing; names those there.
    """
    seen = set()
    for row in rows:
        if row["source"] not in seen:
            seen.add(row["source"])
            check = getattr(reward.of(row), "check_columns", None)
            if check is not None:
                check(row)


def make_reward(config: TrainConfig) -> RewardBySource:
    """The run's reward, and those that single sources name."""
    sources = (*config.train_dataset.sources, *config.valid_dataset.sources)
    names = {source.reward for source in sources if source.reward}
    by_name = {name: build_reward(name, timeout_s=config.reward_timeout_s) for name in sorted(names)}
    return RewardBySource(build_reward(config.reward, timeout_s=config.reward_timeout_s), by_name)


def find_workflow(name: str) -> Callable[..., Any]:
    """The class or coroutine function that `workflow` names.

    Raises:
        ConfigError: there is none; tells the nearest name.
    """
    if is_file_spec(name):
        return load_object(name)
    if name not in WORKFLOWS:
        near = get_close_matches(name, WORKFLOWS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no workflow is called {name!r}; {hint}There are: {', '.join(WORKFLOWS)}, and my_file.py:Name")
    return WORKFLOWS[name]


def check_names(config: TrainConfig) -> None:
    """Resolves everything that the configuration names, before a folder is made or a model is loaded.

    Raises:
        ConfigError: a reward, workflow, part of the algorithm or sink that is not there.
    """
    make_reward(config).close()
    taken_arguments(find_workflow(config.workflow), config)
    make_filter(config)
    choose_parts(config.algorithm, config.gconfig.max_new_tokens)
    check_sinks(config)


def check_sinks(config: BaseConfig) -> None:
    """Imports the libraries of all sinks.

    Raises:
        ConfigError: a sink that is not there; says what to install.
    """
    for sink in config.tracking.sinks:
        find_sink(sink)


def make_workflow(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, reward: RewardFn, gconfig: GenerationConfig
) -> RolloutWorkflow:
    """The workflow of one sample that `workflow` names: a registered one, or a class or function in a file.

    It is given whichever of ``reward, gconfig, tokenizer, system_prompt, chat_template_kwargs`` its signature takes. A
    function ``async def episode(engine, data, …)`` is a workflow too.

    Raises:
        ConfigError: see `taken_arguments`; or its constructor raises, or makes something else.
    """
    make = find_workflow(config.workflow)
    available = {
        "reward": reward,
        "gconfig": gconfig,
        "tokenizer": tokenizer,
        "system_prompt": config.system_prompt,
        "chat_template_kwargs": dict(config.chat_template_kwargs),
    }
    taken = {name: available[name] for name in taken_arguments(make, config)}
    if inspect.iscoroutinefunction(make):
        return FunctionWorkflow(make, taken)
    return checked_workflow(in_user_code(config.workflow, make, **taken), config)


def training_workflow(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, reward: RewardFn) -> RolloutWorkflow:
    """`n_samples` of the workflow for each prompt, or the workflow itself where it makes the whole group."""
    one = make_workflow(config, tokenizer, reward, config.gconfig)
    if one.makes_group:
        return WholeGroup(one, config.rollout.min_group_size)
    return Repeated(one, config.gconfig.n_samples, min_group_size=config.rollout.min_group_size)


def reference_config(config: TrainConfig) -> TrainEngineConfig:
    """The frozen policy: the actor's model and precision unless `reference` says otherwise."""
    path, dtype = config.reference.path or config.actor.path, config.reference.dtype or config.actor.dtype
    fields = {f.name: getattr(config.actor, f.name) for f in dataclasses.fields(TrainEngineConfig)}
    return TrainEngineConfig(**fields | {"path": path, "dtype": dtype})


def make_filter(config: TrainConfig) -> tuple[GroupFilter | None, int]:
    """Which groups are trained on, as the executor asks it (None: all), and how often a batch may be drawn for it."""
    if config.algorithm.filter.name == "none":
        return None, MAX_DRAWS
    choice = choose(FILTERS, config.algorithm.filter, "algorithm.filter")

    def keeps(group: Group) -> tuple[bool, str]:
        counted = [sample for sample in group.samples if sample.in_statistics]
        if not counted:
            return False, "no_sample_counts"
        return choice(accuracies=[s.accuracy for s in counted], rewards=[s.reward for s in counted])

    return keeps, int(choice.knobs.get("max_draws", MAX_DRAWS))


def make_rollout(config: TrainConfig, engine: InferenceEngine | None) -> Rollout:
    """The executor with the run's staleness bound and filter; ``engine`` is None on ranks other than 0."""
    group_filter, max_draws = make_filter(config)
    return Rollout(
        engine,
        config.rollout,
        seed=config.seed,
        deterministic=config.deterministic,
        group_filter=group_filter,
        max_draws=max_draws,
        max_head_offpolicyness=max_head_offpolicyness(config),
    )
