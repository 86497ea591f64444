"""Rewards of models that a workflow awaits in the middle of an episode: their models stay awake while episodes run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem.api.services import arguments_of, factory_of
from tandem.config.backend import Layout, parse_layout
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.services import GIVEN, NAMED
from tandem.config.terms import Term
from tandem.rewards.engine_judge import WritingReward

if TYPE_CHECKING:
    from tandem.flow.plan import PlannedScore, Resident


def awaited(workflow: Term, scores: Sequence[PlannedScore]) -> frozenset[str]:
    """Names of the rewards that the workflow awaits in the middle of an episode: all of them if it goes on by the whole
    reward (`RolloutWorkflow.reads_reward`), otherwise those that it asks for by argument name. Rewards of one model go
    together, for the model sits either with the episodes or in a stage.

    Raises:
        ConfigError: one of them can only be had when the episode has ended; says why, and what to do.
    """
    if not scores or workflow.name == TrainConfig.workflow:  # whose class brings torch, which a plan does without
        return frozenset()
    make = factory_of("workflow", workflow.name, "workflow")
    whole = getattr(make, "reads_reward", "last") == "midway"
    names: set[str] = set()
    if inspect.isclass(make) or inspect.isfunction(make):
        required = arguments_of(make, f"workflow={workflow.name}").required
        names = set(required) - {*GIVEN, *NAMED, "data", *workflow.arguments}
    models = {one.resident for one in scores if whole or one.name in names}
    found = [one for one in scores if one.resident in models]
    for one in found:
        if why := _refusal(one):
            raise ConfigError(f"workflow={workflow.name} awaits reward {one.name!r} in the middle of an episode, {why}")
    return frozenset(one.name for one in found)


def _refusal(one: PlannedScore) -> str:
    """The reason why an episode cannot await this reward, with a remedy; empty if it can."""
    score = one.score
    if isinstance(score, WritingReward):
        return "and a judge that the run holds writes behind the episodes; serve it (`tandem serve`) and name it by url=…"
    if score.per_step:
        return "and it gives each step its reward when the sample is whole; use aggregate=min, or workflow=rlvr"
    backend = score.model.backend
    if backend is not None and parse_layout(backend, "backend") != Layout():
        return f"so its model sits whole on each rank that generates, and it has backend={backend}; leave backend out"
    return ""


def beside_episodes(resident: Resident, ranks: tuple[int, ...]) -> Resident:
    """The model of an awaited reward, whole on each of the ranks that generate."""
    assert resident.engine is not None, "it has a train engine"
    return replace(
        resident,
        engine=replace(resident.engine, backend="fsdp:d1", offload=False),
        generating=ranks,
        in_episodes=True,
        key="actor.backend",
    )
