"""Episodes: how one prompt becomes a group of samples, and who judges them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, runtime_checkable

from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.samples import Group, Sample


class GeneratesTokens(Protocol):
    """The side of an inference engine that a workflow sees."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Generates, as `InferenceEngine.agenerate` says."""
        ...


@dataclass(frozen=True)
class RewardResult:
    """The verdict of a reward on one completion."""

    value: float
    """Finite."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts, where there are several."""

    accuracy: float | None = None
    """0 to 1 where right and wrong are defined."""

    answer: str | None = None
    """The answer that was found in the completion; None where none was found, or none is looked for."""

    extracted: bool | None = None
    """True if an answer was found; None if the reward looks for none."""

    words: Mapping[str, str] = field(default_factory=dict)
    """The words of judges, by the name of the reward."""

    raw_rewards: Mapping[str, float] = field(default_factory=dict)
    """The values of parts before weight and options, if there are any."""

    def details(self) -> dict[str, Any]:
        """Gives what `Chat.sample` takes besides the value; the chat itself carries `raw_rewards`."""
        carried = ("value", "raw_rewards")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in carried}


class RewardFn(ABC):
    """Judges one completion of one row."""

    reads_messages: bool = False
    """True: it is also given ``messages``, the conversation so far, with the completion as the last reply."""

    cost: str | None = None
    """The part that is measured and not rewarded (`constraint`)."""

    @abstractmethod
    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
    ) -> RewardResult:
        """Raises `RewardFailure`: ``reward_raised``, ``reward_timeout``, ``reward_not_finite`` or ``reward_wrong_type``."""

    def metrics(self) -> dict[str, float]:
        """Its own counts since the last call; none, unless it says otherwise."""
        return {}

    def close(self) -> None:
        """End worker processes; idempotent."""


class GroupReward(ABC):
    """Judges the samples of one prompt together, when all of them have ended: a judge that compares, for example.

    It is a term of a reward like any other. Evaluation, where samples are judged one by one, leaves the term out.
    """

    @abstractmethod
    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> Sequence[float | RewardResult]:
        """The reward of each sample, with words if a judge wrote any. Raises `RewardFailure`, which drops the group under
        its reason."""

    def close(self) -> None:
        """Ends what it started; idempotent."""


def messages_for(reward: object, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The further argument of a call of this reward: the conversation, if it reads it."""
    return {"messages": tuple(messages)} if getattr(reward, "reads_messages", False) else {}


ReadsReward = Literal["last", "midway", "partly"]


@runtime_checkable
class EpisodeView(Protocol):
    """The sample that a task makes, as the reward sees it; the whole group where a workflow makes all of it."""

    def has_read(self, context: tuple[int, ...], missing: Sequence[str]) -> None:
        """The episode was told a reward of these tokens that lacks terms: they are added when it has ended."""


EPISODE: ContextVar[EpisodeView | None] = ContextVar("EPISODE", default=None)
"""The episode of this task."""


class RolloutWorkflow(ABC):
    """One episode: from a row to samples."""

    makes_group: bool = False
    """True: an episode returns the whole `Group` of its prompt. False: one sample, and `Repeated` makes the group."""

    at_once: int | None = None
    """Most samples that can be under way at once, where others wait for a place; None: any number."""

    reads_scores: bool = False
    """True: `finish_group` reads rewards that need a model, so it is called when those are there, after the episode."""

    reads_reward: ReadsReward = "last"
    """When an episode asks for the reward. Some terms are added only when it has ended: those that a model of the run
    scores, those that compare samples, and those with options that count over a batch.

    `last`: it generates nothing afterwards; with such terms, one that does ends the run with `WrongWorkflow`. `midway`: it
    goes on by the whole reward, so such terms are refused at the start. `partly`: it goes on by the terms that are there at
    once, and the others are added when it has ended."""

    @abstractmethod
    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Group | Sample | None:
        """Runs one episode on one row.

        One sample is a group of one. None drops the prompt with reason ``workflow_returned_none``; raise
        `DataFailure` to give a better one. ``data`` is this episode's own copy.
        """

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        """May set rewards, ``in_statistics`` and ``in_loss`` from all samples together (votes, baselines, judges)."""
        return samples
