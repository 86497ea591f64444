"""Workflows: coroutines that turn a row into samples. A row becomes a chat, and the tokens of a chat are a sample.

Tokens are only appended, so training sees exactly the tokens that the engine read and wrote.
"""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import render, special_ids, with_tools
from tandem.api.failures import DataFailure, EpisodeFailure
from tandem.api.media import encode, media_of
from tandem.api.requests import LLMRequest, LLMResponse, RequestTiming, StopReason
from tandem.api.workflow import (
    EPISODE,
    GeneratesTokens,
    Group,
    RewardFn,
    RewardResult,
    RolloutWorkflow,
    Sample,
    Trajectory,
    messages_to,
)
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.media.parts import read_for
from tandem.rollout.sample_checks import FailureLog, counted, failures_of, least_samples, sample_of, too_few

SENTINEL = "\u2402reply\u2403"
"""Placeholder for a reply, used to find the text that the template writes around a reply."""


class Tokens:
    """One growing trajectory: tokens, with loss mask, log-probabilities and versions of equal length."""

    def __init__(self, context: Sequence[int], media: Sequence[int] = ()):
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
        """Appends a response's output tokens, trained on. Raises `ValueError` if it does not answer these tokens."""
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
    """One sample's conversation. Example: ``chat.add(await engine.agenerate(chat.request(gconfig)))``, then
    ``chat.say("Try again.")``.

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
        """Loads images and sounds of the messages, unless they are loaded. Raises `DataFailure` if one is unreadable."""
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
        """Appends the model's turn, which is trained on. Raises `ValueError` if the response answers another request,
        or has another temperature than earlier turns."""
        self._tokens.add_response(response)
        self._timings += [response.timing] if response.timing is not None else []
        self.completion_ids = tuple(response.output_ids)
        self.completion = str(self.tokenizer.decode(list(response.output_ids), skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": self.completion})

    def say(self, text: str | Sequence[Mapping[str, Any]], role: str = "user") -> None:
        """Appends a turn that the model did not write, such as the user's, as context outside the loss, with the text that
        the template writes between two turns. ``text`` may also be a list of parts with images and sounds, as in a row's
        messages. Raises `ValueError` if the last turn is not the model's.
        """
        if self.messages[-1]["role"] != "assistant":
            raise ValueError(f"say() follows the model's turn (add); the last message is from {self.messages[-1]['role']!r}")
        (turn,) = read_for(self.tokenizer, [{"role": role, "content": text}])
        rendered, reply = self._render([*self.messages, turn]), {"role": "assistant", "content": SENTINEL}
        before, separator, addition = self._render([*self.messages[:-1], reply, turn]).partition(SENTINEL)
        # a template may trim white space around a reply
        whole = [self._text + completion + addition for completion in (self.completion, self.completion.strip())]
        self._append([turn], rendered, addition if separator and before == self._text and rendered in whole else None)

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
        """Returns the finished sample with every trajectory that has trained tokens. Raises `DataFailure`, ``no_reply``, if
        the model has not replied yet."""
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

    def _append(self, turns: list[dict[str, Any]], rendered: str, addition: str | None) -> None:
        """Appends turns that the model did not write. ``rendered``: the whole chat. ``addition``: the text that the template
        writes between the last reply and the model's next turn; None if the template has changed earlier text."""
        if addition is None:
            self._ended.append(self._tokens)
            self._tokens = Tokens(*encode(self.tokenizer, rendered, media_of([*self.messages, *turns])))
        else:
            if self._tokens.stop_reason == StopReason.STOP and self.completion_ids:  # it ends with an end-of-turn token
                end_token = str(self.tokenizer.decode([self.completion_ids[-1]], skip_special_tokens=False))
                if self.completion_ids[-1] in special_ids(self.tokenizer):
                    addition = addition.removeprefix(end_token)
            self._tokens.add_context(*encode(self.tokenizer, addition, media_of(turns)))
        self.messages += turns  # in place, because a workflow may hold the list
        self._text = rendered

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return render(self.tokenizer, messages, add_generation_prompt=True, **self._kwargs)


def chat_of(tokenizer: Any, row: Mapping[str, Any], system_prompt: str | None, kwargs: Mapping[str, Any] | None) -> Chat:
    """Returns a chat that begins with a row's messages and whose template gets the row's tools; see `Chat`."""
    return Chat(tokenizer, row["messages"], system_prompt=system_prompt, chat_template_kwargs=with_tools(kwargs or {}, row))


class ChatWorkflow(RolloutWorkflow):
    """Base class of chat workflows: creates the chat and judges its reply. A row has ``messages``."""

    def __init__(
        self,
        reward: RewardFn,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.reward, self.gconfig, self.tokenizer = reward, gconfig, tokenizer
        self.system_prompt, self.chat_template_kwargs = system_prompt, dict(chat_template_kwargs or {})

    def start(self, data: Mapping[str, Any]) -> Chat:
        """Returns a chat that begins with the row's messages and whose template gets the row's tools."""
        return chat_of(self.tokenizer, data, self.system_prompt, self.chat_template_kwargs)

    async def judge(self, chat: Chat, data: Mapping[str, Any], reward: RewardFn | None = None) -> RewardResult:
        """Returns the reward of the last reply by ``reward``, or by the workflow's, which alone sets `chat.raw_rewards`."""
        try:
            result = await (reward or self.reward)(
                prompt=chat.prompt,
                completion=chat.completion,
                prompt_ids=chat.prompt_ids,
                completion_ids=chat.completion_ids,
                row=data,
                **messages_to(reward or self.reward, chat.messages),
            )
        except EpisodeFailure as failure:
            failure.completion_text = chat.completion
            raise
        chat.raw_rewards = result.raw_rewards if reward is None else chat.raw_rewards
        return result

    async def reply(self, engine: GeneratesTokens, chat: Chat) -> StopReason:
        """Requests the model's next turn and adds it to the chat. Returns the reason why the reply ended. Raises
        `DataFailure`, ``cancelled``, if the engine has cancelled the request."""
        response = await engine.agenerate(chat.request(self.gconfig))
        if response.stop_reason == StopReason.CANCELLED:
            raise DataFailure("cancelled", "the request was cancelled, so the reply is not what the policy would have said")
        chat.add(response)
        return response.stop_reason


class RLVRWorkflow(ChatWorkflow):
    """One question, one reply, one verifiable reward: one sample."""

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        chat = self.start(data)
        await self.reply(engine, chat)
        result = await self.judge(chat, data)
        return chat.sample(result.value, **result.details())


class Repeated(RolloutWorkflow):
    """Runs a workflow of one sample ``n`` times, each on its own copy of the data, and returns the group.

    A sample that fails because of its data, or cancels itself, is left out, as long as ``min_group_size`` samples remain
    (None: half of ``n``, rounded up); otherwise the group fails with the most common reason. A failure of the infrastructure
    fails the whole episode, which is then retried.
    """

    def __init__(self, workflow: RolloutWorkflow, n: int, min_group_size: int | None = None, *, finish_later: bool = False):
        """``finish_later``: the executor finishes the group, after the rewards of models."""
        if n < 1 or not 1 <= least_samples(min_group_size, n) <= n:
            raise ConfigError(f"min_group_size must lie in 1…n, and n be at least 1; got {min_group_size} and n={n}")
        self.workflow, self.n, self.min_group_size = workflow, n, least_samples(min_group_size, n)
        self.reads_scores = finish_later
        self._log = FailureLog()

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Group:
        for_sample = getattr(engine, "for_sample", None)
        engines = [for_sample(i) if for_sample is not None else engine for i in range(self.n)]
        results = await asyncio.gather(*(one_sample(self.workflow, each, data) for each in engines), return_exceptions=True)
        failures = failures_of(results)
        self._log.warn(failures)
        samples = tuple(result for result in results if isinstance(result, Sample))
        reasons = tuple(failure.reason for failure in failures)
        with counted(reasons):
            if len(samples) < self.min_group_size:
                raise too_few(failures, self.n, self.min_group_size)
            samples = samples if self.reads_scores else await self.finish_group(samples, data)
            return Group(samples, failures=reasons, failure_words=tuple(map(str, failures)))

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        return tuple(await self.workflow.finish_group(samples, data))


async def one_sample(workflow: RolloutWorkflow, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
    """Runs a workflow of one sample on its own copy of the data, and checks the sample (see `sample_of`)."""
    EPISODE.set(engine)
    try:
        result = await workflow.arun_episode(engine, copy.deepcopy(dict(data)))
    finally:
        end = getattr(engine, "end", None)
        if end is not None:
            end()
    return sample_of(result, workflow)
