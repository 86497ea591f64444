"""Changes a run while it goes on: applies requests between two steps, on all ranks, and records them in the run's folder.

Consumes the requests of `tandem control` (`tandem.state.control`). A change that cannot be made is refused, and the run goes
on as it was: every new object is made before an old one is released.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.api.failures import RankFailed
from tandem.config.changes import changed_reward
from tandem.config.check import check
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.flow.plan import RunPlan, plan_run
from tandem.flow.residents import is_everywhere
from tandem.flow.services import (
    EpisodeParts,
    asks_for_reward,
    changed_reward_of,
    check_names,
    check_rows,
    close_new,
    refuse_compared_later,
    refuse_comparing,
    refuse_only_groups,
)
from tandem.flow.session import Session
from tandem.rewards.reward import Reward
from tandem.state.control import Mailbox, Request
from tandem.trainers.start import Run, check_cost

log = logging.getLogger(__name__)

BEGIN_WITH_IT = "this run began without one; begin a run with it, with the weight 0 if it is to count later"


@dataclass(frozen=True)
class Changed:
    """The rewards of a run after a change."""

    config: TrainConfig
    plan: RunPlan
    reward: Reward
    taking_back: contextlib.ExitStack
    """Releases all new objects, if the change fails."""


class Control:
    """Applies changes between the steps of a run of `tandem train`."""

    def __init__(
        self,
        run: Run[TrainConfig],
        session: Session,
        parts: EpisodeParts,
        *,
        written: Mapping[str, str],
        distils: bool,
    ):
        """``written``: the place where each configuration key was set. ``distils``: the run learns from a teacher."""
        self._distils, self._written = distils, written
        self._config, self._plan, self._process = run.config, session.plan, run.process
        self._session, self._parts, self._rows = session, parts, run.rows
        self._mailbox = None if run.folder is None else Mailbox(run.folder.path, run.folder.id, run.config.reward)
        self._compares, self._count = parts.reward.compares, 0

    def before(self, step: int) -> None:
        """Makes the changes that are requested now, and those that an interrupted run made before this step. Collective.

        Raises:
            ConfigError: an earlier change cannot be made again.
        """
        mailbox = self._mailbox
        for request in self._process.team.share(lambda: [] if mailbox is None else list(mailbox.due(step))):
            try:
                self._make(request, step)
            except RankFailed:
                raise
            except Exception as error:  # the worker boundary: whatever a change raises, the run goes on as it was
                if request.recorded:
                    raise ConfigError(
                        f"the run was changed before step {step} by {request.change}, which cannot be done again: {error}; "
                        "mend that, or take its line out of control.jsonl in the run's folder"
                    ) from error
                why = str(error) or type(error).__name__  # not the error, whose traceback holds what was made
                log.warning("before step %d, %s was refused: %s", step, request.change, why)
                if mailbox is not None:
                    mailbox.answer(request.id, {"refused": why})

    def metrics(self) -> dict[str, float]:
        """Number of changes, and the weights of the reward's terms; empty until there is a change."""
        if not self._count:
            return {}
        weights = {f"reward_weights/{term.label}": term.weight for term in self._plan.sums[self._config.reward]}
        return {"control/changes": float(self._count), **weights}

    def _make(self, request: Request, step: int) -> None:
        """Makes one change, or raises and leaves everything as it was. Collective."""
        if request.change is None:
            raise ConfigError("the request cannot be read; ask with `tandem control`")
        if self._distils:
            raise ConfigError("this run learns from a teacher; only the reward of `tandem train` can be changed")
        if self._config.rollout.workers:
            raise ConfigError(
                "rollout workers judge by the reward that they began with; leave rollout.workers out to change it"
            )
        if self._config.runner == "ray" and "constraint" in self._session.roles:
            raise ConfigError("the constraint of this run is on Ray, and its reward stays as it is; use runner=local")
        mailbox, spec, session = self._mailbox, changed_reward(self._config.reward, request.change), self._session
        changed = self._prepare(replace(self._config, reward=spec))
        with changed.taking_back:
            with self._process.team.together():
                if mailbox is not None and not request.recorded:
                    mailbox.record(request, step, spec)
            changed.taking_back.pop_all()
        self._config, self._plan, self._count = changed.config, changed.plan, self._count + 1
        with session.rollout.standing_still():
            self._parts.reward.change(changed.reward, again=request.step is not None and request.step < step)
            session.scorer.plan = changed.plan
            session.rollout.begin_again()
        if "constraint" in session.roles:
            session.roles["constraint"].everywhere = is_everywhere(changed.plan, str(changed.config.constraint.cost))
        log.info("from step %d on the reward is %s (%s)", step, spec, request.change)
        if mailbox is not None and not request.recorded:
            mailbox.answer(request.id, {"step": step, "reward": spec})

    def _prepare(self, config: TrainConfig) -> Changed:
        """Makes all new objects of a change; if one cannot be made, the others are released. Collective."""
        with contextlib.ExitStack() as stack, self._process.team.together():
            plan = self._checked_plan(config)
            reward = changed_reward_of(config, plan, self._parts)
            stack.callback(close_new, self._parts.reward, reward.judges)
            self._check_reward(config, plan, reward)
            return Changed(config, plan, reward, stack.pop_all())

    def _checked_plan(self, config: TrainConfig) -> RunPlan:
        """The plan of the changed run.

        Raises:
            ConfigError: the changed run is impossible here.
        """
        check(config, written=self._written)
        plan, session = plan_run(config), self._session
        check_names(config, plan)
        if _models(plan) != _models(self._plan):
            raise ConfigError(
                "a reward that needs a model can neither come nor go while the run goes on, only its weight can change; "
                "stop the run, and go on with another reward: tandem continue RUN reward=… --override"
            )
        plan = replace(plan, residents=self._plan.residents)
        later = bool(plan.later)
        early = session.episodes.examiner.reads_scores or config.algorithm.update_samples is not None
        if early and later and not session.workflow.reads_scores:
            raise ConfigError(f"the workflow finishes a group behind the rewards that need a model, and {BEGIN_WITH_IT}")
        if session.workflow.reads_scores and not later:
            raise ConfigError(
                "the workflow finishes a group behind the rewards that need a model, and this is the last one; let it count "
                "for nothing instead: reward.weight NAME=0"
            )
        return plan

    def _check_reward(self, config: TrainConfig, plan: RunPlan, reward: Reward) -> None:
        """Checks that every row can be judged, and by kinds of reward that the workflow was built for."""
        if reward.compares and not self._compares:
            raise ConfigError(f"the term compares the samples of a prompt, and {BEGIN_WITH_IT}")
        refuse_comparing(config, plan, reward, self._session.episodes.examiner.makes_group)
        if self._session.workflow.reads_scores:
            refuse_compared_later(config, plan, reward)
        if config.evaluate.every_steps:
            refuse_only_groups(config.reward, reward.sums[config.reward])
        if asks_for_reward(config):
            check_rows(reward, self._rows.train.rows)
            check_rows(reward, self._rows.valid)
        check_cost(config, plan, self._rows.train.rows)


def _models(plan: RunPlan) -> list[tuple[str, str]]:
    """The rewards that need a model, as they are spelt."""
    return [(one.name, one.term.spelling) for one in plan.scores]
