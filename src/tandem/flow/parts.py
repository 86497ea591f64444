"""The objects of a run, made from its configuration: each function makes one, so that a script can take them one by one."""

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.algorithms.registry import FILTERS
from tandem.api.engines import InferenceEngine
from tandem.api.plugins import in_user_code, is_file_spec, load_object
from tandem.api.samples import Group
from tandem.api.team import Team
from tandem.api.workflow import RewardFn, RewardResult, RolloutWorkflow, messages_for
from tandem.config.arithmetic import max_head_offpolicyness, rewards_of, samples_together, workflow_of
from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.config.nearest import nearest_names
from tandem.data.curriculum import Curriculum
from tandem.data.dataset import Dataset, load_dataset
from tandem.data.loader import Loader
from tandem.flow.own_workflow import FunctionWorkflow, checked_workflow, taken_arguments
from tandem.flow.plan import plan_run
from tandem.rewards.build import build_reward, worker_counts
from tandem.rewards.majority import AnswerOnly, MajorityVote
from tandem.rewards.pool import most_workers
from tandem.roles.components import choose
from tandem.rollout.executor import MAX_DRAWS, GroupFilter, GroupObserver, GroupScorer, Rollout
from tandem.rollout.groups import FirstSamples, MajorityLabels, WholeGroup, WithGreedyBaseline
from tandem.rollout.multi_turn import MultiTurnWorkflow
from tandem.rollout.workflows import Repeated, RLVRWorkflow
from tandem.sandbox.choose import choose_sandbox
from tandem.tracking.sinks.base import find_sink

log = logging.getLogger(__name__)

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
    if isinstance(config, TrainConfig) and (config.curriculum.round_rows or 0) > len(train.rows):
        raise ConfigError(
            f"curriculum.round_rows must be at most the rows of train_dataset ({len(train.rows)}), "
            f"got {config.curriculum.round_rows}"
        )
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
    names = ("split", "prompt_column", "answer_column", "columns", "max_rows", "size", "prompt_suffix")
    own = {name: getattr(valid, name) for name in names}
    return replace(rows, **{name: value for name, value in own.items() if value is not None and value != {}})


class RewardBySource(RewardFn):
    """Gives each row to the reward of its data set. ``vote``: who judges in training instead, where there are no labels."""

    def __init__(self, default: RewardFn, by_name: Mapping[str, RewardFn], vote: MajorityVote | None = None):
        self.default, self.by_name, self.vote = default, by_name, vote
        self.reads_messages = any(reward.reads_messages for reward in (default, *by_name.values()))
        self._waits = (0, 0.0, 0.0)  # since the last call of `metrics`: samples, seconds of all of them, of the slowest

    def of(self, row: Mapping[str, Any]) -> RewardFn:
        """The reward of a row."""
        name = row.get("reward_name")
        return self.by_name[name] if name else self.default

    async def __call__(
        self, *, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]] = (), **rest: Any
    ) -> RewardResult:
        """See `RewardFn`."""
        began, reward = time.perf_counter(), self.of(row)
        try:
            return await reward(row=row, **rest, **messages_for(reward, messages))
        finally:
            waited_s = time.perf_counter() - began
            samples, total_s, longest_s = self._waits
            self._waits = samples + 1, total_s + waited_s, max(longest_s, waited_s)

    def metrics(self) -> dict[str, float]:
        """Of the samples that were judged since the last call: seconds until their reward was there, and what the rewards
        count themselves. Empty without any."""
        (samples, total_s, longest_s), self._waits = self._waits, (0, 0.0, 0.0)
        times = {"time/judge_s": total_s / samples, "time/judge_max_s": longest_s} if samples else {}
        own = {
            name: value
            for one in dict.fromkeys((self.default, *self.by_name.values()))
            for name, value in one.metrics().items()
        }
        return times | own

    def close(self) -> None:
        """Closes all of them."""
        for reward in (self.default, *self.by_name.values()):
            reward.close()
        if self.vote is not None:
            self.vote.close()


def check_rows(reward: RewardBySource, rows: Iterable[Mapping[str, Any]]) -> None:
    """Asks each row's reward whether the row has what it needs. A vote needs nothing.

    A data set whose first row cannot be judged is refused; single later ones are a warning, and each is dropped with its
    reason when it is drawn.

    Raises:
        ConfigError: the first row of a data set lacks a column, an answer, a number; says what is there.
    """
    seen: set[str] = set()
    unfit: dict[str, tuple[int, int, str]] = {}
    for number, row in enumerate(rows if reward.vote is None else (), 1):
        source, is_first = row["source"], row["source"] not in seen
        seen.add(source)
        check = getattr(reward.of(row), "check_row", None)
        try:
            if check is not None:
                check(row)
        except ConfigError as error:
            if is_first:
                raise
            count, first, words = unfit.get(source, (0, number, str(error)))
            unfit[source] = (count + 1, first, words)
    for source, (count, first, words) in unfit.items():
        log.warning(
            "%d row%s of data set %r cannot be judged and will be dropped when drawn; the first is row %d: %s",
            count,
            "" if count == 1 else "s",
            source,
            first,
            words,
        )


def make_reward(config: TrainConfig) -> RewardBySource:
    """The run's reward, and those that single sources name.

    Raises:
        ConfigError: see `build_reward`; or `reward_workers` is set, and no reward runs in workers, or all that do say
            themselves how many they have.
    """
    timeout_s, workers = config.reward_timeout_s, config.reward_workers or most_workers(samples_together(config))
    by_name = {
        spec: build_reward(spec, timeout_s=timeout_s, workers=workers, models_later=True, sandbox=choose_sandbox)
        for spec in rewards_of(config)
    }
    default = by_name[config.reward]
    vote = MajorityVote(timeout_s=timeout_s, workers=workers) if config.algorithm.labels == "majority" else None
    reward = RewardBySource(default, by_name, vote)
    counts = {count for one in (default, *by_name.values()) for count in worker_counts(one)}
    if config.reward_workers not in (None, *counts) and vote is None:
        reward.close()
        why = "says itself how many workers it has" if counts else "runs inside the run and has no worker processes"
        raise ConfigError(
            f"reward_workers={config.reward_workers} is not used: reward={config.reward} {why}; leave reward_workers out"
        )
    return reward


def find_workflow(name: str) -> Callable[..., Any]:
    """The class or coroutine function that `workflow` names.

    Raises:
        ConfigError: there is none; tells the nearest name.
    """
    if is_file_spec(name):
        return load_object(name)
    if name not in WORKFLOWS:
        raise ConfigError(f"no workflow is called {name!r}; {nearest_names(name, WORKFLOWS)}, and my_file.py:Name")
    return WORKFLOWS[name]


def check_names(config: TrainConfig) -> None:
    """Resolves everything that the configuration names, before a folder is made or a model is loaded; except the rewards
    that judge inside episodes, which `check_start` makes.

    Raises:
        ConfigError: a workflow, part of the algorithm or sink that is not there.
    """
    workflow = find_workflow(workflow_of(config).name)
    taken_arguments(workflow, config)
    if plan_run(config).greedy_baseline and getattr(workflow, "makes_group", False):
        raise ConfigError(
            f"algorithm.advantage={config.algorithm.advantage.name} compares with a greedy answer of one sample, and "
            f"workflow={config.workflow} makes a whole group; use algorithm.advantage=grpo, or a workflow of one sample"
        )
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

    It is given whichever of ``reward, gconfig, tokenizer, system_prompt, chat_template_kwargs`` its signature takes, and its
    knobs. A function ``async def episode(engine, data, …)`` is a workflow too.

    Raises:
        ConfigError: see `taken_arguments`; or its constructor raises, or makes something else.
    """
    term = workflow_of(config)
    make = find_workflow(term.name)
    available = {
        "reward": reward,
        "gconfig": gconfig,
        "tokenizer": tokenizer,
        "system_prompt": config.system_prompt,
        "chat_template_kwargs": dict(config.chat_template_kwargs),
    }
    taken = {name: available[name] for name in taken_arguments(make, config)} | term.knobs
    if inspect.iscoroutinefunction(make):
        return FunctionWorkflow(make, taken)
    return checked_workflow(in_user_code(term.name, make, **taken), config)


def training_workflow(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, reward: RewardFn) -> RolloutWorkflow:
    """`n_samples` of the workflow for each prompt, or the workflow itself where it makes the whole group; and whatever the
    algorithm does with them together: a vote instead of the reward, training on a part of them, a greedy baseline."""
    algorithm, gconfig, smallest = config.algorithm, config.gconfig, config.rollout.min_group_size
    vote = getattr(reward, "vote", None)
    judge = reward if vote is None else AnswerOnly()
    one = make_workflow(config, tokenizer, judge, gconfig)
    whole = one.makes_group
    if vote is not None:
        one = MajorityLabels(one, vote)
    if algorithm.update_samples is not None:
        one = FirstSamples(one, algorithm.update_samples)
    plan = plan_run(config)
    later = bool(plan.scores) and (one.reads_scores or algorithm.update_samples is not None)
    group = (
        WholeGroup(one, smallest, finish_later=later)
        if whole
        else Repeated(one, gconfig.n_samples, min_group_size=smallest, finish_later=later)
    )
    if not plan.greedy_baseline:
        return group
    greedy = replace(gconfig, greedy=True, first_token_temperature=None, train_first_token=False)
    return WithGreedyBaseline(group, make_workflow(config, tokenizer, judge, greedy))


def make_filter(config: TrainConfig) -> tuple[GroupFilter | None, int]:
    """Which groups are trained on, as the executor asks it (None: all), and how often a batch may be drawn for it."""
    if config.algorithm.filter.name == "none":
        return None, MAX_DRAWS
    choice = choose(FILTERS, config.algorithm.filter, "algorithm.filter")

    def keeps(group: Group) -> tuple[bool, str]:
        counted = [sample for sample in group.samples if sample.in_statistics]
        if not counted:
            return False, "no_sample_counts"
        verdict = choice(accuracies=[s.accuracy for s in counted], rewards=[s.reward for s in counted])
        fine = isinstance(verdict, tuple) and len(verdict) == 2 and isinstance(verdict[1], str)
        choice.require(fine, "(keep, reason), a bool and a word that is counted", verdict)
        return bool(verdict[0]), verdict[1]

    return keeps, int(choice.knobs.get("max_draws", MAX_DRAWS))


def make_loader(config: TrainConfig, rows: Rows) -> Loader | Curriculum:
    """Rows for training: each once an epoch, or drawn by success rate."""
    if config.curriculum.round_rows is None:
        return Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
    return Curriculum(rows.train, config.curriculum, seed=config.seed)


def success_of(group: Group) -> float | None:
    """Mean accuracy of the samples in statistics, rewards standing in where it is unknown; None where there are none."""
    values = [s.reward if s.accuracy is None else s.accuracy for s in group.samples if s.in_statistics]
    return sum(values) / len(values) if values else None


def make_observer(loader: Iterable[Any]) -> GroupObserver | None:
    """Tells a curriculum of every group that enters a batch or is dropped; None for another loader."""
    if not isinstance(loader, Curriculum):
        return None

    def observe(group: Group) -> None:
        success = success_of(group)
        if success is not None:
            loader.observe(int(group.data["index"]), success)

    return observe


def make_rollout(
    config: TrainConfig,
    engine: InferenceEngine | None,
    loader: Iterable[Any] = (),
    scorer: GroupScorer | None = None,
    team: Team | None = None,
) -> Rollout:
    """The executor with the run's staleness bound and filter; ``engine`` is None on ranks other than 0. ``loader``: what the
    rows come from; a curriculum is told what became of them. ``scorer``: gives the rewards that need a model. ``team``: the
    ranks that get the batches; None: all."""
    if scorer is None and (scores := plan_run(config).scores):
        raise ConfigError(
            f"reward {scores[0].name!r} needs a model, and make_rollout was given no scorer; open_session gives it one"
        )
    group_filter, max_draws = make_filter(config)
    return Rollout(
        engine,
        config.rollout,
        seed=config.seed,
        deterministic=config.deterministic,
        group_filter=group_filter,
        max_draws=max_draws,
        observer=make_observer(loader),
        max_head_offpolicyness=max_head_offpolicyness(config),
        scorer=scorer,
        team=team,
    )
