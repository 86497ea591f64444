"""The models of a plan and the rewards that they compute, before any model is opened.

Models that differ only in heads and adapters share one copy of their weights. Rewards whose terms do not fit the rest of the
run are refused; a reward that a workflow awaits in the middle of an episode keeps its model awake while episodes run.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from tandem.api.lazy_torch import torch
from tandem.api.services import arguments_of, factory_of
from tandem.api.workflow import Score
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.experiment import TrainConfig
from tandem.config.services import GIVEN, NAMED
from tandem.config.terms import Term
from tandem.config.train_engine import Layout, TrainEngineConfig, parse_layout
from tandem.models.catalog import AdapterBeside, adapter_beside, present
from tandem.models.hardware import resolve_dtype
from tandem.models.stored import same_trunk, stored_tensors
from tandem.rewards.engine_judge import WritingReward
from tandem.rewards.model import ModelReward
from tandem.rewards.reward import RewardTerm

Head = Literal["lm", "scalar", "both", "text"]


@dataclass(frozen=True)
class Resident:
    """A model of a run: its configuration, its ranks, and how it is used."""

    name: str
    """`actor`, `critic`, `reference`, `teacher`, `partner`, the name of a reward, or `engine` (the inference engine)."""

    engine: TrainEngineConfig | None = None
    """The configuration of the model's train engine; None for the inference engine."""

    head: Head = "lm"
    trained: bool = False
    key: str = "actor.backend"
    """The configuration key that set its layout, for messages."""

    mini_batches: int = 1
    epochs: int = 1
    base_of: str | None = None
    """Name of the resident whose base model, without adapters, is used as this model; None if this is a separate model."""

    adapter: AdapterBeside | None = None
    """The adapter of a frozen model, which is stored beside the model's weights; None if the model has no adapter."""

    class_label: str | int | None = None
    """The class whose log-odds are the score of a frozen classifier with several classes; None if it has one label."""

    trunk_of: str | None = None
    """Resident whose frozen weights this model uses, with its own head and adapters; None if it shares none."""

    refresh_every_steps: int | None = None
    """Number of steps after which this model copies the actor's weights again; None: never."""

    own: str | None = None
    """The user's class for its train engine, as `extend.train_engine` names it; None: Tandem's class."""

    generating: tuple[int, ...] = (0,)
    """The ranks that generate. They hold the model if it is the inference engine, writes text, or is called by episodes."""

    in_episodes: bool = False
    """True if episodes call it while they run: it then stays awake, with a full copy on each rank that generates."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold the model: those of its layout, or the generating ranks."""
        if self.engine is None or self.head == "text" or self.in_episodes:
            return self.generating
        layout = parse_layout(self.engine.backend, self.key)
        return tuple(range(layout.first, layout.first + layout.ranks))

    @property
    def changes(self) -> bool:
        """True if its weights change during the run; a model that never changes needs no float32 master weights."""
        return self.trained or self.refresh_every_steps is not None


@dataclass(frozen=True)
class PlannedScore:
    """A reward term that needs a model; the rewards of several data sets may contain the same term."""

    name: str
    term: Term
    score: Score
    resident: str
    """Name of the resident that computes the score; scores that ask for the same model share one resident."""

    rewards: Mapping[str, RewardTerm]
    """Reward sum → the term as written in that sum, for each reward sum that contains this score."""

    in_episodes: bool = False
    """True if the workflow awaits it in the middle of an episode: it is computed there and has no stage."""

    @property
    def reads_chats(self) -> bool:
        """True if it reads conversations, so that its model needs a chat template."""
        return type(self.score).read in (Score.read, ModelReward.read)

    @property
    def stage(self) -> str:
        """Name of its stage."""
        return f"score: {self.name}"


class Trunk(NamedTuple):
    """Frozen weights as they are in memory, without heads and adapters."""

    path: str
    folder: Path | None
    """The model folder; None if it is not on this machine yet."""

    dtype: str
    """The dtype in the configuration: `auto`, `bfloat16` or `float32`."""

    adapter_dtype: torch.dtype | None
    """The dtype to which an adapter's base weights are rounded; None if there is no adapter."""

    rank: int
    """The rank that holds the weights."""

    def same(self, other: Trunk, device: str) -> bool:
        """Tells whether both have the same weights, to the bit, on the same rank. ``device``: `auto`, `cpu` or `cuda`."""
        numbers = (self.dtype, self.adapter_dtype) == (other.dtype, other.adapter_dtype)
        if self.rank != other.rank or not (numbers or self.numbers(device) == other.numbers(device)):
            return False
        both_here = self.folder is not None and other.folder is not None
        return self.path == other.path or (both_here and same_trunk(self.folder, other.folder))  # type: ignore[arg-type]

    def numbers(self, device: str) -> tuple[torch.dtype, torch.dtype | None]:
        """Returns the dtype in memory, and the dtype to which weights are first rounded; None if that changes nothing."""
        gpu = device != "cpu" and torch.cuda.is_available()
        dtype, rounding = resolve_dtype(self.dtype, "cuda" if gpu else "cpu"), self.adapter_dtype
        unchanged = rounding == dtype or self.folder is None or not _rounds(self.folder, rounding)
        return dtype, None if unchanged else rounding


def with_adapter(resident: Resident) -> Resident:
    """Splits a frozen model into base and adapter, if its folder has an adapter and one rank holds it; else returns it
    unchanged."""
    engine = resident.engine
    assert engine is not None and not resident.changes, "a frozen model"
    folder = present(engine.path) if _is_alone(resident) else None
    adapter = None if folder is None else adapter_beside(folder)
    if adapter is None:
        return resident
    return replace(resident, engine=replace(engine, path=adapter.base, lora=adapter.lora), adapter=adapter)


def share_trunks(residents: Iterable[Resident], device: str) -> Iterator[Resident]:
    """Yields the residents in order, each with `trunk_of` set to the earlier resident whose trunk it can share, or None.

    Only weights that never change are shared: those of frozen models, and base weights under trained adapters. ``device``:
    `auto`, `cpu` or `cuda`.
    """
    lenders: list[tuple[str, Trunk]] = []
    for resident in residents:
        trunk = _trunk(resident)
        lender = None if trunk is None else next((name for name, other in lenders if trunk.same(other, device)), None)
        if trunk is not None and lender is None:
            lenders.append((resident.name, trunk))
        yield replace(resident, trunk_of=lender)


def _is_alone(resident: Resident) -> bool:
    """Tells whether one process holds the whole model; parts of models are not shared."""
    engine = resident.engine
    return engine is not None and not engine.offload and len(resident.ranks) == 1 and engine.backend.startswith("fsdp")


def _trunk(resident: Resident) -> Trunk | None:
    """Returns the trunk that a resident could share. None if its weights are trained, it has a user's engine or no weights
    of its own, is on several ranks, writes text (in an inference engine), or computes concurrently while episodes run."""
    engine = resident.engine
    trained = resident.changes and (engine is None or engine.lora.rank is None)
    separate = engine is None or trained or resident.base_of is not None or resident.head == "text" or resident.in_episodes
    separate = separate or resident.own is not None
    if engine is None or separate or not _is_alone(resident):
        return None
    folder = present(engine.path)
    rounding = None if resident.adapter is None else resident.adapter.dtype
    return Trunk(str(folder or engine.path), folder, engine.dtype, rounding, resident.ranks[0])


def _rounds(folder: Path, dtype: torch.dtype | None) -> bool:
    """Tells whether a stored tensor has a wider dtype than ``dtype``, so that conversion may round; True if unreadable."""
    try:
        stored = stored_tensors(folder).values()
    except (OSError, ValueError):
        return True
    return dtype is not None and any(tensor.dtype.itemsize > dtype.itemsize for tensor in stored)


Sums = Mapping[str, Sequence[RewardTerm]]


def check_rewards(
    reward: str, cost: str | None, sums: Sums, stepwise: Collection[str], advantage: str, *, of_tokens: bool
) -> None:
    """Checks that the algorithm can learn from every term of ``sums``.

    ``cost``: the term of ``reward`` that has a limit. ``stepwise``: the terms that give each step a separate reward.
    ``of_tokens``: True if the ``advantage`` uses rewards of single tokens.

    Raises:
        ConfigError: the algorithm cannot learn from a term; the message says what to change.
    """
    if cost is not None:
        _check_cost(reward, cost, sums, stepwise)
    if stepwise and not of_tokens:
        raise ConfigError(
            f"reward {min(stepwise)!r} gives each step a reward of its own, and "
            f"algorithm.advantage={advantage} uses one reward per sample; use algorithm.advantage=reinforce "
            "or gae, or aggregate=min"
        )


def _check_cost(reward: str, cost: str, sums: Sums, stepwise: Collection[str]) -> None:
    """Checks that the cost is a reward term with a positive weight and one number per sample, and not the only term.

    Raises:
        ConfigError: the cost is not such a term; if no term has this name, the message gives the nearest name.
    """
    names = dict.fromkeys(term.label for terms in sums.values() for term in terms)
    costs = [term for terms in sums.values() for term in terms if term.label == cost]
    key = f"constraint.cost={cost}"
    if not costs:
        raise ConfigError(f"{key} is no term of reward={reward}; {nearest_names(cost, names)}")
    if (least := min(term.weight for term in costs)) <= 0:
        raise ConfigError(
            f"{key}: its weight in the reward is {least:g}, and the cost is the term's value times its weight; use a weight "
            "above 0, such as 1 (a cost term is not added to the reward)"
        )
    if any(term.options.normalise for term in costs):
        raise ConfigError(f"{key}: normalise takes away the mean that constraint.limit is compared with; leave it out")
    if cost in stepwise:
        raise ConfigError(f"{key}: aggregate=none gives each step a reward, and a cost is one number; use aggregate=mean")
    if len(names) == 1:
        raise ConfigError(f"{key} is the only term of reward={reward}; add a term to be maximised")


def awaited(workflow: Term, scores: Sequence[PlannedScore]) -> frozenset[str]:
    """Returns the names of the model rewards that the workflow awaits in the middle of an episode: all, if it reads the
    whole reward there (`RolloutWorkflow.reads_reward`), otherwise those that are arguments of the workflow. Rewards that
    share a model are awaited together, because a model is used either by episodes or in a stage.

    Raises:
        ConfigError: such a reward can be computed only after the episode; the message says why, and what to do.
    """
    if not scores or workflow.name == TrainConfig.workflow:  # avoids importing the default workflow, which imports torch
        return frozenset()
    make = factory_of("workflow", workflow.name, "workflow")
    whole = getattr(make, "reads_reward", "last") == "midway"
    names: set[str] = set()
    if inspect.isclass(make) or inspect.isfunction(make):
        required = arguments_of(make, f"workflow={workflow.name}").required
        names = set(required) - {*GIVEN, *NAMED, "data", *workflow.arguments}
    models = {score.resident for score in scores if whole or score.name in names}
    chosen = [score for score in scores if score.resident in models]
    for score in chosen:
        if why := _refusal(score):
            raise ConfigError(f"workflow={workflow.name} awaits reward {score.name!r} in the middle of an episode, {why}")
    return frozenset(score.name for score in chosen)


def _refusal(planned: PlannedScore) -> str:
    """Returns the reason why an episode cannot await this reward, with a remedy; empty if it can."""
    score = planned.score
    if isinstance(score, WritingReward):
        return "and a judge inside the run writes only after the episodes; serve it (`tandem serve`) and set url=…"
    if score.per_step:
        return "and it rewards each step only when the sample is complete; use aggregate=min, or workflow=rlvr"
    backend = score.model.backend
    if backend is not None and parse_layout(backend, "backend") != Layout():
        return f"so each rank that generates needs its whole model, and it has backend={backend}; leave backend out"
    return ""


def beside_episodes(resident: Resident, ranks: tuple[int, ...]) -> Resident:
    """Returns the model of an awaited reward with a full copy on each of the generating ranks."""
    assert resident.engine is not None, "it has a train engine"
    return replace(
        resident,
        engine=replace(resident.engine, backend="fsdp:d1", offload=False),
        generating=ranks,
        in_episodes=True,
        key="actor.backend",
    )
