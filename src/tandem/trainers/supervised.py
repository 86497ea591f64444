"""The common part of everything that learns from rows: `tandem sft`, `tandem preference`, `tandem reward`.

A step is: rows → tokens → (reference) → one optimizer step.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

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
from tandem.data.examples import Reader
from tandem.data.loader import Loader
from tandem.flow.conductor import LocalConductor
from tandem.flow.critic import Models
from tandem.flow.parts import Rows, open_rows
from tandem.flow.plan import RunPlan
from tandem.flow.process import choose_device
from tandem.flow.residents import check_models, open_reference
from tandem.flow.session import make_residency
from tandem.flow.training import TrainingSession
from tandem.lifecycle.summary import Summary
from tandem.models.catalog import describing
from tandem.models.template_options import check_template_options
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.reference import Reference
from tandem.tracking.statistics import PhaseTimer
from tandem.tracking.tracker import check_sinks
from tandem.trainers.loop import run_training
from tandem.trainers.start import Run

log = logging.getLogger(__name__)

Sequences = list[dict[str, Any]]
"""The sequences of a row, each as `pack` takes them."""


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
class Recipe:
    """The part of the loop that one kind of training brings."""

    reader: Reader
    """The format of its rows."""

    encoder: Callable[[PreTrainedTokenizerBase, Any], Encoder]
    """From the tokenizer and the configuration."""

    learner: Callable[[TrainEngine, Any, Reference | None], Any]
    """From the engine, the configuration and the frozen reference to the role whose methods the plan names, beside each
    `train_…` an `evaluate_…`."""


class BatchMaker:
    """Draws rows until a batch is full; rows that cannot be trained on are counted by reason, never silently lost."""

    def __init__(self, loader: Loader, encoder: Encoder, batch_size: int, *, quiet: bool = False):
        """``quiet``: rows are dropped without a word, for a batch that is only tried."""
        self.quiet = quiet
        self.loader, self.encoder, self.batch_size = loader, encoder, batch_size
        self.dropped: Counter[str] = Counter()
        self.last_reason = ""

    def next_batch(self) -> TensorDict:
        """The sequences of the next ``batch_size`` rows.

        Raises:
            ConfigError: a whole pass over the data gave too few usable rows.
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
        """Every row that can be used, as one batch.

        Raises:
            ConfigError: none can.
        """
        encoded = [sequences for row in rows for sequences in self._encoded(row)]
        if not encoded:
            raise ConfigError(f"no row of valid_dataset can be used: {dict(self.dropped)}")
        return batch_of(encoded, self.encoder)

    def state_dict(self) -> dict[str, Any]:
        """The state: the loader's, and the rows that were dropped."""
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


def batch_of(rows: Iterable[Sequences], encoder: Encoder) -> TensorDict:
    """Rows as one packed batch."""
    if not encoder.keeps_rows_together:
        return pack([sequence for sequences in rows for sequence in sequences])
    return pack([sequence | {"unit_id": number} for number, sequences in enumerate(rows) for sequence in sequences])


@dataclass(frozen=True)
class RowSession(TrainingSession):
    """The objects of a run that learns from rows."""

    run: Run[Any]
    tokenizer: PreTrainedTokenizerBase
    engine: TrainEngine
    reference: Reference | None
    """The frozen policy; None if nothing compares with one."""

    batches: BatchMaker

    @property
    def learner(self) -> Any:
        """The role that is trained."""
        return self.roles["learner"]

    @cached_property
    def valid(self) -> TensorDict:
        """The validation rows as one batch; rows that cannot be used are left out, and not counted as training rows.

        Raises:
            ConfigError: none can.
        """
        return validation_batches(self.batches).all_of(self.run.rows.valid)

    def evaluate_if_due(self, evaluate: Callable[[TensorDict], Mapping[str, float]], step: int) -> dict[str, float]:
        """The figures of `valid` as ``eval/…``; empty if `evaluate.every_steps` asks for none at this step; 0 is before the
        first."""
        due = is_evaluation_due(self.run.config.evaluate.every_steps, step, self.run.steps)
        return {f"eval/{name}": value for name, value in evaluate(self.valid).items()} if due else {}

    def evaluate(self) -> dict[str, float]:
        """The figures of `valid`, by the role that is trained."""
        batch = self._passed(self._compared, changing=True)
        (update,) = (stage for stage in self.plan.stages if stage.kind == "update")
        found = getattr(self.learner, update.call.replace("train_", "evaluate_"))(batch)
        return {f"eval/{name}": value for name, value in found.items()}

    @cached_property
    def _compared(self) -> TensorDict:
        """The validation rows with the fields that never change."""
        return self._passed(self.valid, changing=False)

    def _passed(self, batch: TensorDict, *, changing: bool) -> TensorDict:
        """The batch with the fields of the plan's passes through models that change, or through those that do not."""
        change = {resident.name for resident in self.plan.residents if resident.changes}
        for stage in self.plan.passes:
            if changing == (not change.isdisjoint(stage.awake)):
                batch = getattr(self.learner, stage.call)(batch)
        return batch

    @property
    def models(self) -> Models:
        """The model, and the tokenizer beside it."""
        model = self.plan.resident("actor")
        return Models(self.engine, None, self.tokenizer, is_classifier=model is not None and model.head == "scalar")

    @property
    def parts(self) -> dict[str, Stateful]:
        """The weights, and where the loader is."""
        return {"trainer": self.engine, "batches": self.batches}

    def end_step(self) -> dict[str, float]:
        """The rows that were left out since the start, by reason."""
        return {f"rows/dropped/{reason}": float(count) for reason, count in self.batches.dropped.items()}


def open_row_session(recipe: Recipe, run: Run[Any], tokenizer: PreTrainedTokenizerBase) -> RowSession:
    """Opens the models of a run that learns from rows, and the maker of its batches.

    Raises:
        ConfigError: see `open_model`.
    """
    config, plan, process, timer = run.config, run.plan, run.process, PhaseTimer()
    residency = make_residency(config, plan, timer, process.team)
    model = plan.resident("actor")
    assert model is not None, "every plan has an actor"
    engine = residency.open(model, process, optimizer_steps=run.steps)
    reference = open_reference(plan, process, engine, residency.open)
    loader = Loader(run.rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
    batches = BatchMaker(loader, recipe.encoder(tokenizer, config), config.batch_size)
    roles = {"batches": batches, "learner": recipe.learner(engine, config, reference)}
    conductor = LocalConductor(lambda stage: timer(stage.time, stage.role, stage.name), residency, plan)
    own = (run, tokenizer, engine, reference, batches)
    session = RowSession(plan, timer, residency, conductor, process.team, roles, *own)
    roles["evaluator"] = session
    return session


def train_on_rows(resolved: Resolved[Any], recipe: Recipe, **how: Any) -> Summary:
    """Trains as `run_training` says, to which ``how`` goes."""

    @contextlib.contextmanager
    def opened(run: Run[Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[RowSession, None]]:
        yield open_row_session(recipe, run, tokenizer), None

    return run_training(resolved, resolved.config, partial(prepare_rows, recipe), opened, **how)


@contextlib.contextmanager
def prepare_rows(recipe: Recipe, config: Any, plan: RunPlan) -> Iterator[tuple[Rows, PreTrainedTokenizerBase]]:
    """The rows of a run that can start on this machine, and its tokenizer. Of a model on the hub no weights are downloaded.

    Raises:
        ConfigError: anything about sinks, data, device and models, an option for the chat template that has no effect, or
            rows of which too few can be used.
    """
    check_sinks(config.tracking)
    rows = open_rows(config, recipe.reader)
    steps = total_steps(config, len(rows.train))
    device = choose_device(config)
    tokenizer = load_tokenizer(describing(config.actor.path), chats=True)
    check_models(plan, device, tokenizer, [*rows.train.rows, *rows.valid])
    check_template_options(tokenizer, [*rows.train.rows, *rows.valid], config.system_prompt, config.chat_template_kwargs)
    loader = Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle)
    batches = BatchMaker(loader, recipe.encoder(tokenizer, config), config.batch_size, quiet=True)
    batches.next_batch()
    if is_evaluation_due(config.evaluate.every_steps, 0, steps):
        validation_batches(batches).all_of(rows.valid)
    yield rows, tokenizer


def validation_batches(batches: BatchMaker) -> BatchMaker:
    """A maker with counts of its own: what validation drops is not counted as training rows."""
    return BatchMaker(batches.loader, batches.encoder, batches.batch_size, quiet=batches.quiet)
