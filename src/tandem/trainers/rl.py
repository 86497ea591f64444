"""Reinforcement learning: `tandem train`. Synchronous and asynchronous; only the staleness bound differs."""

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from tandem.config.experiment import TrainConfig
from tandem.config.load import Resolved
from tandem.evaluation import evaluate
from tandem.flow.process import decided, log_choice
from tandem.flow.services import EpisodeParts
from tandem.flow.session import Session, open_session
from tandem.lifecycle.summary import Summary
from tandem.trainers.control import Control
from tandem.trainers.loop import run_training
from tandem.trainers.start import Run, prepare


def train(resolved: Resolved[TrainConfig], **how: Any) -> Summary:
    """Runs it; ``how``: see `run_training`.

    Raises:
        ConfigError: anything about the configuration, before the model is loaded.
        TandemError: what ended the run; the folder says so too.
    """
    resolved = decided(resolved)
    return run_session(resolved, resolved.config, **how)


def run_session(resolved: Resolved[Any], config: TrainConfig, **how: Any) -> Summary:
    """Opens the run of ``resolved``, and trains with its models as ``config`` says. ``how``: see `run_training`."""

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
    """The session of a run, which can evaluate. ``parts``: None makes them."""
    given = (run.config, run.process, run.rows, run.steps, run.id, run.plan, parts, run.lasting)
    with open_session(*given) as session:
        session.roles["evaluator"] = SimpleNamespace(evaluate=partial(evaluate, run.config, session, run.rows))
        yield session
