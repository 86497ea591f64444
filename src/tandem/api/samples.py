"""Samples and groups: the results of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.api.lazy_torch import torch
from tandem.api.requests import RequestTiming, StopReason


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
    """float32, the reward that is earned at each token. The rest of the sample's reward is earned at its end; None: all of
    it."""

    media: torch.Tensor | None = None
    """int64: the media number of each token, 0 for text, see `tandem.api.media`; None where the model reads text alone."""

    def __post_init__(self) -> None:
        sizes = {
            name: tuple(getattr(self, name).shape) for name in ("input_ids", "loss_mask", "rollout_logprobs", "versions")
        }
        if len(set(sizes.values())) > 1 or self.input_ids.dim() != 1:
            raise ValueError(f"a trajectory's tensors must all be [S], got {sizes}")

    def earning(self, tokens: Sequence[int], values: Sequence[float]) -> Trajectory:
        """Returns a copy in which the tokens at positions ``tokens`` earn ``values`` in addition."""
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
    """Named parts of the reward, where there are several."""

    raw_rewards: Mapping[str, float] = field(default_factory=dict)
    """The values of these parts before weight and options, if they differ."""

    accuracy: float | None = None
    """Correctness of the answer, 0 to 1, before shaping; filters use it. None: unknown."""

    answer: str | None = None
    """The answer that the reward read from the completion; None if it read none, or looks for none."""

    extracted: bool | None = None
    """True if the reward found an answer; None if it looks for none."""

    own_reward: bool = False
    """True: the workflow has judged this sample, so no term of the configured reward is added."""

    in_statistics: bool = True
    """False: its reward does not enter the group's mean and spread."""

    in_loss: bool = True
    """False: it is not trained on and does not count in N."""

    greedy: bool = False
    """True: a greedy answer, the baseline of the group's other samples."""

    prompt_text: str = ""
    completion_text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation with the last reply, for models that read it in their own tokens."""

    conversations: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """The conversation of each trajectory if there are several; for the record."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics from the workflow; the step reports their averages."""

    words: Mapping[str, str] = field(default_factory=dict)
    """The judges' remarks about the sample, by the reward's name; for the record."""

    timings: tuple[RequestTiming, ...] = field(default=(), compare=False)
    """Timings of its requests in order, if the engine knows them; for the record."""

    @property
    def num_trained_tokens(self) -> int:
        """T_i: trained tokens of all its trajectories."""
        return sum(int(t.loss_mask.sum()) for t in self.trajectories)


@dataclass(frozen=True)
class Group:
    """The samples of one prompt."""

    samples: tuple[Sample, ...]
    group_id: int = -1
    """Number of the group, unique in the run; the executor sets it."""

    source: str = ""
    """Name of the data set the prompt came from."""

    data: Mapping[str, Any] = field(default_factory=dict)
    """The row, for logs."""

    failures: tuple[str, ...] = ()
    """Reasons of the failed samples, which are not in ``samples``."""

    failure_words: tuple[str, ...] = ()
    """The message of each failed sample; for the record."""


@dataclass(frozen=True)
class Dropped:
    """A prompt that was not trained."""

    reason: str
    """The reason as metrics count it: ``filter/…``, ``deadline``, ``reward_timeout``, …"""

    words: str
    """The message of the failure; empty if there is none."""

    group: Group
    """The prompt's samples; empty if the episode failed."""


@dataclass(frozen=True)
class Vote:
    """The votes of a group, an entry for each answer."""

    agrees: tuple[bool, ...]
    """True for an answer that equals the majority."""

    ratio: float
    """Share of the group's answers (unparsable ones count) that agree with the majority, 0 to 1."""

    right: tuple[bool, ...] | None = None
    """True for an answer that equals the expected one; None if the expected answer is unknown."""

    undecided: int = 0
    """Number of failed comparisons; each counts as two different answers."""
