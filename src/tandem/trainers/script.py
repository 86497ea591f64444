"""The function with which a script opens a run (checks, folder, tracker, models); the script writes the loop itself."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.load import Resolved
from tandem.config.preference import PreferenceConfig, RewardModelConfig, may_sleep
from tandem.flow.plan import Step, check_passes, plan_run
from tandem.flow.process import decided, log_choice
from tandem.flow.session import Session
from tandem.flow.sleep_plan import sleep_plan_here
from tandem.state.resuming import pinned
from tandem.trainers.loop import open_learning
from tandem.trainers.recipes import recipe_of
from tandem.trainers.start import Run, check_gpus, prepare, start_run, with_micro_batches
from tandem.trainers.supervised import RowSession, open_row_session, prepare_rows

RowConfig = SFTConfig | PreferenceConfig | RewardModelConfig


@overload
def open_training(
    config: TrainConfig, *, passes: Collection[str] | None = None, step: Step | None = None
) -> AbstractContextManager[tuple[Run[TrainConfig], Session]]: ...


@overload
def open_training(config: RowConfig) -> AbstractContextManager[tuple[Run[Any], RowSession]]: ...


def open_training(
    config: BaseConfig, *, passes: Collection[str] | None = None, step: Step | None = None
) -> AbstractContextManager[tuple[Any, Any]]:
    """Opens a run and its models; leaving the block closes everything and records in the run folder how the run ended.

    The *run* has the folder and the tracker: `run.steps`, `run.log`, `run.save_if_due`. The *session* has the models, the
    rollout and the data. As with the commands, faults are refused before there is a run folder. ``passes``: names in
    `plan_run(config)` of the passes that the script's loop makes before the update; None: all of them. ``step``: the
    script's step function, which `session.step()` calls with the run's handles, and whose trace is the graph of the run.
    Under `memory_limit_gib` each method that is a stage of the plan wakes its models; call no other methods of their
    engines.

    Example::

        with open_training(config) as (run, session):
            for step in range(1, run.steps + 1):
                …

    Raises:
        ConfigError: any fault of the configuration; or it needs a pass that is missing in ``passes`` or in ``step``.
    """
    if isinstance(config, TrainConfig):
        return _reinforcement(config, passes, step)
    if passes is not None or step is not None:
        raise ConfigError(f"passes= and step= are for training with rewards; leave them out with {type(config).__name__}")
    return _rows(config)


@contextmanager
def _reinforcement(
    config: TrainConfig, passes: Collection[str] | None, step: Step | None
) -> Iterator[tuple[Run[TrainConfig], Session]]:
    resolved = decided(pinned(Resolved(config, {})))
    config = with_micro_batches(resolved.config)
    plan = plan_run(config, step)
    if passes is not None:
        check_passes(plan, passes)
    with prepare(config, plan) as (rows, parts):
        sleep_plan_here(config, plan)  # refuses a memory limit that is too small, before there is a run folder
        check_gpus(config)
        with start_run(config, rows, plan, recorded=resolved.config) as run, open_learning(run, parts) as session:
            log_choice(resolved, run.process)
            if step is None:
                session.wake_by_method()
            yield run, session


@contextmanager
def _rows(config: Any) -> Iterator[tuple[Run[Any], RowSession]]:
    recorded = pinned(Resolved(config, {})).config
    config = with_micro_batches(recorded)
    plan, recipe = plan_run(config), recipe_of(config)
    if may_sleep(config):
        raise ConfigError(
            f"memory_limit_gib={config.memory_limit_gib} is for `tandem preference`, which wakes its models before each "
            "stage; a script calls them itself: leave it out"
        )
    check_gpus(config)
    with prepare_rows(recipe, config, plan) as (rows, tokenizer), start_run(config, rows, plan, recorded=recorded) as run:
        yield run, open_row_session(recipe, run, tokenizer)
