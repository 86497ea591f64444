"""Reinforcement learning: `tandem train`. One loop, synchronous and asynchronous; only the staleness bound differs.

Consumes rows of the loader; produces a Hugging Face folder and a run folder. A step waits for its batch (deadline
`rollout.wait_timeout_s`); nothing else waits. Evaluation and saving do not stop generation.
"""

import contextlib
from functools import partial
from typing import Any

from tensordict import TensorDict

from tandem.api.activity import enter, within
from tandem.config.experiment import TrainConfig
from tandem.config.load import Resolved
from tandem.data.curriculum import Curriculum
from tandem.evaluation import evaluate_if_due
from tandem.flow.parts import Rows
from tandem.flow.plan import plan_run
from tandem.flow.process import decided, log_choice
from tandem.flow.session import Session, open_session
from tandem.flow.state_parts import sleep_plan_here
from tandem.lifecycle.oversight import Oversight
from tandem.lifecycle.recovery import Recovery, recovery_of_session
from tandem.lifecycle.saving import Saving
from tandem.lifecycle.summary import Summary, announce, check_run_folder, ended, telling_step
from tandem.lifecycle.weight_record import weight_record
from tandem.rollout.failure_budget import NoBatch
from tandem.state.resuming import may_go_on
from tandem.state.run_folder import RunFolder
from tandem.tracking.statistics import peak_memory_gib
from tandem.tracking.tracker import Tracker
from tandem.trainers.control import Control
from tandem.trainers.opening import start_run
from tandem.trainers.start import prepare


def train(resolved: Resolved, *, dry_run: bool = False, override: bool = False, until: int | None = None) -> Summary:
    """Runs it; ``dry_run`` prints the configuration and the batch arithmetic and starts nothing. A run that was cut off in
    the same folder goes on; with ``override`` also where some keys have other values (`tandem.config.resume`). ``until``:
    the step after which it stops, to go on some other time.

    Raises:
        ConfigError: anything about the configuration, before the model is loaded.
        TandemError: what ended the run; the folder says so too.
    """
    resolved = decided(resolved)
    return run_session(resolved, resolved.config, dry_run=dry_run, override=override, until=until)


def run_session(
    resolved: Resolved[Any],
    config: TrainConfig,
    *,
    dry_run: bool = False,
    override: bool = False,
    until: int | None = None,
) -> Summary:
    """Opens the run of ``resolved``, and trains with its models as ``config`` says."""
    plan = plan_run(resolved.config)
    with contextlib.ExitStack() as stack:
        rows, parts = stack.enter_context(prepare(config, plan))
        sleep_plan_here(config, plan)  # a budget that is too small is refused before there is a run folder
        if dry_run:
            check_run_folder(resolved.config, may_go_on(resolved.config, override=override))
            return announce(resolved, config, len(rows.train), plan)
        examine = may_go_on(resolved.config, override=override)
        begun = stack.enter_context(start_run(config, rows, plan, recorded=resolved.config, examine=examine))
        log_choice(resolved, begun.process)
        run, tracker, process, steps = begun.folder, begun.tracker, begun.process, begun.steps
        last = min(steps, until or steps)
        oversight = stack.enter_context(Oversight(resolved.config, run, process.team))
        session = stack.enter_context(open_session(config, process, rows, steps, begun.id, plan, parts))
        models = session.models
        wake = session.runner.prepare
        record = weight_record(
            process.team, run, models.named_weights, partial(wake, "record"), deterministic=config.deterministic
        )
        recovery = recovery_of_session(session, run, tracker, stack, process, record)
        late, to_save = models.late_writer, partial(wake, "save")
        saving = Saving(config, run, steps, models, models.save_tokenizer, recovery, late, to_save)
        stack.enter_context(saving)
        control = Control(resolved, config, process, session, parts, rows, run)
        return ended(
            loop(config, session, run, tracker, rows, steps, last, recovery, saving, oversight, control), run, steps
        )


def step(session: Session) -> tuple[dict[str, float], TensorDict]:
    """generate → reward → advantage → loss → update → publish, as the plan of the run lists them; returns all metrics, and
    the batch with all its fields."""
    run = session.runner
    batch, metrics = None, {}
    for stage in session.plan.step:
        match stage.kind:
            case "collect":
                batch = run.call(stage)
            case "pass":
                batch = run.call(stage, batch)
            case "check" | "update":
                metrics |= run.get(run.call(stage, batch))
            case "deliver":
                metrics |= run.get(run.call(stage))
    session.rollout.end_step()
    trained = run.get(batch)
    metrics["tokens_per_s/train"] = int(trained["cu_seqlens"][-1]) / max(session.timer.seconds("train"), 1e-9)
    run.free(batch)
    if isinstance(session.loader, Curriculum):
        metrics |= session.loader.metrics()
    return session.rollout.metrics() | metrics | session.measured(), trained


def loop(
    config: TrainConfig,
    session: Session,
    run: RunFolder | None,
    tracker: Tracker | None,
    rows: Rows,
    steps: int,
    last: int,
    recovery: Recovery,
    saving: Saving,
    oversight: Oversight,
    control: Control,
) -> Summary:
    """All steps up to ``last`` that are not done yet, with evaluation, tracking and saving between them; ``steps``: of the
    whole run."""
    timer, progress = session.timer, recovery.progress
    checkpoint = saving.checkpoint = recovery.resume()
    metrics: dict[str, float] = {} if tracker is None else dict(tracker.last)
    with within("evaluate"):
        found = evaluate_if_due(config, session, rows, 0, steps) if checkpoint is None else {}
    progress.evaluations |= _accuracy(0, found)
    with session.team.together():  # every rank, for only rank 0 has found anything
        if tracker is not None and found:
            tracker.log(0, found)
    timer.metrics()  # what came before the first step is not part of it
    for number in progress.remaining(last):
        enter("between", number)
        control.before(number)
        with telling_step(number):
            try:
                metrics, batch = step(session)
            except NoBatch:
                if tracker is not None:  # what was dropped says why
                    tracker.record(number, dropped=session.rollout.take_dropped())
                raise
        saving.persist(partial(recovery.commit, number))
        with timer("evaluate"):
            found = evaluate_if_due(config, session, rows, number, steps)
        if found:
            metrics |= found
            progress.evaluations |= _accuracy(number, found)
        metrics |= timer.metrics() | saving.metrics() | oversight.metrics() | session.residency.metrics()
        metrics |= control.metrics() | {"memory/peak_gib": peak_memory_gib()}
        rollout, history = session.rollout, session.publisher.history
        made = rollout.last_groups, history, batch, rollout.take_dropped()
        saving.persist(partial(tracker.log, number, metrics, *made) if tracker is not None else None)
        del batch, made
        with timer("save"):  # after the line of this step, which a run that goes on from here does not make again
            asked = oversight.asked() and number < last
            saving.after_step(number, metrics, leaving=asked or number == last < steps)
        if asked:
            oversight.leave()
    return Summary(run.path if run else None, progress.step, metrics, saving.finish(), progress.evaluations)


def _accuracy(step: int, found: dict[str, float]) -> dict[int, float]:
    """Empty where the reward states none, and its values are no shares."""
    return {step: found["eval/accuracy"]} if "eval/accuracy" in found else {}
