"""Workflows: from a row to samples. Each is one coroutine that reads as the protocol it is."""

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.failures import DataFailure, EpisodeFailure, InfrastructureFailure, WrongWorkflow, as_failure
from tandem.api.requests import StopReason
from tandem.api.samples import Group, Sample
from tandem.api.workflow import EPISODE, EpisodeView, GeneratesTokens, RewardFn, RewardResult, RolloutWorkflow, messages_for
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.rollout.chat import Chat, chat_of
from tandem.rollout.failure_budget import FailureLog, counted, least_samples, too_few
from tandem.rollout.sample_checks import check_sample


class ChatWorkflow(RolloutWorkflow):
    """The common part of workflows of chats: their start and their judgement. A row has ``messages``."""

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
        """A chat that begins with the row's messages, and whose model reads the row's tools."""
        return chat_of(self.tokenizer, data, self.system_prompt, self.chat_template_kwargs)

    async def judge(self, chat: Chat, data: Mapping[str, Any], reward: RewardFn | None = None) -> RewardResult:
        """The reward of the last reply; by ``reward`` if it is given, of which the sample keeps nothing."""
        try:
            result = await (reward or self.reward)(
                prompt=chat.prompt,
                completion=chat.completion,
                prompt_ids=chat.prompt_ids,
                completion_ids=chat.completion_ids,
                row=data,
                **messages_for(reward or self.reward, chat.messages),
            )
        except EpisodeFailure as failure:
            failure.completion_text = chat.completion
            raise
        chat.raw_rewards = result.raw_rewards if reward is None else chat.raw_rewards
        return result

    async def reply(self, engine: GeneratesTokens, chat: Chat) -> StopReason:
        """Lets the model speak; returns why it stopped.

        Raises:
            DataFailure: ``cancelled``, when the engine gave up the request.
        """
        response = await engine.agenerate(chat.request(self.gconfig))
        if response.stop_reason == StopReason.CANCELLED:
            raise DataFailure("cancelled", "the request was cancelled, so the reply is not what the policy would have said")
        chat.add(response)
        return response.stop_reason


class RLVRWorkflow(ChatWorkflow):
    """One question, one answer, one verifiable reward. One sample; `Repeated` makes the group."""

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        chat = self.start(data)
        await self.reply(engine, chat)
        result = await self.judge(chat, data)
        return chat.sample(result.value, **result.details())


class Repeated(RolloutWorkflow):
    """Runs a workflow of one sample ``n`` times, each on its own copy of the data: the group.

    A sample that fails because of its data, or cancels itself, leaves a ragged group, down to ``min_group_size`` (None: half
    of ``n``, rounded up); below that the group fails with the commonest reason. The first failure of each reason is logged
    with its cause. A failure of the infrastructure fails the whole episode, which is then run again.
    """

    def __init__(self, workflow: RolloutWorkflow, n: int, min_group_size: int | None = None, *, finish_later: bool = False):
        """``finish_later``: the group is finished by the executor, behind the rewards that need a model."""
        if n < 1 or not 1 <= least_samples(min_group_size, n) <= n:
            raise ConfigError(f"min_group_size must lie in 1…n, and n be at least 1; got {min_group_size} and n={n}")
        self.workflow, self.n, self.min_group_size = workflow, n, least_samples(min_group_size, n)
        self.reads_scores = finish_later
        self._log = FailureLog()

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Group:
        for_sample = getattr(engine, "for_sample", None)
        engines = [for_sample(i) if for_sample is not None else engine for i in range(self.n)]
        results = await asyncio.gather(*(one_sample(self.workflow, one, data) for one in engines), return_exceptions=True)
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
        """The workflow's own."""
        return tuple(await self.workflow.finish_group(samples, data))


async def one_sample(workflow: RolloutWorkflow, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
    """Runs a workflow of one sample on its own copy of the data.

    Raises:
        DataFailure: it returned None, or a number that is not finite (see `check_sample`).
        WrongWorkflow: it made several samples, or something else.
    """
    EPISODE.set(engine if isinstance(engine, EpisodeView) else None)
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
                f"{described(workflow)} returned a group of {len(result.samples)} samples, and is run gconfig.n_samples "
                "times for one sample each; if it makes the whole group itself, say so with the class attribute "
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
    """Its name, for errors."""
    return f"workflow {name_of(workflow)}"


def name_of(workflow: RolloutWorkflow) -> str:
    """Name of its class or function; those that wrap another carry its name."""
    return str(getattr(workflow, "name", type(workflow).__name__))
