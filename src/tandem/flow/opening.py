"""Makes the objects of a run in order, and closes them in reverse order, also after an error.

One function makes each object from the configuration, so that a script can use them singly.
"""

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure
from tandem.api.media import reader_of
from tandem.api.team import Team
from tandem.api.weights import WeightVersion
from tandem.api.workflow import Group, GroupScorer
from tandem.config.arithmetic import (
    evaluation_gconfig,
    folder_of,
    generating_ranks,
    max_head_offpolicyness,
    placement,
    rollout_here,
    servers_sleep,
    workflow_of,
)
from tandem.config.data import INDEX, DatasetConfig
from tandem.config.devices import machines
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import kinds_of
from tandem.data.dataset import Dataset, load_dataset
from tandem.data.examples import Reader
from tandem.data.loader import Curriculum, Loader
from tandem.data.rows import normalise
from tandem.data.table import Reading
from tandem.engines.inference.build import build_inference_engine
from tandem.engines.inference.check import context_of, engine_threads
from tandem.engines.inference.remote.launch import Keeping
from tandem.flow.conductor import EngineMeter, LocalConductor, make_balance
from tandem.flow.extensions import own_inference_engine
from tandem.flow.plan import RunPlan, plan_run
from tandem.flow.process import Process, form_generators
from tandem.flow.residency import Residency
from tandem.flow.residents import Roles, open_model, open_partner, open_roles, open_scores, weights_folder
from tandem.flow.scoring import ModelGroupScorer
from tandem.flow.services import EpisodeParts, make_parts
from tandem.flow.session import Lasting, Session
from tandem.flow.sleep_plan import AGAIN, sleep_plan_here
from tandem.flow.stages import Stage
from tandem.launch.rank import kept_servers
from tandem.models.catalog import resolve
from tandem.models.hardware import resolve_dtype
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.components import Choice
from tandem.rollout.executor import MAX_DRAWS, GroupFilter, GroupObserver, Rollout
from tandem.rollout.remote_episodes import RolloutWorkers
from tandem.rollout.workflows import chat_of
from tandem.tracking.statistics import PhaseTimer

MOST_ROWS = 20_000
"""If a data set has more rows than this, the longest prompt is not searched for: tokenising all rows would take minutes at
each start."""

ROUNDED = 256
"""Lengths are rounded up to a multiple of this many tokens. Servers of similar runs then have the same command line, so that
a server that is still running can be used again."""


@dataclass(frozen=True)
class Rows:
    """The rows for training and for evaluation; the latter are empty if the run never evaluates."""

    train: Dataset
    valid: Sequence[dict[str, Any]]
    readings: Mapping[str, Sequence[Reading]] = field(default_factory=dict)
    """A description of the columns of each data source, under the keys `train_dataset` and `valid_dataset`."""

    asked_columns: Collection[str] = ()
    """Names of the columns that rewards ask for."""

    def reading_lines(self) -> list[str]:
        """Returns a line for each data set that says which columns are read and which are not, without repeated lines."""
        lines: dict[str, str] = {}
        for section, readings in self.readings.items():
            for reading in readings:
                name = section if len(readings) == 1 else f"{section} {reading.source}"
                lines.setdefault(reading.describe(self.asked_columns), name)
        return [f"{name} {line}" for line, name in lines.items()]


def open_rows(config: BaseConfig, reader: Reader = normalise) -> Rows:
    """Loads the data sets; ``reader`` converts each row.

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
    """Returns `valid_dataset`; if it has no path, `train_dataset` (test split) with the keys that `valid_dataset` sets."""
    valid = config.valid_dataset
    if valid.path is not None or valid.sources:
        train = config.train_dataset
        rows = DatasetConfig(path=valid.path, sources=valid.sources, media=train.media, media_folders=train.media_folders)
    else:
        rows = replace(config.train_dataset, split=None, max_rows=None)
    columns = ("prompt_column", "answer_column", "columns", "prompt_suffix")
    settings = {name: getattr(valid, name) for name in ("split", "max_rows", "size", *columns)}
    return replace(rows, **{name: value for name, value in settings.items() if value not in (None, {}, ())})


def make_filter(choice: Choice) -> tuple[GroupFilter | None, int]:
    """Returns the filter that decides which groups are trained on (None: all), and how many times prompts may be drawn to
    fill a batch."""
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
    """Returns the loader of training rows: each row once an epoch, or, with a curriculum, drawn by success rate."""
    if config.curriculum.round_rows is None:
        return Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
    return Curriculum(rows.train, config.curriculum, seed=config.seed)


def make_observer(loader: Iterable[Any]) -> GroupObserver | None:
    """Returns a function that reports the success of each finished or dropped group to the curriculum: the mean accuracy of
    the samples that count in statistics. A sample without an accuracy counts with its reward. None for another loader."""
    if not isinstance(loader, Curriculum):
        return None

    def observe(group: Group) -> None:
        values = [s.reward if s.accuracy is None else s.accuracy for s in group.samples if s.in_statistics]
        if values:
            loader.observe(int(group.data[INDEX]), sum(values) / len(values))

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
    """Makes the executor with the run's staleness bound and group filter; ``engine`` is None on ranks without an engine.

    ``loader``: source of the rows; a curriculum receives the success of each group. ``scorer``: computes the rewards that
    need a model. ``team``: the ranks that receive the batches; None: all. ``generators``: the ranks with an engine, if there
    are several. ``workers``: processes that run the episodes."""
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
    """Returns the configuration with `rollout.engine.max_model_len` set to the longest prompt plus its longest answer, in
    tokens, rounded up, at most the model's context. ``asked``: names of the services that some object has asked for.

    The configuration is returned unchanged in these cases: the key is set; the rows do not contain all prompts (another
    workflow than `rlvr`, or a service that uses the engine); there are more than `MOST_ROWS` rows; the model reads images or
    sounds, which would have to be decoded; or all engines are embedded on a CPU, where memory does not depend on this key.
    """
    rollout, engine = config.rollout, config.rollout.engine
    plain = device == "cpu" and kinds_of(rollout.backend, rollout.fleet) == {"embedded"}
    unknown = workflow_of(config).name != "rlvr" or "engine" in asked or len(rows.train.rows) > MOST_ROWS
    unknown = unknown or reader_of(tokenizer) is not None
    if plain or unknown or engine.max_model_len is not None:
        return config
    sections = ((rows.train.rows, config.gconfig), (rows.valid, evaluation_gconfig(config)))
    most = max(longest_prompt(config, section, tokenizer) + sampling.max_new_tokens for section, sampling in sections)
    room = min(-(-most // ROUNDED) * ROUNDED, context_of(engine, folder))
    return replace(config, rollout=replace(rollout, engine=replace(engine, max_model_len=room)))


def longest_prompt(config: TrainConfig, rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the length of the longest prompt in tokens; 0 without rows. Rows that cannot be templated are skipped."""
    most, around = 0, None
    for size, number in sorted(((len(str(row).encode()), i) for i, row in enumerate(rows)), reverse=True):
        if around is not None and size + around <= most:  # a token has at least one byte
            break
        with suppress(DataFailure):
            length = len(chat_of(tokenizer, rows[number], config.system_prompt, config.chat_template_kwargs).prompt_ids)
            most, around = max(most, length), length if around is None else min(around, length)
    return most


_kept = False
"""True while a run exempts its objects from garbage collection; global, because a process has one collector."""

_others = False
"""True if code other than a run was found to have called `gc.freeze` in this process. Stored, because the check takes up to
0.1 s."""


def keep_from_collector(stack: contextlib.ExitStack) -> None:
    """Exempts all present objects from garbage collection until ``stack`` closes.

    Models and libraries are hundreds of thousands of objects. A full collection visits all of them in up to 0.2 s, during
    which no agent's request is answered and no token is sampled (benchmarks/recorder.py --no-freeze). If the process has
    called `gc.freeze` before the run, nothing is changed.
    """
    global _kept, _others
    _others = _others or (not _kept and gc.get_freeze_count() > 0)
    if _kept or _others:
        return
    _kept = True
    stack.callback(_let_go)
    collect_and_keep()


def collect_and_keep() -> None:
    """Collects all garbage, such as models that were closed; in a run, then exempts the remaining objects again."""
    if _kept:
        gc.unfreeze()
    gc.collect()
    if _kept:
        gc.freeze()


def _let_go() -> None:
    global _kept
    _kept = False
    gc.unfreeze()


@contextlib.contextmanager
def open_session(
    config: TrainConfig,
    process: Process,
    rows: Rows,
    steps: int,
    run: str,
    plan: RunPlan | None = None,
    parts: EpisodeParts | None = None,
    lasting: Lasting | None = None,
) -> Iterator[Session]:
    """Makes the objects of a run. When the block is left, also by an error, engine, workers and shared memory are released.

    Args:
        run: the run's name for servers that several runs may reach; unique among runs, equal on all ranks.
        plan: the models of the run; None plans them from ``config``.
        parts: objects of the episodes, which are closed with the session; None makes them.
        lasting: owner of the engine and the workers, which may come from an earlier session; None makes one for this
            session.
    """
    plan = plan or plan_run(config)
    folder = resolve(config.actor.path)
    assert plan.algorithm is not None, "every plan of such a run has an algorithm"
    timer = PhaseTimer()
    residency = make_residency(config, plan, timer, process.team)
    generators = form_generators(generating_ranks(config), process.team, config.rollout.wait_timeout_s)
    with contextlib.ExitStack() as stack:
        lasting = lasting or stack.enter_context(Lasting())
        with process.team.together(), residency.making(AGAIN):
            parts = parts or make_parts(config, plan, load_tokenizer(folder))
            stack.callback(parts.close)
            if lasting.engine is None:
                roomy = with_room(config, process.device, rows, parts.tokenizer, folder, parts.services.asked)
                lasting.engine = make_engine(roomy, process, folder, run)
            engine = lasting.engine
            parts.services.get("engine").start(engine)
        residency.add_engine(engine)
        pools = None
        if config.runner == "ray":
            from tandem.flow.on_ray import Pools  # noqa: PLC0415 Ray is an extra
            from tandem.flow.ray_conductor import RayConductor  # noqa: PLC0415

            pools = lasting.pools
            if pools is None:
                pools = lasting.pools = Pools(config, plan, engine, parts.tokenizer)
                pools.start(process, steps, run)
            opened = Roles(pools.roles, open_scores(config, plan, process, parts.tokenizer, residency, pools.residents))
        else:
            opened = open_roles(config, plan, process, steps, run, folder, parts.tokenizer, engine, residency, stack)
        parts.models.start(opened.scores, process.device)
        with process.team.together():
            if (partner := open_partner(config, plan, process, residency)) is not None:
                stack.callback(partner.close)
                parts.services.get("partner").start(partner.engine, partner.tokenizer)
            stack.callback(parts.close)  # after the rollout has ended, and before the engine closes
            loader, meter = make_loader(config, rows), EngineMeter(engine, make_balance(config.rollout, process, engine))
            conduct = LocalConductor if pools is None else partial(RayConductor, pools)
            conductor = conduct(lambda stage: _measured(stage, timer, meter), residency, plan)
            scoring = plan, opened.scores, parts.reward, conductor, process.team, config.rollout.min_group_size
            scorer = stack.enter_context(contextlib.closing(ModelGroupScorer(*scoring)))
            workers = None if pools is None else pools.workers
            if workers is not None:
                workers.workflow = parts.workflow
            rollout = make_rollout(config, plan.algorithm.filter, engine, loader, scorer, process.team, generators, workers)
            stack.callback(rollout.close)
            if pools is not None:
                pools.when_lost = rollout.fail
        keep_from_collector(stack)
        roles = {**opened.objects, "rollout": rollout}
        objects = (roles, parts, loader, engine, meter, scorer)
        yield Session(plan, timer, residency, conductor, process.team, *objects, pools)


@contextlib.contextmanager
def _measured(stage: Stage, timer: PhaseTimer, meter: EngineMeter) -> Iterator[None]:
    """Measures a block as the time of ``stage``."""
    meter.begins(stage.time)
    with timer(stage.time, stage.role, stage.name):
        yield


def make_residency(config: BaseConfig, plan: RunPlan, timer: PhaseTimer, team: Team) -> Residency:
    """Makes the residency, which puts models to sleep under `memory_limit_gib`, on disk in the run folder if necessary."""
    scratch = folder_of(config) / "asleep"
    return Residency(sleep_plan_here(config, plan), scratch, timer, open_model, team)


def make_engine(config: TrainConfig, process: Process, folder: Path, run: str) -> InferenceEngine | None:
    """Makes the inference engine of this rank; None if this rank does not generate."""
    ranks = generating_ranks(config)
    if process.rank not in ranks:
        return None
    servers, threads = kept_servers(), process.generation_threads(placement(config), len(ranks))
    build = partial(
        build_inference_engine,
        rollout_here(config),
        folder=folder,
        placement=placement(config),
        threads=threads,
        device=process.device,
        deterministic=config.deterministic,
        ranks=process.ranks_here,
        run_folder=folder_of(config) / machines().folder,
        run=run,
        weights_folder=weights_folder(config),
        gconfig=config.gconfig,
        keeping=None if servers is None else Keeping(*servers),
        memory_limit_gib=config.memory_limit_gib,
        sleeps=process.device != "cpu" and servers_sleep(config),
    )
    if config.extend.inference_engine is None:
        return build()
    return _own_engine(config, build, folder, process.device, threads)


def _own_engine(
    config: TrainConfig, build: Callable[[], InferenceEngine], folder: Path, device: str, threads: int
) -> InferenceEngine:
    """Makes the engine of the user's class. ``build`` makes the engine of `rollout.backend` if the class asks for it; if the
    user's constructor fails, this engine is closed."""
    factory = own_inference_engine(str(config.extend.inference_engine), config.rollout.backend)
    engine = build() if "engine" in factory.asked else None
    try:
        user_engine: InferenceEngine = factory(
            engine=engine,
            folder=folder,
            settings=config.rollout.engine,
            dtype=resolve_dtype(config.rollout.dtype, device),
            device=device,
            version=WeightVersion(0),
            threads=engine_threads(config.rollout, placement=placement(config), threads=threads),
            deterministic=config.deterministic,
        )
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    return user_engine
