"""The loop of everything that learns from rows: `tandem sft`, `tandem preference`, `tandem reward`.

Consumes rows; produces a Hugging Face folder and a run folder. A step is: rows → tokens → (reference) → one optimizer step.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.activity import enter, within
from tandem.api.batch import pack
from tandem.api.engines import TrainEngine
from tandem.api.failures import DataFailure
from tandem.config.arithmetic import is_evaluation_due, total_steps
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig
from tandem.config.load import Resolved
from tandem.data.dataset import Dataset, load_dataset
from tandem.data.examples import Reader
from tandem.data.loader import Loader
from tandem.flow.parts import Rows, validation_config
from tandem.flow.plan import RunPlan, plan_run
from tandem.flow.process import choose_device
from tandem.flow.residents import open_model, open_reference
from tandem.lifecycle.oversight import Oversight
from tandem.lifecycle.recovery import Progress, Recovery, parts_of_rows
from tandem.lifecycle.saving import Saving
from tandem.lifecycle.summary import Summary, announce, check_run_folder, ended, telling_step
from tandem.lifecycle.weight_record import weight_record
from tandem.models.catalog import describing
from tandem.models.tokenizer import check_chat_template, load_tokenizer, save_classifier_tokenizer
from tandem.roles.reference import Reference
from tandem.state.resuming import may_go_on
from tandem.tracking.statistics import PhaseTimer, peak_memory_gib
from tandem.tracking.tracker import check_sinks
from tandem.trainers.opening import Run, start_run
from tandem.trainers.start import check_models

log = logging.getLogger(__name__)

Sequences = list[dict[str, Any]]
"""What a row becomes: one sequence, or several, each as `pack` takes them."""


class Encoder(Protocol):
    """Turns a row into sequences."""

    @property
    def keeps_rows_together(self) -> bool:
        """True if the sequences of a row must be in one micro-batch, as the sides of a pair must."""
        ...

    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """The row's sequences; raises `DataFailure` with the reason where it cannot be learnt from."""
        ...


@dataclass(frozen=True)
class Stages:
    """What is done with a batch."""

    train: Callable[[TensorDict], dict[str, float]]
    evaluate: Callable[[TensorDict], dict[str, float]]
    prepare: Callable[[TensorDict], TensorDict] = lambda batch: batch
    """Fields that the frozen reference adds; once for each training batch, and once for the validation rows."""


@dataclass(frozen=True)
class Recipe:
    """What one kind of training brings to the loop."""

    reader: Reader
    """The format of its rows."""

    encoder: Callable[[PreTrainedTokenizerBase, Any], Encoder]
    """From the tokenizer and the configuration."""

    stages: Callable[["RowSession", Any], Stages]
    """From the session and the configuration."""


class BatchMaker:
    """Draws rows until a batch is full; rows that cannot be trained on are counted by reason, never silently lost."""

    def __init__(self, loader: Loader, encoder: Encoder, batch_size: int, *, quiet: bool = False):
        """``quiet``: rows are dropped without a word, for a batch that is only tried."""
        self.quiet = quiet
        self.loader, self.encoder, self.batch_size = loader, encoder, batch_size
        self.dropped: Counter[str] = Counter()

    def next_batch(self) -> TensorDict:
        """The sequences of the next ``batch_size`` rows.

        Raises:
            ConfigError: a whole pass over the data gave too few usable rows.
        """
        rows: list[Sequences] = []
        for _ in range(self.batch_size + len(self.loader.dataset)):
            if len(rows) == self.batch_size:
                break
            rows += self._encoded(next(self.loader))
        if len(rows) < self.batch_size:
            raise ConfigError(f"no {self.batch_size} usable rows in a whole pass over the data: {dict(self.dropped)}")
        return batch_of(rows, self.encoder)

    def all_of(self, rows: Iterable[Mapping[str, Any]]) -> TensorDict:
        """Every row that can be used, as one batch.

        Raises:
            ConfigError: none can.
        """
        encoded = [sequences for row in rows for sequences in self._encoded(row)]
        if not encoded:
            raise ConfigError(f"no row of valid_dataset can be used: {dict(self.dropped)}")
        return batch_of(encoded, self.encoder)

    def state_dict(self) -> dict[str, Any]:
        """See `tandem.api.state.Stateful`: the loader's, and what was dropped."""
        return {"loader": self.loader.state_dict(), "dropped": dict(self.dropped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self.dropped = Counter(state["dropped"])

    def _encoded(self, row: Mapping[str, Any]) -> list[Sequences]:
        try:
            return [self.encoder.encode(row)]
        except DataFailure as failure:
            level = logging.INFO if self.dropped[failure.reason] else logging.WARNING
            level = logging.DEBUG if self.quiet else level
            self.dropped[failure.reason] += 1
            log.log(level, "row dropped: %s: %s (counted as rows/dropped/%s)", row.get("where"), failure, failure.reason)
            return []


def batch_of(rows: Iterable[Sequences], encoder: Encoder) -> TensorDict:
    """Rows as one packed batch."""
    if not encoder.keeps_rows_together:
        return pack([sequence for sequences in rows for sequence in sequences])
    return pack([sequence | {"unit_id": number} for number, sequences in enumerate(rows) for sequence in sequences])


def open_examples(config: BaseConfig, reader: Reader) -> Rows:
    """Loads the data sets in a reader's format.

    Raises:
        ConfigError: missing or empty data, missing columns, a value of the wrong type; names the row.
    """
    train = load_dataset(config.train_dataset, seed=config.seed, default_split="train", reader=reader)
    if not config.evaluate.every_steps:
        return Rows(train, ())
    valid: Dataset = load_dataset(validation_config(config), seed=config.seed, default_split="test", reader=reader)
    return Rows(train, valid[: config.evaluate.max_rows])


@dataclass(frozen=True)
class RowSession:
    """The objects of a loop that learns from rows."""

    run: Run[Any]
    tokenizer: PreTrainedTokenizerBase
    engine: TrainEngine
    reference: Reference | None
    """The frozen policy; None if nothing compares with one."""

    batches: BatchMaker

    @cached_property
    def valid(self) -> TensorDict:
        """The validation rows as one batch; rows that cannot be used are left out, and not counted as training rows.

        Raises:
            ConfigError: none can.
        """
        return validation_batches(self.batches).all_of(self.run.rows.valid)

    def is_evaluation_due(self, step: int) -> bool:
        """True if `evaluate.every_steps` asks for an evaluation at this step; 0 is before the first."""
        return is_evaluation_due(self.run.config.evaluate.every_steps, step, self.run.steps)

    def evaluate_if_due(self, evaluate: Callable[[TensorDict], Mapping[str, float]], step: int) -> dict[str, float]:
        """The figures of `valid` as ``eval/…``; empty where none are due at this step."""
        return examined(evaluate, self.valid) if self.is_evaluation_due(step) else {}

    def save(self, folder: Path) -> None:
        self.engine.save(folder)

    def save_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer beside the model; beside a classifier with the padding that this takes for padding."""
        model = self.run.plan.resident("actor")
        if model is not None and model.head == "scalar":
            save_classifier_tokenizer(self.tokenizer, folder)
        else:
            self.tokenizer.save_pretrained(folder)


def open_row_session(run: Run[Any], recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> RowSession:
    """Opens the models of a run that learns from rows, and the maker of its batches.

    Raises:
        ConfigError: see `open_model`.
    """
    config, model = run.config, run.plan.resident("actor")
    assert model is not None, "every plan has an actor"
    engine = open_model(model, run.process, optimizer_steps=run.steps)
    loader = Loader(run.rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
    batches = BatchMaker(loader, recipe.encoder(tokenizer, config), config.batch_size)
    return RowSession(run, tokenizer, engine, open_reference(run.plan, run.process, engine), batches)


def train_on_rows(
    resolved: Resolved[Any], recipe: Recipe, *, dry_run: bool = False, override: bool = False, until: int | None = None
) -> Summary:
    """Runs it; ``dry_run`` prints the configuration and the batch arithmetic and starts nothing. A run that was cut off in
    the same folder goes on; with ``override`` also where some keys have other values (`tandem.config.resume`). ``until``:
    the step after which it stops, to go on some other time.

    Raises:
        ConfigError: anything about the configuration or the rows.
    """
    config = resolved.config
    plan = plan_run(config)
    rows, tokenizer = prepare_examples(config, recipe, plan)
    if dry_run:
        check_run_folder(config, may_go_on(config, override=override))
        return announce(resolved, config, len(rows.train), plan)
    with contextlib.ExitStack() as stack:
        begun = stack.enter_context(start_run(config, rows, plan, examine=may_go_on(config, override=override)))
        run, tracker, steps = begun.folder, begun.tracker, begun.steps
        oversight = stack.enter_context(Oversight(config, run, begun.process.team))
        session = open_row_session(begun, recipe, tokenizer)
        engine, progress = session.engine, Progress()
        parts, record = (
            parts_of_rows(engine, session.batches, progress, tracker, begun.process),
            weight_record(begun.process.team, run, engine.weights, deterministic=config.deterministic),
        )
        stages = recipe.stages(session, config)
        recovery = Recovery(run, parts, progress, begun.process.team, record=record)
        saving = Saving(
            config,
            run,
            steps,
            session,
            session.save_tokenizer,
            recovery,
            late_writer=lambda states: engine.late_writer(states["trainer"]),
        )
        stack.enter_context(saving)
        summary = loop(session, stages, min(steps, until or steps), recovery, saving, oversight)
        return ended(summary, run, steps)


def prepare_examples(config: Any, recipe: Recipe, plan: RunPlan) -> tuple[Rows, PreTrainedTokenizerBase]:
    """The rows of a run that can start on this machine, and its tokenizer. Of a model on the hub no weights are downloaded.

    Raises:
        ConfigError: anything about sinks, data, device and models, or rows of which too few can be used.
    """
    check_sinks(config.tracking)
    rows = open_examples(config, recipe.reader)
    steps = total_steps(config, len(rows.train))
    device = choose_device(config)
    tokenizer = load_tokenizer(describing(config.actor.path))
    check_chat_template(tokenizer)
    check_models(plan, device)
    loader = Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
    batches = BatchMaker(loader, recipe.encoder(tokenizer, config), config.batch_size, quiet=True)
    batches.next_batch()
    if is_evaluation_due(config.evaluate.every_steps, 0, steps):
        validation_batches(batches).all_of(rows.valid)
    return rows, tokenizer


def loop(
    session: RowSession, stages: Stages, last: int, recovery: Recovery, saving: Saving, oversight: Oversight
) -> Summary:
    """All steps up to ``last`` that are not done yet, with evaluation before the first one and between them, tracking and
    saving."""
    batches, run, tracker = session.batches, session.run.folder, session.run.tracker
    timer, progress, valid = PhaseTimer(), recovery.progress, None
    checkpoint = saving.checkpoint = recovery.resume()
    metrics: dict[str, float] = {} if tracker is None else dict(tracker.last)
    if session.is_evaluation_due(0):
        valid = stages.prepare(session.valid)
        if checkpoint is None:
            with within("evaluate"):
                found = examined(stages.evaluate, valid)
            with session.run.process.team.together():
                if tracker is not None:
                    tracker.log(0, found)
    timer.metrics()  # what came before the first step is not part of it
    for step in progress.remaining(last):
        enter("between", step)
        batch = batches.next_batch()
        with timer("train"), telling_step(step):
            metrics = stages.train(stages.prepare(batch))
        saving.persist(partial(recovery.commit, step))
        metrics |= {f"rows/dropped/{reason}": float(count) for reason, count in batches.dropped.items()}
        metrics["tokens_per_s/train"] = int(batch["cu_seqlens"][-1]) / max(timer.seconds("train"), 1e-9)
        if valid is not None and session.is_evaluation_due(step):
            with timer("evaluate"):
                metrics |= examined(stages.evaluate, valid)
        metrics |= timer.metrics() | saving.metrics() | oversight.metrics() | {"memory/peak_gib": peak_memory_gib()}
        saving.persist(partial(tracker.log, step, metrics) if tracker is not None else None)
        with timer("save"):  # after the line of this step, which a run that goes on from here does not make again
            asked = oversight.asked() and step < last
            saving.after_step(step, metrics, leaving=asked or step == last < session.run.steps)
        if asked:
            oversight.leave()
    return Summary(run.path if run else None, progress.step, metrics, saving.finish())


def validation_batches(batches: BatchMaker) -> BatchMaker:
    """A maker with counts of its own: what validation drops is not counted as training rows."""
    return BatchMaker(batches.loader, batches.encoder, batches.batch_size, quiet=batches.quiet)


def examined(evaluate: Callable[[TensorDict], Mapping[str, float]], valid: TensorDict) -> dict[str, float]:
    """The metrics of the validation rows, as ``eval/…``."""
    return {f"eval/{name}": value for name, value in evaluate(valid).items()}
