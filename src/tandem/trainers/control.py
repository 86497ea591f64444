"""Changes a running run: applies requests between two steps, on all ranks, and records them in the run's folder.

The requests come from `tandem control` (`tandem.state.control`). If a change cannot be made, it is refused and the run
continues unchanged, because all new objects are made before old ones are released.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.api.failures import RankFailed
from tandem.config.check import check
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.recipes import changed_reward
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

BEGIN_WITH_IT = "this run began without such a term; start a run that has one, with weight 0 if it should count only later"


@dataclass(frozen=True)
class Changed:
    """The prepared objects of a changed run."""

    config: TrainConfig
    plan: RunPlan
    reward: Reward
    taking_back: contextlib.ExitStack
    """Releases all new objects if the change fails."""


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
        """``written``: where each configuration key was set. ``distils``: True if the run learns from a teacher."""
        self._distils, self._written = distils, written
        self._config, self._plan, self._process = run.config, session.plan, run.process
        self._session, self._parts, self._rows = session, parts, run.rows
        self._mailbox = None if run.folder is None else Mailbox(run.folder.path, run.folder.id, run.config.reward)
        self._compares, self._count = parts.reward.compares, 0

    def before(self, step: int) -> None:
        """Applies the requested changes, and repeats those that an interrupted run made before this step. Collective.

        Raises:
            ConfigError: an earlier change cannot be repeated.
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
                        f"the run was changed before step {step} by {request.change}, which cannot be repeated: {error}; "
                        "correct this, or remove the change's line from control.jsonl in the run's folder"
                    ) from error
                why = str(error) or type(error).__name__  # not the error, whose traceback would keep the new objects alive
                log.warning("before step %d, %s was refused: %s", step, request.change, why)
                if mailbox is not None:
                    mailbox.answer(request.id, {"refused": why})

    def metrics(self) -> dict[str, float]:
        """Returns the number of changes and the weights of the reward's terms; empty before the first change."""
        if not self._count:
            return {}
        weights = {f"reward_weights/{term.label}": term.weight for term in self._plan.sums[self._config.reward]}
        return {"control/changes": float(self._count), **weights}

    def _make(self, request: Request, step: int) -> None:
        """Makes one change; if it raises, nothing has changed. Collective."""
        if request.change is None:
            raise ConfigError("the request cannot be read; send requests with `tandem control`")
        if self._distils:
            raise ConfigError("this run learns from a teacher; only the reward of `tandem train` can be changed")
        if self._config.rollout.workers:
            raise ConfigError(
                "rollout workers keep the reward that they began with; leave rollout.workers out to change the reward"
            )
        if self._config.runner == "ray" and "constraint" in self._session.roles:
            raise ConfigError("the constraint of this run is in a Ray worker, so its reward cannot change; use runner=local")
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
        """Makes the plan of the changed run, and checks it.

        Raises:
            ConfigError: the changed run is not possible.
        """
        check(config, written=self._written)
        plan, session = plan_run(config), self._session
        check_names(config, plan)
        if _models(plan) != _models(self._plan):
            raise ConfigError(
                "a reward that needs a model can be neither added nor removed during a run; only its weight can change. "
                "Stop the run, and continue with another reward: tandem continue RUN reward=… --override"
            )
        plan = replace(plan, residents=self._plan.residents)
        later = bool(plan.later)
        early = session.episodes.examiner.reads_scores or config.algorithm.update_samples is not None
        if early and later and not session.workflow.reads_scores:
            raise ConfigError(f"groups must be finished after this term is added, and {BEGIN_WITH_IT}")
        if session.workflow.reads_scores and not later:
            raise ConfigError(
                "the workflow's finish_group waits for rewards that need a model, and this is the last one; set its weight "
                "to 0 instead: reward.weight NAME=0"
            )
        return plan

    def _check_reward(self, config: TrainConfig, plan: RunPlan, reward: Reward) -> None:
        """Checks that the changed reward can judge the rows, and that the workflow was built for the kinds of terms that it
        has."""
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
    """Returns (name in metrics, text in the configuration) of each reward that needs a model."""
    return [(score.name, score.term.spelling) for score in plan.scores]
