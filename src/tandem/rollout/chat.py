"""A conversation as tokens: it only appends, so what is trained is what the engine saw and made."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import render, special_ids, with_tools
from tandem.api.failures import DataFailure
from tandem.api.media import encode, media_of
from tandem.api.requests import LLMRequest, LLMResponse, RequestTiming, StopReason
from tandem.api.samples import Sample, Trajectory
from tandem.config.generation import GenerationConfig
from tandem.media.parts import read_for

SENTINEL = "\u2402reply\u2403"
"""Stands for a reply when the template is asked what it writes around one."""


class Tokens:
    """One growing trajectory: tokens with mask, log-probabilities and versions of equal length."""

    def __init__(self, context: Sequence[int], media: Sequence[int] = ()):
        """``context``, ``media``: see `add_context`."""
        self.ids: list[int] = []
        self.media: list[int] = []
        """The media number of each token; empty where the model reads text alone."""

        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.temperature: float | None = None
        self.stop_reason = StopReason.STOP
        self.add_context(context, media)

    def add_context(self, ids: Sequence[int], media: Sequence[int] = ()) -> None:
        """Tokens that the policy did not make, and the media number of each; none: they are text."""
        if self.media or any(media):  # the first picture may come in a later turn
            self.media += [0] * (len(self.ids) - len(self.media)) + (list(media) or [0] * len(ids))
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def add_response(self, response: LLMResponse) -> None:
        """Tokens that it made."""
        if tuple(self.ids) != tuple(response.input_ids):
            raise ValueError("the response answers another request: its input_ids are not the tokens of this chat")
        self.add_completion(response)

    def add_completion(self, response: LLMResponse, trained: bool = True) -> None:
        """Those of a response to these tokens. ``trained``: they are to be trained on here."""
        if self.temperature not in (None, response.temperature):
            raise ValueError(
                f"one trajectory has one temperature: it began with {self.temperature}, this turn has {response.temperature}"
            )
        self.temperature, self.stop_reason = response.temperature, response.stop_reason
        self.ids += response.output_ids
        self.media += [0] * len(response.output_ids) if self.media else []
        hot = response.untrained_tokens  # drawn at another temperature than the trainer computes with
        self.mask += [False] * hot + [trained] * (len(response.output_ids) - hot)
        self.logprobs += response.logprobs
        self.versions += response.versions

    def trajectory(self) -> Trajectory:
        """The trajectory as tensors, ``[S]``."""
        return Trajectory(
            input_ids=torch.tensor(self.ids, dtype=torch.int64),
            loss_mask=torch.tensor(self.mask, dtype=torch.bool),
            rollout_logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            versions=torch.tensor(self.versions, dtype=torch.int64),
            media=torch.tensor(self.media, dtype=torch.int64) if self.media else None,
            temperature=1.0 if self.temperature is None else self.temperature,
            stop_reason=self.stop_reason,
        )


class Chat:
    """One sample's conversation.

    Example::

        chat = Chat(tokenizer, [{"role": "user", "content": "3 + 4 ="}])
        chat.add(await engine.agenerate(chat.request(gconfig)))
        chat.say("Try again.")

    Tokens are never made from text twice: a new turn appends the tokens of what the template writes around it. Where the
    template rewrites history (it drops the thinking of earlier turns, say), the model would see other tokens than were
    trained: then the chat goes on in a new trajectory of the same sample, whose whole history is context.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        """Reads the images and sounds of the messages that nobody has read yet; raises `DataFailure` for those that cannot
        be read."""
        self.tokenizer, self._kwargs = tokenizer, dict(chat_template_kwargs or {})
        self.messages = read_for(tokenizer, messages)
        if system_prompt is not None and not any(message["role"] == "system" for message in self.messages):
            self.messages.insert(0, {"role": "system", "content": system_prompt})
        self.prompt = self._text = self._render(self.messages)
        context = encode(tokenizer, self.prompt, media_of(self.messages))
        self.prompt_ids = tuple(context.ids)
        self.completion = ""
        self.completion_ids: tuple[int, ...] = ()
        self.raw_rewards: Mapping[str, float] = {}
        """Raw rewards of its last judgement: they come into the sample."""
        self._ended: list[Tokens] = []
        self._timings: list[RequestTiming] = []
        self._tokens = Tokens(*context)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Tokens of the trajectory so far: what the next request sends."""
        return tuple(self._tokens.ids)

    def request(self, gconfig: GenerationConfig) -> LLMRequest:
        """Asks for the next turn of the model."""
        return LLMRequest(self.input_ids, gconfig, media=tuple(self._tokens.media))

    def add(self, response: LLMResponse) -> None:
        """The model's turn: these tokens are trained on.

        Raises:
            ValueError: it answers another request, or was sampled at another temperature than the turns before.
        """
        self._tokens.add_response(response)
        self._timings += [response.timing] if response.timing is not None else []
        self.completion_ids = tuple(response.output_ids)
        self.completion = str(self.tokenizer.decode(list(response.output_ids), skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": self.completion})

    def say(self, text: str | Sequence[Mapping[str, Any]], role: str = "user") -> None:
        """Somebody else's turn, after the model's: context, masked out of the loss. Parts instead of a text may be images
        and sounds, as in the messages of a row.

        What the template writes between the two turns is context too, the end-of-turn token included where the model
        stopped without it. Raises `ValueError` if the model has not spoken.
        """
        if self.messages[-1]["role"] != "assistant":
            raise ValueError(f"say() follows the model's turn (add); the last message is from {self.messages[-1]['role']!r}")
        (turn,) = read_for(self.tokenizer, [{"role": role, "content": text}])
        rendered, addition = self._render([*self.messages, turn]), self._addition(turn)
        if addition is not None and rendered in (
            self._text + self.completion + addition,
            self._text + self.completion.strip() + addition,  # white space around a reply may be trimmed: no other words
        ):
            self._append(self._without_end(addition), [turn])
        else:
            self._begin_anew(rendered, [*self.messages, turn])
        self.messages.append(turn)
        self._text = rendered

    def sample(
        self,
        reward: float,
        *,
        rewards: Mapping[str, float] | None = None,
        accuracy: float | None = None,
        metrics: Mapping[str, float] | None = None,
        answer: str | None = None,
        extracted: bool | None = None,
        words: Mapping[str, str] | None = None,
    ) -> Sample:
        """The finished sample, with every trajectory that has trained tokens.

        Raises:
            DataFailure: ``no_reply``, where the model has said nothing.
        """
        spoken = [tokens for tokens in (*self._ended, self._tokens) if any(tokens.mask)]
        if not spoken:
            raise DataFailure("no_reply", "the sample is of a chat in which the model has said nothing: call reply first")
        return Sample(
            trajectories=tuple(tokens.trajectory() for tokens in spoken),
            reward=float(reward),
            rewards=dict(rewards or {}),
            raw_rewards=dict(self.raw_rewards),
            accuracy=accuracy,
            prompt_text=self.prompt,
            completion_text=self.completion,
            messages=tuple(self.messages),
            metrics=dict(metrics or {}),
            answer=answer,
            extracted=extracted,
            words=dict(words or {}),
            timings=tuple(self._timings),
        )

    def _addition(self, turn: Mapping[str, Any]) -> str | None:
        """The text that the template writes after the reply when ``turn`` follows; None if it changed the text before."""
        reply = {"role": "assistant", "content": SENTINEL}
        before, found, after = self._render([*self.messages[:-1], reply, turn]).partition(SENTINEL)
        return after if found and before == self._text else None

    def _without_end(self, addition: str) -> str:
        """The addition less the end-of-turn token that the model made itself."""
        if self._tokens.stop_reason == StopReason.STOP and self.completion_ids:
            made = str(self.tokenizer.decode([self.completion_ids[-1]], skip_special_tokens=False))
            if self.completion_ids[-1] in special_ids(self.tokenizer) and addition.startswith(made):
                return addition[len(made) :]
        return addition

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return render(self.tokenizer, messages, add_generation_prompt=True, **self._kwargs)

    def _append(self, addition: str, turns: Sequence[Mapping[str, Any]]) -> None:
        """Goes on with the text that the template writes for these turns."""
        self._tokens.add_context(*encode(self.tokenizer, addition, media_of(turns)))

    def _begin_anew(self, rendered: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """The template has rewritten what stood before: a new trajectory, in which all of it is context."""
        self._ended.append(self._tokens)
        self._tokens = Tokens(*encode(self.tokenizer, rendered, media_of(messages)))


def chat_of(tokenizer: Any, row: Mapping[str, Any], system_prompt: str | None, kwargs: Mapping[str, Any] | None) -> Chat:
    """A chat that begins with a row's messages, and whose model reads the row's tools; see `Chat`."""
    return Chat(tokenizer, row["messages"], system_prompt=system_prompt, chat_template_kwargs=with_tools(kwargs or {}, row))
