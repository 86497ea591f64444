"""The loop of every kind of training, with evaluation, tracking and saving between the steps (`tandem.flow.step`), and what
a run came to. Also `tandem train`: synchronous and asynchronous training differ only in the staleness bound.

The first stage of a step provides the batch; the loop writes the checkpoints and metrics of a run folder. A step waits for
its batch; nothing else waits. Evaluation and saving do not stop generation.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from tensordict import TensorDict

from tandem.api.activity import enter
from tandem.api.failures import UserCodeFailed, WorkerDied
from tandem.config.arithmetic import arithmetic, folder_of, stalled_after_s
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.libraries import cache_folder
from tandem.config.load import Resolved, describe
from tandem.evaluation.validation import evaluate
from tandem.flow.draw import text
from tandem.flow.opening import Rows, open_session
from tandem.flow.plan import RunPlan, plan_run
from tandem.flow.process import decided, log_choice
from tandem.flow.services import EpisodeParts
from tandem.flow.session import Lasting, Session, TrainingSession, record_weights
from tandem.flow.sleep_plan import describe_sleep, sleep_plan_here
from tandem.lifecycle.oversight import Oversight
from tandem.lifecycle.recovery import Recovery, recovery_of
from tandem.lifecycle.saving import Saving
from tandem.models.catalog import BUILT_IN, present
from tandem.planning.fit import drawing
from tandem.rollout.book import NoBatch
from tandem.state.existing import checkpoints
from tandem.state.resuming import may_go_on
from tandem.state.run_folder import RunFolder
from tandem.tracking.statistics import peak_memory_gib
from tandem.trainers.control import Control
from tandem.trainers.start import Run, check_gpus, prepare, start_run, with_micro_batches


@dataclass(frozen=True, repr=False)
class Summary:
    """The outcome of a run."""

    folder: Path | None
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step."""

    checkpoint: Path | None = None
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step → accuracy on the validation rows, if the reward gives an accuracy; step 0 is before training."""

    def __repr__(self) -> str:
        """Returns a short description, because a notebook shows it below a cell."""
        shown = ", ".join(f"{name} {self.metrics[name]:.4g}" for name in ("reward/mean", "loss") if name in self.metrics)
        saved = "no checkpoint" if self.checkpoint is None else f"checkpoint {self.checkpoint}"
        return f"<{self.steps} steps, {shown or 'no metrics'}, {saved}>"


def announce(
    resolved: Resolved[Any],
    config: BaseConfig,
    rows: Rows,
    plan: RunPlan,
    devices: Iterable[str] = (),
    *,
    every: bool = False,
) -> Summary:
    """Prints what a run would do, for `--dry-run`: the configuration, the columns that are read, the batch arithmetic, the
    models, the stages of a step, and which models sleep between them. ``devices``: lines about the contents of each device.
    ``every``: also prints default values."""
    _print_config(resolved, every=every)
    for line in rows.reading_lines():
        print(line)
    print(arithmetic(config, len(rows.train)))
    print(text(plan))
    for line in devices:
        print(line)
    sleeping = sleep_plan_here(config, plan)
    if sleeping is not None:
        print(describe_sleep(sleeping))
    return Summary(folder=None, steps=0)


def to_be_fetched(plan: RunPlan) -> str | None:
    """Returns the first built-in model of the plan that is not on this machine yet, or None."""
    paths = [resident.engine.path for resident in plan.residents if resident.engine is not None]
    return next((path for path in paths if path in BUILT_IN and present(path) is None), None)


def _print_config(resolved: Resolved[Any], *, every: bool) -> None:
    print(describe(resolved, hidden=() if every else ("default",)))
    if not every:
        print("Defaults are not listed; --all shows them too.")


def announce_absent(resolved: Resolved[Any], plan: RunPlan, model: str, *, every: bool = False) -> Summary:
    """Prints what `--dry-run` can tell before a built-in model is on this machine, and that the start will make it."""
    _print_config(resolved, every=every)
    print(text(plan))
    print(f"The start will make the built-in model {model} once, in {cache_folder()}: {BUILT_IN[model].cost}.")
    print("What is checked with its tokenizer, such as rows and lengths, is checked then.")
    return Summary(folder=None, steps=0)


@contextlib.contextmanager
def telling_step(number: int) -> Iterator[None]:
    """Adds the step's number to an error of a user's function that is raised in the block."""
    try:
        yield
    except UserCodeFailed as error:
        raise UserCodeFailed(f"step {number}: {error}") from error


Prepare = Callable[[Any, RunPlan], AbstractContextManager[tuple[Rows, Any]]]
"""Makes the checks that need no run folder; yields the rows, and the other objects made from the configuration."""

Open = Callable[[Run[Any], Any], AbstractContextManager[tuple[TrainingSession, Control | None]]]
"""Opens the session of a run with the objects of `Prepare`; also yields the `Control` of the run, or None if the run cannot
be changed while it runs."""


Watch = Callable[[Iterable[int], TrainingSession], Iterable[int]]
"""Wraps the iterator of step numbers, to observe where each step begins and ends."""


def run_training(
    resolved: Resolved[Any],
    config: Any,
    prepare: Prepare,
    open_session: Open,
    *,
    dry_run: bool | Literal["all"] = False,
    override: bool = False,
    until: int | None = None,
    watch: Watch | None = None,
) -> Summary:
    """Opens the run of ``resolved`` and trains its models by ``config`` (another configuration only in distillation).

    ``dry_run`` prints the configuration and the batch arithmetic and starts nothing; ``"all"`` also prints default values.
    A run that was interrupted in the same folder is resumed; with ``override`` even if certain keys have new values
    (`tandem.config.resume`). ``until``: stops after this step; the run can be resumed later. ``watch``: see `Watch`.

    Raises:
        ConfigError: any fault of the configuration or the rows.
    """
    plan = plan_run(resolved.config)
    if dry_run and (absent := to_be_fetched(plan)):
        return announce_absent(resolved, plan, absent, every=dry_run == "all")
    sized = with_micro_batches(resolved.config)
    if sized is not resolved.config:
        plan, config = plan_run(sized), replace(config, actor=sized.actor)
    with contextlib.ExitStack() as stack:
        rows, parts = stack.enter_context(prepare(config, plan))
        sleep_plan_here(config, plan)  # refuses a memory limit that is too small, before there is a run folder
        memory = check_gpus(sized)
        examine = may_go_on(resolved.config, override=override)
        if dry_run:
            RunFolder.check(resolved.config.run.root, folder_of(resolved.config), examine)
            devices = drawing(memory) if memory is not None else ()
            return announce(resolved, config, rows, plan, devices, every=dry_run == "all")
        run = stack.enter_context(start_run(config, rows, plan, recorded=resolved.config, examine=examine))
        team, device = run.process.team, run.process.device
        recover, rules, stalled_s = sized.recover, config.checkpoint, stalled_after_s(sized)
        oversight = stack.enter_context(Oversight(recover, rules, stalled_s, folder_of(sized), run.folder, team))
        run, last = replace(run, lasting=stack.enter_context(Lasting())), min(run.steps, until or run.steps)
        while True:
            try:
                with contextlib.ExitStack() as attempt:
                    again = oversight.mended > 0
                    if again:
                        mend(run)
                    session, control = attempt.enter_context(open_session(run, None if again else parts))
                    recovery = recovery_of(session, run.folder, run.tracker, device, attempt, again=again)
                    models = session.models
                    written = models.save, models.save_tokenizer, recovery, models.late_writer
                    saving = attempt.enter_context(Saving(rules, run.folder, run.steps, *written))
                    record = partial(record_weights, team, run.folder, partial(models.digests, team))
                    session.roles.update(recorder=SimpleNamespace(record=record), saver=saving)
                    summary = loop(session, run, last, recovery, saving, oversight, control, watch)
                if run.folder is not None and summary.steps < run.steps:  # it can be resumed
                    run.folder.finish("interrupted")
                return summary
            except WorkerDied as error:
                oversight.go_on(error)


def mend(run: Run[Any]) -> None:
    """Prepares a run to continue after the death of a worker: keeps the live workers, which load the newest checkpoint
    later. Without a checkpoint everything is closed and opened anew.

    Raises:
        WorkerDied: another worker died meanwhile.
    """
    assert run.lasting is not None and run.folder is not None, "the controller of workers is rank 0"
    if checkpoints(run.folder.checkpoints) and run.lasting.pools is not None:
        run.lasting.pools.mend()
    else:
        run.lasting.close()


def step(session: TrainingSession) -> tuple[dict[str, float], TensorDict]:
    """Trains one step and ends it; returns all metrics, and the batch with all its fields."""
    batch, metrics = session.step()
    further = session.end_step()
    metrics["tokens_per_s/train"] = int(batch["cu_seqlens"][-1]) / max(session.timer.seconds("train"), 1e-9)
    return further | metrics, batch


def loop(
    session: TrainingSession,
    run: Run[Any],
    last: int,
    recovery: Recovery,
    saving: Saving,
    oversight: Oversight,
    control: Control | None = None,
    watch: Watch | None = None,
) -> Summary:
    """Runs the remaining steps up to ``last``, with evaluation, tracking and saving between them. ``control``: applies
    changes of the run."""
    timer, tracker, progress = session.timer, run.tracker, recovery.progress
    checkpoint = saving.checkpoint = recovery.resume()
    metrics: dict[str, float] = {} if tracker is None else dict(tracker.last)
    if checkpoint is None:
        figures = run.evaluate_if_due(session, 0)
        progress.keep_accuracy(0, figures)
        with session.team.together():  # on every rank, although only rank 0 has figures
            if tracker is not None and figures:
                tracker.log(0, figures)
    timer.metrics(), timer.spans(), session.residency.metrics()  # discards times from before the first step
    numbers = progress.remaining(last)
    for number in numbers if watch is None else watch(numbers, session):
        enter("between", number)
        if control is not None:
            control.before(number)
        with telling_step(number):
            try:
                metrics, batch = step(session)
            except NoBatch:
                if tracker is not None:  # the dropped prompts show the reason
                    tracker.record(number, *session.made(None))
                raise
        saving.persist(partial(recovery.commit, number))
        if session.plan.stage("record") is not None:
            saving.persist(partial(session.keep, "record", number))
        figures = run.evaluate_if_due(session, number)
        progress.keep_accuracy(number, figures)
        metrics |= figures | timer.metrics() | saving.metrics() | oversight.metrics() | session.residency.metrics()
        metrics |= control.metrics() if control is not None else {}
        spans = session.team.gather(timer.spans())
        metrics |= session.models.moved() | {"memory/peak_gib": peak_memory_gib()}
        record = session.made(batch)
        saving.persist(partial(tracker.log, number, metrics, *record, spans=spans) if tracker is not None else None)
        del batch, record
        interrupted = oversight.asked() and number < last
        leaving = interrupted or number == last < run.steps
        if saving.is_due(number, leaving=leaving):  # after this step's metrics, which a resumed run does not repeat
            session.keep("save", number, metrics, leaving)
        if interrupted:
            oversight.leave()
    return Summary(run.folder.path if run.folder else None, progress.step, metrics, saving.finish(), progress.evaluations)


def train(resolved: Resolved[TrainConfig], **how: Any) -> Summary:
    """Runs reinforcement learning; ``how``: see `run_training`.

    Raises:
        ConfigError: any fault of the configuration, before the model is loaded.
        TandemError: the error that ended the run, which is also recorded in the run folder.
    """
    resolved = decided(resolved)
    return run_session(resolved, resolved.config, **how)


def run_session(resolved: Resolved[Any], config: TrainConfig, **how: Any) -> Summary:
    """Opens the run of ``resolved`` and trains its models by ``config``. ``how``: see `run_training`."""

    @contextlib.contextmanager
    def opened(run: Run[TrainConfig], parts: EpisodeParts | None) -> Iterator[tuple[Session, Control]]:
        log_choice(resolved, run.process)
        with open_learning(run, parts) as session:
            yield (
                session,
                Control(run, session, session.episodes, written=resolved.sources, distils=resolved.config is not config),
            )

    return run_training(resolved, config, prepare, opened, **how)


@contextlib.contextmanager
def open_learning(run: Run[TrainConfig], parts: EpisodeParts | None) -> Iterator[Session]:
    """Opens the session of a run and adds its evaluator. ``parts``: objects of the episodes; None makes them."""
    arguments = (run.config, run.process, run.rows, run.steps, run.id, run.plan, parts, run.lasting)
    with open_session(*arguments) as session:
        session.roles["evaluator"] = SimpleNamespace(evaluate=partial(evaluate, run.config, session, run.rows))
        yield session
