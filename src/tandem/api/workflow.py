"""Contracts of an episode: a workflow turns a prompt into samples, and rewards judge them.

A cheap reward is computed inside its episode (`RewardFn`), or when all samples of its prompt have ended (`GroupReward`). A
`Score` needs a model, which shares the devices with other models. So it has a stage of its own, ``score:<name>``, which
scores the whole batch after its episodes have ended. The run holds the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from tandem.api.failures import DataFailure
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.requests import LLMRequest, LLMResponse, RequestTiming, StopReason

if TYPE_CHECKING:
    from tandem.api.engines import TrainEngine  # reward functions' workers import this file, and need no engine


@dataclass(frozen=True)
class Trajectory:
    """One token sequence with facts about each token. All tensors are ``[S]``; position t describes token t."""

    input_ids: torch.Tensor
    """int64, prompt and completion."""

    loss_mask: torch.Tensor
    """bool, true where the policy produced the token and is trained on it."""

    rollout_logprobs: torch.Tensor
    """float32, log-probabilities of the inference engine; valid where ``loss_mask`` is true."""

    versions: torch.Tensor
    """int64, the weight version that produced each token; −1 where ``loss_mask`` is false."""

    temperature: float = 1.0
    stop_reason: StopReason = StopReason.STOP
    token_rewards: torch.Tensor | None = None
    """float32, the reward that each token earns. The rest of the sample's reward is earned at its last token. None: the
    whole reward is earned at the last token."""

    media: torch.Tensor | None = None
    """int64: the media number of each token, 0 for text, see `tandem.api.media`; None if the model reads only text."""

    def __post_init__(self) -> None:
        sizes = {
            name: tuple(getattr(self, name).shape) for name in ("input_ids", "loss_mask", "rollout_logprobs", "versions")
        }
        if len(set(sizes.values())) > 1 or self.input_ids.dim() != 1:
            raise ValueError(f"a trajectory's tensors must all be [S], got {sizes}")

    def older_than(self, version: int) -> torch.Tensor:
        """Returns a mask, bool ``[S]``: True for each trained token that an earlier version produced."""
        return self.loss_mask & (self.versions < version)

    def earning(self, tokens: Sequence[int], values: Sequence[float]) -> Trajectory:
        """Returns a copy in which ``values`` are added to the rewards of the tokens at positions ``tokens``."""
        earned = torch.zeros(len(self.input_ids)) if self.token_rewards is None else self.token_rewards.clone()
        return replace(self, token_rewards=earned.index_add(0, torch.tensor(tokens), torch.tensor(values)))


@dataclass(frozen=True)
class Sample:
    """One answer: the unit of rewards and group statistics."""

    trajectories: tuple[Trajectory, ...]
    """Usually one; several if the context was reset or rewritten during the episode."""

    reward: float
    """The whole reward, including rewards of single tokens (`Trajectory.token_rewards`)."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Name → value of each part of the reward, if it has several."""

    raw_rewards: Mapping[str, float] = field(default_factory=dict)
    """Name → value of each part before its weight and options, if they change it."""

    accuracy: float | None = None
    """Correctness of the answer, 0 to 1, before shaping; filters use it. None: unknown."""

    answer: str | None = None
    """The answer that the reward extracted from the completion; None if it found none, or does not extract answers."""

    extracted: bool | None = None
    """True if the reward found an answer, False if not; None if it does not extract answers."""

    own_reward: bool = False
    """True: the workflow has judged this sample, so no term of the configured reward is added."""

    in_statistics: bool = True
    """False: the group's mean and spread leave out the reward of this sample."""

    in_loss: bool = True
    """False: the sample is not trained on and does not count in N, the number of samples that a loss is averaged over."""

    greedy: bool = False
    """True: a greedy answer, whose reward is the baseline of the group's other samples."""

    prompt_text: str = ""
    completion_text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation including the last reply, for models with another tokenizer."""

    conversations: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """The conversation of each trajectory if there are several; only written to the run's records."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics from the workflow; the step reports their averages."""

    words: Mapping[str, str] = field(default_factory=dict)
    """Name of a reward → remarks of its judge about the sample; only written to the run's records."""

    timings: tuple[RequestTiming, ...] = field(default=(), compare=False)
    """Timings of its requests in order, if the engine measures them; only written to the run's records."""

    @property
    def num_trained_tokens(self) -> int:
        """T_i: number of trained tokens in all its trajectories."""
        return sum(int(t.loss_mask.sum()) for t in self.trajectories)


@dataclass(frozen=True)
class Group:
    """The samples of one prompt."""

    samples: tuple[Sample, ...]
    group_id: int = -1
    """Number of the group, unique in the run, set by the executor; −1 before that."""

    source: str = ""
    """Name of the data set the prompt came from."""

    data: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data set, for logs."""

    failures: tuple[str, ...] = ()
    """The reason of each failed sample. Failed samples are not in ``samples``."""

    failure_words: tuple[str, ...] = ()
    """The message of each failed sample; only written to the run's records."""


@dataclass(frozen=True)
class Dropped:
    """A prompt that was not trained on."""

    reason: str
    """The reason as metrics count it: ``filter/…``, ``deadline``, ``reward_timeout``, …"""

    words: str
    """The message of the failure; empty if there is none."""

    group: Group
    """The prompt's samples; empty if the episode failed."""


@dataclass(frozen=True)
class Vote:
    """The result of a majority vote in a group; tuples have one entry per answer."""

    agrees: tuple[bool, ...]
    """True for an answer that equals the majority's."""

    ratio: float
    """Share of the group's answers that agree with the majority, 0 to 1; unparsable answers count in the denominator."""

    right: tuple[bool, ...] | None = None
    """True for an answer that equals the expected one; None if the expected answer is unknown."""

    undecided: int = 0
    """Number of failed comparisons; each counts as two different answers."""


class GeneratesTokens(Protocol):
    """The part of an inference engine that a workflow may use."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Generates one completion; see `InferenceEngine.agenerate`."""
        ...


@dataclass(frozen=True)
class RewardResult:
    """The verdict of a reward on one completion."""

    value: float
    """The reward; finite."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Name → value of each part, if the reward has several."""

    accuracy: float | None = None
    """Correctness, 0 to 1; None if right and wrong are not defined."""

    answer: str | None = None
    """The answer extracted from the completion; None if none was found, or the reward does not extract answers."""

    extracted: bool | None = None
    """True if an answer was found, False if not; None if the reward does not extract answers."""

    words: Mapping[str, str] = field(default_factory=dict)
    """Name of a reward → remarks of its judge."""

    raw_rewards: Mapping[str, float] = field(default_factory=dict)
    """Name → value of each part before its weight and options, if it has any."""

    def details(self) -> dict[str, Any]:
        """Returns the keyword arguments of `Chat.sample` besides the value. The chat passes on `raw_rewards` itself."""
        carried = ("value", "raw_rewards")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in carried}


class RewardFn(ABC):
    """Judges one completion of one row."""

    reads_messages: bool = False
    """True: it is called with ``messages`` too, the conversation so far with the completion as the last reply."""

    cost: str | None = None
    """Name of the part that counts as a cost: it is limited by `constraint` and not added to the reward."""

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
        """Returns the verdict on a completion. ``row``: the prompt's row of the data set.

        Raises:
            RewardFailure: ``reward_raised``, ``reward_timeout``, ``reward_not_finite`` or ``reward_wrong_type``.
        """

    def metrics(self) -> dict[str, float]:
        """Returns the reward's own metrics since the last call; none by default."""
        return {}

    def close(self) -> None:
        """Ends worker processes; idempotent."""


class GroupReward(ABC):
    """Judges the samples of one prompt together when all have ended, such as a judge that compares them.

    It is a term of the reward like any other. Evaluation judges samples one by one and leaves the term out.
    """

    @abstractmethod
    async def compare(self, samples: Sequence[Sample], row: Mapping[str, Any]) -> Sequence[float | RewardResult]:
        """Returns one reward per sample; a `RewardResult` may have a judge's remarks.

        Raises:
            RewardFailure: the group is dropped and counted under its reason.
        """

    def close(self) -> None:
        """Ends processes and connections that it started; idempotent."""


def messages_to(reward: object, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the keyword argument ``messages`` for a reward that reads the conversation, otherwise nothing."""
    return {"messages": tuple(messages)} if getattr(reward, "reads_messages", False) else {}


ReadsReward = Literal["last", "midway", "partly"]


@runtime_checkable
class EpisodeView(Protocol):
    """The part of a running episode that a reward may use."""

    def has_read(self, context: tuple[int, ...], missing: Sequence[str]) -> None:
        """Records that the episode received an incomplete reward for the tokens ``context``: the terms ``missing`` are added
        only when the episode has ended."""


EPISODE: ContextVar[object] = ContextVar("EPISODE", default=None)
"""The engine of the episode that the current asyncio task runs; an `EpisodeView` if the executor runs the episode."""


class RolloutWorkflow(ABC):
    """Runs one episode: turns a row of the data set into samples."""

    makes_group: bool = False
    """True: an episode returns the whole `Group` of its prompt. False: it returns one sample, and `Repeated` makes the
    group."""

    at_once: int | None = None
    """Maximum number of samples in progress at once, further ones wait; None: no limit."""

    reads_scores: bool = False
    """True: `finish_group` reads rewards that need a model, so it is called after these have been added."""

    reads_reward: ReadsReward = "last"
    """When an episode reads the reward. Some terms are *late*, added only after the episode has ended: those that a model of
    the run scores, those that compare samples, and those with options that count over a batch.

    `last`: the episode generates nothing after it has read the reward. If the reward has late terms, an episode that
    generates afterwards ends the run with `WrongWorkflow`. `midway`: the whole reward decides how the episode continues, so
    late terms are refused at the start. `partly`: the other terms decide how the episode continues, and late terms are added
    when it has ended."""

    @abstractmethod
    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Group | Sample | None:
        """Runs one episode on one row. ``data``: the row, a copy for this episode.

        A single sample counts as a group of one. None drops the prompt with the reason ``workflow_returned_none``; raise
        `DataFailure` to drop it with a reason of your own.
        """

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        """Returns the samples of a group, with rewards, ``in_statistics`` and ``in_loss`` set from all of them together
        (votes, baselines, judges). By default it changes nothing."""
        return samples


@dataclass(frozen=True)
class FrozenModel:
    """A model that is never trained.

    Example: ``FrozenModel("runs/helpful/checkpoints/step_20", head="scalar")``
    """

    path: str
    """Model folder, hub name, or built-in name."""

    head: Literal["lm", "scalar", "text"] = "lm"
    """`lm` gives log-probabilities, `scalar` one number per token (the folder of a reward model), `text` writes."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision; None takes the actor's."""

    class_label: str | int | None = None
    """For `scalar` with a classifier of several classes: name or number of a class. The model then gives the log-odds of
    this class.
    """

    backend: str | None = None
    """Layout over ranks: ``fsdp:d1`` is the first rank alone, ``fsdp:d1@1`` the second; None takes the actor's."""


class ScoreReader(Protocol):
    """Turns samples into tokens for the model that scores them."""

    tokenizer: Any
    """The model's own tokenizer."""

    same_tokens: bool
    """True if every token of the actor has the same id in this tokenizer."""

    def conversation(self, sample: Sample, row: Mapping[str, Any]) -> dict[str, Any]:
        """The sample's conversation in the model's chat template, as `tandem reward` renders its rows.

        Returns ``input_ids [S]``, ``loss_mask [S]`` (true on the last reply) and ``temperature`` 1. Raises `DataFailure`
        if the template refuses it, or it is longer than the model's context.
        """
        ...

    def text(self, text: str) -> dict[str, Any]:
        """Tokenises any text, for a judge that answers a question. Same fields as `conversation`; ``loss_mask`` is true on
        all tokens but the first, because log-probabilities are computed only at tokens where it is true. Raises
        `DataFailure` if the text is longer than the model's context."""
        ...

    def steps(
        self, sample: Sample, row: Mapping[str, Any], separator: str, *, marker: str = "", place: bool = False
    ) -> dict[str, Any]:
        """Reads a reply made of steps as `conversation` does, and adds ``step_end [S]``: the last token of each step, or of
        the ``marker`` that replaces the separator. ``place``: also adds ``step_tokens``, the tokens of the actor's last
        trajectory at which the steps end, matched by characters."""
        ...

    def trajectory(self, sample: Sample) -> dict[str, Any]:
        """The sample's last trajectory, token for token, with ``rollout_logprobs [S]`` and its temperature. Raises
        `ConfigError` if the model has other tokens than the actor."""
        ...


class Score(ABC):
    """Scores samples with a model. The constructor takes the knobs of the configuration, and opens nothing.

    Example::

        class Brevity(Score):
            def __init__(self, path: str):
                self.model = FrozenModel(path, head="scalar")

            def score(self, batch, model):
                return model.forward(batch).scores[batch["cu_seqlens"][1:] - 1]
    """

    model: FrozenModel
    """The model that computes the scores."""

    name: str = ""
    """Name of the score in metrics and stages; empty: the name in the configuration."""

    per_step: bool = False
    """True: each step of a reply has its own reward, earned at the actor's token that ends the step; `read` must then return
    the fields of `ScoreReader.steps` with ``place``."""

    def read(self, sample: Sample, row: Mapping[str, Any], reader: ScoreReader) -> Mapping[str, Any]:
        """Returns the sequence that the model reads for a sample; by default its conversation.

        Raises:
            DataFailure: this sample cannot be judged. It is removed from its group and counted under the reason.
        """
        return reader.conversation(sample, row)

    @abstractmethod
    def score(self, batch: TensorDict, model: TrainEngine) -> torch.Tensor:
        """Returns one score per sequence of the packed batch, ``[N]``. Called on every rank with the same batch.

        With `per_step`, returns one score per true token of ``step_end``, in order.
        """


class GroupScorer(Protocol):
    """Adds rewards that need a model to finished groups."""

    def __call__(self, groups: Sequence[Group]) -> list[Group | DataFailure]:
        """Returns each group with further rewards, or the reason why it cannot be trained on. Collective; only rank 0 passes
        groups."""

    def generate_again(self) -> None:
        """Announces that more groups will be generated, for which the engine must be awake. Collective."""
