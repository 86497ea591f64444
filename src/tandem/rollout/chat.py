"""A conversation as tokens. Tokens are only appended, so training sees exactly the tokens that the engine read and wrote."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import render, special_ids, with_tools
from tandem.api.failures import DataFailure
from tandem.api.media import encode, media_of
from tandem.api.requests import LLMRequest, LLMResponse, RequestTiming, StopReason
from tandem.api.workflow import Sample, Trajectory
from tandem.config.rollout import GenerationConfig
from tandem.media.parts import read_for

SENTINEL = "\u2402reply\u2403"
"""Placeholder for a reply, used to find the text that the template writes around a reply."""


class Tokens:
    """One growing trajectory: tokens, with loss mask, log-probabilities and versions of equal length."""

    def __init__(self, context: Sequence[int], media: Sequence[int] = ()):
        """``context``, ``media``: see `add_context`."""
        self.ids: list[int] = []
        self.media: list[int] = []
        """The media number of each token (0: text); empty if the trajectory has no media."""

        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.temperature: float | None = None
        self.stop_reason = StopReason.STOP
        self.add_context(context, media)

    def add_context(self, ids: Sequence[int], media: Sequence[int] = ()) -> None:
        """Appends tokens that the policy did not generate. ``media``: media number of each token; empty: all are text."""
        if self.media or any(media):  # the first image may come in a later turn
            self.media += [0] * (len(self.ids) - len(self.media)) + (list(media) or [0] * len(ids))
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def add_response(self, response: LLMResponse) -> None:
        """Appends a response's output tokens. Raises `ValueError` if the response does not answer these tokens."""
        if tuple(self.ids) != tuple(response.input_ids):
            raise ValueError("the response answers another request: its input_ids are not the tokens of this chat")
        self.add_completion(response)

    def add_completion(self, response: LLMResponse, trained: bool = True) -> None:
        """Appends the output tokens of a response without checking its input. ``trained``: include them in the loss."""
        if self.temperature not in (None, response.temperature):
            raise ValueError(
                f"one trajectory has one temperature: it began with {self.temperature}, this turn has {response.temperature}"
            )
        self.temperature, self.stop_reason = response.temperature, response.stop_reason
        self.ids += response.output_ids
        self.media += [0] * len(response.output_ids) if self.media else []
        num_untrained = response.untrained_tokens  # sampled at another temperature than the trainer uses
        self.mask += [False] * num_untrained + [trained] * (len(response.output_ids) - num_untrained)
        self.logprobs += response.logprobs
        self.versions += response.versions

    def trajectory(self) -> Trajectory:
        """Returns the trajectory with tensors of shape ``[S]``."""
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

    Text is never tokenised twice: a new turn appends only the tokens of the text that the template writes around it. If the
    template rewrites history (for example drops the thinking of earlier turns), the model would see other tokens than were
    trained. The chat then continues in a new trajectory of the same sample, whose whole history is context.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Mapping[str, Any]],
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        """Starts a conversation with these messages and loads their images and sounds, unless they are loaded already.
        Raises `DataFailure` if an image or sound is unreadable."""
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
        """Raw rewards of the chat's last judgement; copied into the sample."""
        self._ended: list[Tokens] = []
        self._timings: list[RequestTiming] = []
        self._tokens = Tokens(*context)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Tokens of the current trajectory, which the next request sends."""
        return tuple(self._tokens.ids)

    def request(self, gconfig: GenerationConfig) -> LLMRequest:
        """Returns the request to the engine for the model's next turn."""
        return LLMRequest(self.input_ids, gconfig, media=tuple(self._tokens.media))

    def add(self, response: LLMResponse) -> None:
        """Appends the model's turn, whose tokens are trained on.

        Raises:
            ValueError: the response answers another request, or has another temperature than earlier turns.
        """
        self._tokens.add_response(response)
        self._timings += [response.timing] if response.timing is not None else []
        self.completion_ids = tuple(response.output_ids)
        self.completion = str(self.tokenizer.decode(list(response.output_ids), skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": self.completion})

    def say(self, text: str | Sequence[Mapping[str, Any]], role: str = "user") -> None:
        """Appends a turn that the model did not write, such as the user's, as context outside the loss. ``text`` may also be
        a list of parts with images and sounds, as in a row's messages.

        The text that the template writes between two turns is context too, including the end-of-turn token if the model
        stopped without it. Raises `ValueError` if the last turn is not the model's.
        """
        if self.messages[-1]["role"] != "assistant":
            raise ValueError(f"say() follows the model's turn (add); the last message is from {self.messages[-1]['role']!r}")
        (turn,) = read_for(self.tokenizer, [{"role": role, "content": text}])
        rendered, addition = self._render([*self.messages, turn]), self._addition(turn)
        if addition is not None and rendered in (
            self._text + self.completion + addition,
            self._text + self.completion.strip() + addition,  # a template may trim white space around a reply
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
        """Returns the finished sample with every trajectory that has trained tokens.

        Raises:
            DataFailure: ``no_reply``, the model has not replied yet.
        """
        trained = [tokens for tokens in (*self._ended, self._tokens) if any(tokens.mask)]
        if not trained:
            raise DataFailure("no_reply", "this chat has no reply of the model: call reply before sample")
        return Sample(
            trajectories=tuple(tokens.trajectory() for tokens in trained),
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
        """Returns the text that the template writes between the last reply and the model's next turn if ``turn`` follows the
        reply; None if the template changes the text before the reply."""
        reply = {"role": "assistant", "content": SENTINEL}
        before, separator, after = self._render([*self.messages[:-1], reply, turn]).partition(SENTINEL)
        return after if separator and before == self._text else None

    def _without_end(self, addition: str) -> str:
        """Returns ``addition`` without an end-of-turn token at its start if the completion already ends with this token."""
        if self._tokens.stop_reason == StopReason.STOP and self.completion_ids:
            end_token = str(self.tokenizer.decode([self.completion_ids[-1]], skip_special_tokens=False))
            if self.completion_ids[-1] in special_ids(self.tokenizer) and addition.startswith(end_token):
                return addition[len(end_token) :]
        return addition

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return render(self.tokenizer, messages, add_generation_prompt=True, **self._kwargs)

    def _append(self, addition: str, turns: Sequence[Mapping[str, Any]]) -> None:
        """Appends the tokens of text that the template wrote for these turns."""
        self._tokens.add_context(*encode(self.tokenizer, addition, media_of(turns)))

    def _begin_anew(self, rendered: str, messages: Sequence[Mapping[str, Any]]) -> None:
        """Starts a new trajectory with the whole chat as context. Called when the template has rewritten earlier text."""
        self._ended.append(self._tokens)
        self._tokens = Tokens(*encode(self.tokenizer, rendered, media_of(messages)))


def chat_of(tokenizer: Any, row: Mapping[str, Any], system_prompt: str | None, kwargs: Mapping[str, Any] | None) -> Chat:
    """Returns a chat that begins with a row's messages and whose template gets the row's tools; see `Chat`."""
    return Chat(tokenizer, row["messages"], system_prompt=system_prompt, chat_template_kwargs=with_tools(kwargs or {}, row))
