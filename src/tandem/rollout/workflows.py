"""Workflows: coroutines that turn a row into samples."""

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure, EpisodeFailure, InfrastructureFailure, WrongWorkflow, as_failure
from tandem.api.requests import StopReason
from tandem.api.workflow import EPISODE, GeneratesTokens, Group, RewardFn, RewardResult, RolloutWorkflow, Sample, messages_to
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.rollout.chat import Chat, chat_of
from tandem.rollout.sample_checks import FailureLog, check_sample, counted, least_samples, too_few


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
        """Returns the reward of the last reply, by ``reward`` or else the workflow's own, which alone sets
        `chat.raw_rewards`."""
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
        """Requests the model's next turn and adds it to the chat. Returns the reason why the reply ended.

        Raises:
            DataFailure: ``cancelled``, the engine has cancelled the request.
        """
        response = await engine.agenerate(chat.request(self.gconfig))
        if response.stop_reason == StopReason.CANCELLED:
            raise DataFailure("cancelled", "the request was cancelled, so the reply is not what the policy would have said")
        chat.add(response)
        return response.stop_reason


class RLVRWorkflow(ChatWorkflow):
    """One question, one reply, one verifiable reward. Makes one sample; `Repeated` makes the group."""

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        chat = self.start(data)
        await self.reply(engine, chat)
        result = await self.judge(chat, data)
        return chat.sample(result.value, **result.details())


class Repeated(RolloutWorkflow):
    """Runs a workflow of one sample ``n`` times, each on its own copy of the data, and returns the group.

    A sample that fails because of its data, or cancels itself, is left out, as long as ``min_group_size`` samples remain
    (None: half of ``n``, rounded up); otherwise the group fails with the most common reason. The first failure of each
    reason is logged with its cause. A failure of the infrastructure fails the whole episode, which is then retried.
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
        failures: list[EpisodeFailure] = []
        for result in results:
            if isinstance(result, (InfrastructureFailure, WrongWorkflow)):
                raise result
            if isinstance(result, BaseException):
                failures.append(as_failure(result))
        self._log.warn(failures)
        samples = tuple(result for result in results if isinstance(result, Sample))
        reasons = tuple(failure.reason for failure in failures)
        with counted(reasons):
            if len(samples) < self.min_group_size:
                raise too_few(failures, self.n, self.min_group_size)
            samples = samples if self.reads_scores else await self.finish_group(samples, data)
            return Group(samples, failures=reasons, failure_words=tuple(map(str, failures)))

    async def finish_group(self, samples: tuple[Sample, ...], data: Mapping[str, Any]) -> tuple[Sample, ...]:
        """Calls the wrapped workflow's `finish_group`."""
        return tuple(await self.workflow.finish_group(samples, data))


async def one_sample(workflow: RolloutWorkflow, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
    """Runs a workflow of one sample on its own copy of the data.

    Raises:
        DataFailure: the workflow returned None, or a sample with a number that is not finite (see `check_sample`).
        WrongWorkflow: the workflow returned several samples, or something else.
    """
    EPISODE.set(engine)
    try:
        result = await workflow.arun_episode(engine, copy.deepcopy(dict(data)))
    finally:
        end = getattr(engine, "end", None)
        if end is not None:
            end()
    if result is None:
        raise DataFailure("workflow_returned_none")
    if isinstance(result, Group):
        if len(result.samples) != 1:
            raise WrongWorkflow(
                f"{described(workflow)} returned a group of {len(result.samples)} samples, but it runs gconfig.n_samples "
                "times, for one sample each; if it makes the whole group itself, set its class attribute "
                "`makes_group = True`"
            )
        result = result.samples[0]
    if not isinstance(result, Sample):
        raise WrongWorkflow(
            f"{described(workflow)} must return a Sample, or None to drop the prompt; it returned a "
            f"{type(result).__name__}. `chat.sample(reward)` makes one"
        )
    check_sample(result)
    return result


def described(workflow: RolloutWorkflow) -> str:
    """Returns the workflow's name for errors."""
    return f"workflow {name_of(workflow)}"


def name_of(workflow: RolloutWorkflow) -> str:
    """Returns the name of the workflow's class or function; a wrapper has the name of the wrapped workflow."""
    return str(getattr(workflow, "name", type(workflow).__name__))
