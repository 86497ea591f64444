"""The loop of every kind of training: step after step (`tandem.flow.step`), and what comes between two steps.

Consumes what the first stage of a step collects; produces the checkpoints and metrics of a run folder. A step waits for
its batch; nothing else waits. Evaluation and saving do not stop generation.
"""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

from tensordict import TensorDict

from tandem.api.activity import enter
from tandem.api.failures import WorkerDied
from tandem.config.load import Resolved
from tandem.flow.parts import Rows
from tandem.flow.plan import RunPlan, plan_run
from tandem.flow.state_parts import sleep_plan_here
from tandem.flow.training import Lasting, TrainingSession
from tandem.lifecycle.oversight import Oversight
from tandem.lifecycle.recovery import Recovery, recovery_of
from tandem.lifecycle.saving import Saving
from tandem.lifecycle.summary import (
    Summary,
    announce,
    announce_absent,
    check_run_folder,
    end_run,
    telling_step,
    to_be_fetched,
)
from tandem.planning.report import drawing
from tandem.rollout.failure_budget import NoBatch
from tandem.state.existing import checkpoints
from tandem.state.resuming import may_go_on
from tandem.state.weight_digests import record_weights
from tandem.tracking.statistics import peak_memory_gib
from tandem.trainers.control import Control
from tandem.trainers.start import Run, check_gpus, start_run, with_micro_batches

Prepare = Callable[[Any, RunPlan], AbstractContextManager[tuple[Rows, Any]]]
"""Checks what can be checked before there is a run folder; gives the rows, and what else was made of the configuration."""

Open = Callable[[Run[Any], Any], AbstractContextManager[tuple[TrainingSession, Control | None]]]
"""Opens the session of a run with that, and what takes changes of it; None: it takes none."""


Watch = Callable[[Iterable[int], TrainingSession], Iterable[int]]
"""Hands on the numbers of the steps to do, one after another, and so sees where each begins and ends."""


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
    """Opens the run of ``resolved``, and trains with its models as ``config`` says, which is another configuration if it
    distils. ``dry_run`` prints the configuration and the batch arithmetic and starts nothing; ``"all"``: also the values
    that are as by default. A run that was cut off in the
    same folder goes on; with ``override`` also where some keys have other values (`tandem.config.resume`). ``until``: the
    step after which it stops, to go on some other time. ``watch``: see `Watch`.

    Raises:
        ConfigError: anything about the configuration or the rows.
    """
    plan = plan_run(resolved.config)
    if dry_run and (absent := to_be_fetched(plan)):
        return announce_absent(resolved, plan, absent, every=dry_run == "all")
    sized = with_micro_batches(resolved.config)
    if sized is not resolved.config:
        plan, config = plan_run(sized), replace(config, actor=sized.actor)
    with contextlib.ExitStack() as stack:
        rows, parts = stack.enter_context(prepare(config, plan))
        sleep_plan_here(config, plan)  # a budget that is too small is refused before there is a run folder
        memory = check_gpus(sized)
        examine = may_go_on(resolved.config, override=override)
        if dry_run:
            check_run_folder(resolved.config, examine)
            devices = drawing(memory) if memory is not None else ()
            return announce(resolved, config, rows, plan, devices, every=dry_run == "all")
        run = stack.enter_context(start_run(config, rows, plan, recorded=resolved.config, examine=examine))
        team, device = run.process.team, run.process.device
        oversight = stack.enter_context(Oversight(resolved.config, run.folder, team))
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
                    late, tokenizer = models.late_writer, models.save_tokenizer
                    saving = attempt.enter_context(Saving(config, run.folder, run.steps, models, tokenizer, recovery, late))
                    record = partial(record_weights, team, run.folder, partial(models.digests, team))
                    session.roles.update(recorder=SimpleNamespace(record=record), saver=saving)
                    summary = loop(session, run, last, recovery, saving, oversight, control, watch)
                return end_run(summary, run.folder, run.steps)
            except WorkerDied as error:
                oversight.go_on(error)


def mend(run: Run[Any]) -> None:
    """After the death of a worker: what lives stays, and takes the newest checkpoint later; without one all begins anew.

    Raises:
        WorkerDied: another worker is gone.
    """
    assert run.lasting is not None and run.folder is not None, "the controller of workers is rank 0"
    if checkpoints(run.folder.checkpoints) and run.lasting.pools is not None:
        run.lasting.pools.mend()
    else:
        run.lasting.close()


def step(session: TrainingSession) -> tuple[dict[str, float], TensorDict]:
    """Trains one step and ends it; returns all metrics, and the batch with all its fields."""
    batch, metrics = session.step()
    found = session.end_step()
    metrics["tokens_per_s/train"] = int(batch["cu_seqlens"][-1]) / max(session.timer.seconds("train"), 1e-9)
    return found | metrics, batch


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
    """All steps up to ``last`` that are not done yet, with evaluation, tracking and saving between them. ``control``: takes
    changes of the run."""
    timer, tracker, progress = session.timer, run.tracker, recovery.progress
    checkpoint = saving.checkpoint = recovery.resume()
    metrics: dict[str, float] = {} if tracker is None else dict(tracker.last)
    if checkpoint is None:
        found = run.evaluate_if_due(session, 0)
        progress.keep_accuracy(0, found)
        with session.team.together():  # every rank, for only rank 0 has found anything
            if tracker is not None and found:
                tracker.log(0, found)
    timer.metrics(), timer.spans(), session.residency.metrics()  # what came before the first step is not part of it
    numbers = progress.remaining(last)
    for number in numbers if watch is None else watch(numbers, session):
        enter("between", number)
        if control is not None:
            control.before(number)
        with telling_step(number):
            try:
                metrics, batch = step(session)
            except NoBatch:
                if tracker is not None:  # what was dropped says why
                    tracker.record(number, *session.made(None))
                raise
        saving.persist(partial(recovery.commit, number))
        if session.plan.stage("record") is not None:
            saving.persist(partial(session.keep, "record", number))
        found = run.evaluate_if_due(session, number)
        progress.keep_accuracy(number, found)
        metrics |= found | timer.metrics() | saving.metrics() | oversight.metrics() | session.residency.metrics()
        metrics |= control.metrics() if control is not None else {}
        spans = session.team.gather(timer.spans())
        metrics |= session.models.moved() | {"memory/peak_gib": peak_memory_gib()}
        made = session.made(batch)
        saving.persist(partial(tracker.log, number, metrics, *made, spans=spans) if tracker is not None else None)
        del batch, made
        asked = oversight.asked() and number < last
        leaving = asked or number == last < run.steps
        if saving.is_due(number, leaving=leaving):  # after the line of this step, which a run that goes on does not repeat
            session.keep("save", number, metrics, leaving)
        if asked:
            oversight.leave()
    return Summary(run.folder.path if run.folder else None, progress.step, metrics, saving.finish(), progress.evaluations)
