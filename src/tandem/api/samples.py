"""Samples and groups: what an episode makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.api.lazy_torch import torch
from tandem.api.requests import RequestTiming, StopReason


@dataclass(frozen=True)
class Trajectory:
    """One token sequence with its per-token facts; all tensors are ``[S]``. Position t speaks of token t."""

    input_ids: torch.Tensor
    """int64, prompt and completion."""

    loss_mask: torch.Tensor
    """bool, true where the policy produced the token and is trained on it."""

    rollout_logprobs: torch.Tensor
    """float32, means something where ``loss_mask`` is true."""

    versions: torch.Tensor
    """int64, likewise; -1 elsewhere."""

    temperature: float = 1.0
    stop_reason: StopReason = StopReason.STOP
    token_rewards: torch.Tensor | None = None
    """float32: what of the sample's reward is earned after which token. The rest is earned at the end; None: all of it."""

    media: torch.Tensor | None = None
    """int64: the media number of each token, 0 for text, see `tandem.api.media`; None where the model reads text alone."""

    def __post_init__(self) -> None:
        sizes = {
            name: tuple(getattr(self, name).shape) for name in ("input_ids", "loss_mask", "rollout_logprobs", "versions")
        }
        if len(set(sizes.values())) > 1 or self.input_ids.dim() != 1:
            raise ValueError(f"a trajectory's tensors must all be [S], got {sizes}")

    def earning(self, tokens: Sequence[int], values: Sequence[float]) -> Trajectory:
        """The trajectory whose ``tokens`` earn these rewards besides what they earn already."""
        earned = torch.zeros(len(self.input_ids)) if self.token_rewards is None else self.token_rewards.clone()
        return replace(self, token_rewards=earned.index_add(0, torch.tensor(tokens), torch.tensor(values)))


@dataclass(frozen=True)
class Sample:
    """One answer: the unit of rewards and group statistics."""

    trajectories: tuple[Trajectory, ...]
    """Usually one; several when the context was reset or rewritten on the way."""

    reward: float
    """All of it, what single tokens earn (`Trajectory.token_rewards`) included."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, where there are several."""

    raw_rewards: Mapping[str, float] = field(default_factory=dict)
    """The values of these parts before weight and options, if they differ."""

    accuracy: float | None = None
    """Correctness of the answer (0 to 1), before shaping; filters judge on it. None if it is unknown."""

    answer: str | None = None
    """The answer that the reward found in the completion; None where it found none, or looks for none."""

    extracted: bool | None = None
    """True if the reward found an answer; None if it looks for none."""

    own_reward: bool = False
    """True: whoever made it has judged it, so that no term of the configured reward is added."""

    in_statistics: bool = True
    """False: its reward does not enter the group's mean and spread."""

    in_loss: bool = True
    """False: it is not trained on and does not count in N."""

    greedy: bool = False
    """True: the most probable answer, drawn as a baseline for the others of its group."""

    prompt_text: str = ""
    completion_text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation, the last reply included, for models that read it in their own tokens."""

    conversations: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """The conversation behind each trajectory, where there are several; for the record."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Whatever the workflow wants averaged in the step's metrics."""

    words: Mapping[str, str] = field(default_factory=dict)
    """The words of judges about it, by the name of the reward; for the record."""

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
    """Given by the executor; unique in the run."""

    source: str = ""
    """Name of the data set the prompt came from."""

    data: Mapping[str, Any] = field(default_factory=dict)
    """The row, for logs."""

    failures: tuple[str, ...] = ()
    """Reasons of the samples that failed and are missing here."""

    failure_words: tuple[str, ...] = ()
    """The message about each of them; for the record."""


@dataclass(frozen=True)
class Dropped:
    """A prompt that was not trained."""

    reason: str
    """The reason as metrics count it: ``filter/…``, ``deadline``, ``reward_timeout``, …"""

    words: str
    """The message of the failure; empty where it has none."""

    group: Group
    """Its samples; none where the episode failed."""


@dataclass(frozen=True)
class Vote:
    """The votes of a group, an entry for each answer."""

    agrees: tuple[bool, ...]
    """True for an answer that equals the majority."""

    ratio: float
    """Share of all answers, unparsable ones included, that agree."""

    right: tuple[bool, ...] | None = None
    """True for an answer that equals the expected one; None if that is not known."""

    undecided: int = 0
    """Comparisons that failed; the two answers were taken for different."""
