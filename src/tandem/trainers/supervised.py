"""The common part of training on rows: `tandem sft`, `tandem preference`, `tandem reward`.

A step is: rows → tokens → (reference) → one optimizer step.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import pack
from tandem.api.engines import TrainEngine
from tandem.api.failures import DataFailure
from tandem.api.state import Stateful
from tandem.config.arithmetic import is_evaluation_due, total_steps
from tandem.config.data import INDEX, WHERE
from tandem.config.errors import ConfigError
from tandem.config.load import Resolved
from tandem.data.encoding import ChatEncoder
from tandem.data.examples import Reader
from tandem.data.loader import Loader
from tandem.flow.conductor import LocalConductor
from tandem.flow.opening import Rows, make_residency, open_rows
from tandem.flow.plan import RunPlan
from tandem.flow.residents import check_models, open_reference
from tandem.flow.session import Models, TrainingSession
from tandem.models.catalog import describing
from tandem.models.hardware import choose_device
from tandem.models.tokenizer import check_chat_template, check_template_options, load_tokenizer
from tandem.roles.reference import Reference
from tandem.tracking.statistics import PhaseTimer
from tandem.tracking.tracker import check_sinks
from tandem.trainers.loop import Summary, run_training
from tandem.trainers.start import Run

log = logging.getLogger(__name__)

Sequences = list[dict[str, Any]]
"""The sequences of a row, in the format of `pack`."""


class Encoder(ABC):
    """Encodes rows as sequences of tokens, with the chat template of a run."""

    keeps_rows_together = False
    """True if the sequences of a row must be in one micro-batch, like the two sides of a pair."""

    adds_end = True
    """True for models that write, False for those that score; see `ChatEncoder`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Any):
        """Makes the chat encoder of the run of ``config``.

        Raises:
            ConfigError: the tokenizer has no chat template, or no token can mark the end of a reply.
        """
        check_chat_template(tokenizer)
        self.config = config
        self.chat = ChatEncoder(
            tokenizer,
            max_length=config.max_length,
            system_prompt=config.system_prompt,
            chat_template_kwargs=config.chat_template_kwargs,
            adds_end=self.adds_end,
        )

    @abstractmethod
    def encode(self, row: Mapping[str, Any]) -> Sequences:
        """Returns the row's sequences; raises `DataFailure` with the reason if the row cannot be trained on."""


@dataclass(frozen=True)
class Recipe:
    """The parts in which SFT, preference learning and training of reward models differ."""

    reader: Reader
    """Converts rows of the data set to the format that the encoder reads."""

    encoder: Callable[[PreTrainedTokenizerBase, Any], Encoder]
    """Makes the encoder from the tokenizer and the configuration."""

    learner: Callable[[TrainEngine, Any, Reference | None], Any]
    """Makes the trained role from the engine, the configuration and the frozen reference. The role has the methods that are
    stages of the plan, and for each `train_…` an `evaluate_…`."""


class BatchMaker:
    """Draws rows until a batch is full. Rows that cannot be trained on are dropped and counted by reason."""

    def __init__(self, loader: Loader, encoder: Encoder, batch_size: int, *, quiet: bool = False):
        """``quiet``: dropped rows are logged only at debug level, for a trial batch."""
        self.quiet = quiet
        self.loader, self.encoder, self.batch_size = loader, encoder, batch_size
        self.dropped: Counter[str] = Counter()
        self.last_reason = ""

    def next_batch(self) -> TensorDict:
        """Returns the packed sequences of the next ``batch_size`` usable rows.

        Raises:
            ConfigError: a whole pass over the data has too few usable rows.
        """
        rows: list[Sequences] = []
        unfit: dict[int, str] = {}
        for _ in range(self.batch_size + len(self.loader.dataset)):
            if len(rows) == self.batch_size:
                break
            row = next(self.loader)
            encoded = self._encoded(row)
            rows += encoded
            if not encoded:
                unfit[row[INDEX]] = self.last_reason
        if len(rows) < self.batch_size:
            raise ConfigError(
                f"no {self.batch_size} usable rows in a whole pass over the {len(self.loader.dataset)} rows of the data: "
                f"{dict(Counter(unfit.values()))}"
            )
        return batch_of(rows, self.encoder)

    def all_of(self, rows: Iterable[Mapping[str, Any]]) -> TensorDict:
        """Returns all usable rows as one packed batch.

        Raises:
            ConfigError: no row is usable.
        """
        encoded = [sequences for row in rows for sequences in self._encoded(row)]
        if not encoded:
            raise ConfigError(f"no row of valid_dataset can be used: {dict(self.dropped)}")
        return batch_of(encoded, self.encoder)

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's state and the counts of dropped rows."""
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
            self.last_reason = failure.reason
            log.log(level, "row dropped: %s: %s (counted as rows/dropped/%s)", row.get(WHERE), failure, failure.reason)
            return []


def make_batches(
    recipe: Recipe, config: Any, rows: Rows, tokenizer: PreTrainedTokenizerBase, *, quiet: bool = False
) -> BatchMaker:
    """Makes the batches of a run from its training rows. ``quiet``: see `BatchMaker`."""
    loader = Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
    return BatchMaker(loader, recipe.encoder(tokenizer, config), config.batch_size, quiet=quiet)


def batch_of(rows: Iterable[Sequences], encoder: Encoder) -> TensorDict:
    """Packs rows into one batch; if rows must stay together, marks their sequences with a common ``unit_id``."""
    if not encoder.keeps_rows_together:
        return pack([sequence for sequences in rows for sequence in sequences])
    return pack([sequence | {"unit_id": number} for number, sequences in enumerate(rows) for sequence in sequences])


@dataclass(frozen=True)
class RowSession(TrainingSession):
    """The objects of a run that trains on rows."""

    run: Run[Any]
    tokenizer: PreTrainedTokenizerBase
    engine: TrainEngine
    reference: Reference | None
    """The frozen policy; None if the loss does not need it."""

    batches: BatchMaker

    @property
    def learner(self) -> Any:
        """The role that is trained."""
        return self.roles["learner"]

    @cached_property
    def valid(self) -> TensorDict:
        """The validation rows as one batch. Unusable rows are left out, and are not counted among dropped training rows.

        Raises:
            ConfigError: no row is usable.
        """
        return validation_batches(self.batches).all_of(self.run.rows.valid)

    def evaluate_if_due(self, evaluate: Callable[[TensorDict], Mapping[str, float]], step: int) -> dict[str, float]:
        """Returns the result of ``evaluate(self.valid)``, with names ``eval/…``, if `evaluate.every_steps` says so for this
        step (0: before the first); else {}."""
        due = is_evaluation_due(self.run.config.evaluate.every_steps, step, self.run.steps)
        return {f"eval/{name}": value for name, value in evaluate(self.valid).items()} if due else {}

    def evaluate(self) -> dict[str, float]:
        """Evaluates the trained role on `valid`; returns the figures with names ``eval/…``."""
        batch = self._passed(self._compared, changing=True)
        (update,) = (stage for stage in self.plan.stages if stage.kind == "update")
        figures = getattr(self.learner, update.call.replace("train_", "evaluate_"))(batch)
        return {f"eval/{name}": value for name, value in figures.items()}

    @cached_property
    def _compared(self) -> TensorDict:
        """The validation batch with the fields that frozen models compute. They are computed once, because these models
        never change."""
        return self._passed(self.valid, changing=False)

    def _passed(self, batch: TensorDict, *, changing: bool) -> TensorDict:
        """Runs the plan's passes of models that change (``changing``), or of frozen models; returns the batch with their
        fields."""
        change = {resident.name for resident in self.plan.residents if resident.changes}
        for stage in self.plan.passes:
            if changing == (not change.isdisjoint(stage.awake)):
                batch = getattr(self.learner, stage.call)(batch)
        return batch

    @property
    def models(self) -> Models:
        """The trained model with its tokenizer."""
        model = self.plan.resident("actor")
        return Models(self.engine, None, self.tokenizer, is_classifier=model is not None and model.head == "scalar")

    @property
    def parts(self) -> dict[str, Stateful]:
        """The trained engine, and the maker of batches."""
        return {"trainer": self.engine, "batches": self.batches}

    def end_step(self) -> dict[str, float]:
        """Returns the number of rows dropped since the start, by reason."""
        return {f"rows/dropped/{reason}": float(count) for reason, count in self.batches.dropped.items()}


def open_row_session(recipe: Recipe, run: Run[Any], tokenizer: PreTrainedTokenizerBase) -> RowSession:
    """Opens the models of a run that trains on rows, and makes its batch maker.

    Raises:
        ConfigError: see `open_model`.
    """
    config, plan, process, timer = run.config, run.plan, run.process, PhaseTimer()
    residency = make_residency(config, plan, timer, process.team)
    model = plan.resident("actor")
    assert model is not None, "every plan has an actor"
    engine = residency.open(model, process, optimizer_steps=run.steps)
    reference = open_reference(plan, process, engine, residency.open)
    batches = make_batches(recipe, config, run.rows, tokenizer)
    roles = {"batches": batches, "learner": recipe.learner(engine, config, reference)}
    conductor = LocalConductor(lambda stage: timer(stage.time, stage.role, stage.name), residency, plan)
    objects = (run, tokenizer, engine, reference, batches)
    session = RowSession(plan, timer, residency, conductor, process.team, roles, *objects)
    roles["evaluator"] = session
    return session


def train_on_rows(resolved: Resolved[Any], recipe: Recipe, **how: Any) -> Summary:
    """Trains on rows by `run_training`, with the options ``how``."""

    @contextlib.contextmanager
    def opened(run: Run[Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[RowSession, None]]:
        yield open_row_session(recipe, run, tokenizer), None

    return run_training(resolved, resolved.config, partial(prepare_rows, recipe), opened, **how)


@contextlib.contextmanager
def prepare_rows(recipe: Recipe, config: Any, plan: RunPlan) -> Iterator[tuple[Rows, PreTrainedTokenizerBase]]:
    """Checks that a run can start on this machine; yields its rows and its tokenizer. Downloads no weights from the hub.

    Raises:
        ConfigError: any fault of sinks, data, device or models; an option of the chat template without effect; or too few
            usable rows.
    """
    check_sinks(config.tracking)
    rows = open_rows(config, recipe.reader)
    labels = {row.get("label") for row in rows.train.rows}  # None: rows of another kind
    if len(labels) == 1 and labels != {None}:
        log.warning("every label of train_dataset is %s; this loss learns from rows of both kinds", str(*labels).lower())
    steps = total_steps(config, len(rows.train))
    device = choose_device(config.device, config.actor.backend)
    tokenizer = load_tokenizer(describing(config.actor.path), chats=True)
    check_models(plan, device, tokenizer, [*rows.train.rows, *rows.valid])
    check_template_options(tokenizer, [*rows.train.rows, *rows.valid], config.system_prompt, config.chat_template_kwargs)
    batches = make_batches(recipe, config, rows, tokenizer, quiet=True)
    batches.next_batch()
    if is_evaluation_due(config.evaluate.every_steps, 0, steps):
        validation_batches(batches).all_of(rows.valid)
    yield rows, tokenizer


def validation_batches(batches: BatchMaker) -> BatchMaker:
    """Returns a copy of ``batches`` with separate counts, so that dropped validation rows are not counted among the dropped
    training rows."""
    return BatchMaker(batches.loader, batches.encoder, batches.batch_size, quiet=batches.quiet)
