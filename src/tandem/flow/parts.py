"""The objects of a run, made from its configuration: each function makes one, so that a script can take them one by one."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure
from tandem.api.media import reader_of
from tandem.api.samples import Group
from tandem.api.scoring import GroupScorer
from tandem.api.team import Team
from tandem.config.arithmetic import evaluation_gconfig, max_head_offpolicyness, workflow_of
from tandem.config.data import INDEX, DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import kinds_of
from tandem.data.dataset import Dataset, load_dataset
from tandem.data.examples import Reader
from tandem.data.loader import Curriculum, Loader
from tandem.data.rows import normalise
from tandem.data.table import Reading
from tandem.engines.inference.check import context_of
from tandem.roles.components import Choice
from tandem.rollout.chat import chat_of
from tandem.rollout.executor import MAX_DRAWS, GroupFilter, GroupObserver, Rollout
from tandem.rollout.workers import RolloutWorkers

MOST_ROWS = 20_000
"""With more rows than this, nobody looks for the longest prompt: to tokenise all would take minutes at each start."""

ROUNDED = 256
"""A server's commands differ less often, so that one that is kept can be taken over."""


@dataclass(frozen=True)
class Rows:
    """Rows for training, and for evaluation (empty when the run never evaluates)."""

    train: Dataset
    valid: Sequence[dict[str, Any]]
    readings: Mapping[str, Sequence[Reading]] = field(default_factory=dict)
    """The readings of the columns, by `train_dataset` and `valid_dataset`."""

    asked: Collection[str] = ()
    """Columns that rewards ask for by name."""

    def told(self) -> list[str]:
        """Columns that are read and that are not, a line for each data set, the same line once."""
        lines: dict[str, str] = {}
        for section, readings in self.readings.items():
            for reading in readings:
                name = section if len(readings) == 1 else f"{section} {reading.source}"
                lines.setdefault(reading.told(self.asked), name)
        return [f"{name} {line}" for line, name in lines.items()]


def open_rows(config: BaseConfig, reader: Reader = normalise) -> Rows:
    """Loads the data sets, in a reader's format.

    Raises:
        ConfigError: missing or empty data, missing columns, broken lines; names the file.
    """
    load = partial(load_dataset, seed=config.seed, reader=reader)
    train = load(config.train_dataset, default_split="train", section="train_dataset.")
    if isinstance(config, TrainConfig) and (config.curriculum.round_rows or 0) > len(train.rows):
        raise ConfigError(
            f"curriculum.round_rows must be at most the rows of train_dataset ({len(train.rows)}), "
            f"got {config.curriculum.round_rows}"
        )
    if not config.evaluate.every_steps:
        return Rows(train, (), {"train_dataset": train.readings})
    valid = load(validation_config(config), default_split="test", section="valid_dataset.")
    readings = {"train_dataset": train.readings, "valid_dataset": valid.readings}
    return Rows(train, valid[: config.evaluate.max_rows], readings)


def validation_config(config: BaseConfig) -> DatasetConfig:
    """`valid_dataset`; without a path the test split of the training data, with what `valid_dataset` changes of it."""
    valid = config.valid_dataset
    if valid.path is not None or valid.sources:
        rows = DatasetConfig(path=valid.path, sources=valid.sources)
    else:
        rows = replace(config.train_dataset, split=None, max_rows=None)
    columns = ("prompt_column", "answer_column", "columns", "prompt_suffix", "media", "media_folders")
    own = {name: getattr(valid, name) for name in ("split", "max_rows", "size", *columns)}
    return replace(rows, **{name: value for name, value in own.items() if value not in (None, {}, ())})


def make_filter(choice: Choice) -> tuple[GroupFilter | None, int]:
    """The rule for groups that are trained on, as the executor asks it (None: all), and the number of times that a batch may
    be drawn for it."""
    if choice.name == "none":
        return None, MAX_DRAWS

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
            loader.observe(int(group.data[INDEX]), success)

    return observe


def make_rollout(
    config: TrainConfig,
    filter_: Choice,
    engine: InferenceEngine | None,
    loader: Iterable[Any] = (),
    scorer: GroupScorer | None = None,
    team: Team | None = None,
    generators: Team | None = None,
    workers: RolloutWorkers | None = None,
) -> Rollout:
    """The executor with the run's staleness bound and ``filter_`` of groups; ``engine`` is None on ranks without one.
    ``loader``: what the rows come from; a curriculum is told what became of them. ``scorer``: gives the rewards that need a
    model. ``team``: the ranks that get the batches; None: all. ``generators``: those with an engine, if they are several.
    ``workers``: processes that run the episodes of one workflow."""
    group_filter, max_draws = make_filter(filter_)
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
        generators=generators,
        workers=workers,
    )


def with_room(
    config: TrainConfig,
    device: str,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    asked: Collection[str] = (),
) -> TrainConfig:
    """The configuration with `rollout.engine.max_model_len`: the longest prompt and answer, rounded up, at most the model's
    context. ``asked``: names of services that were given to somebody.

    It stays as it is if it is set, if prompts do not all stand in the rows (another workflow, or a service that asks the
    engine itself), if there are too many rows to look at, or images to decode for it, and for the engine on a CPU, which
    keeps nothing of that size.
    """
    rollout, engine = config.rollout, config.rollout.engine
    plain = device == "cpu" and kinds_of(rollout.backend, rollout.fleet) == {"embedded"}
    unknown = workflow_of(config).name != "rlvr" or "engine" in asked or len(rows.train.rows) > MOST_ROWS
    unknown = unknown or reader_of(tokenizer) is not None
    if plain or unknown or engine.max_model_len is not None:
        return config
    given = ((rows.train.rows, config.gconfig), (rows.valid, evaluation_gconfig(config)))
    most = max(longest_prompt(config, some, tokenizer) + sampling.max_new_tokens for some, sampling in given)
    room = min(-(-most // ROUNDED) * ROUNDED, context_of(engine, folder))
    return replace(config, rollout=replace(rollout, engine=replace(engine, max_model_len=room)))


def longest_prompt(config: TrainConfig, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest prompt; 0 without rows. Rows of which the chat template makes none are dropped later."""
    most, around = 0, None
    for size, number in sorted(((len(str(row).encode()), i) for i, row in enumerate(rows)), reverse=True):
        if around is not None and size + around <= most:  # no token is less than a byte
            break
        with suppress(DataFailure):
            found = len(chat_of(tokenizer, rows[number], config.system_prompt, config.chat_template_kwargs).prompt_ids)
            most, around = max(most, found), found if around is None else min(around, found)
    return most
