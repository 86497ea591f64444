"""A workflow of several turns in one sample: asks again until the answer is right."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.api.requests import StopReason
from tandem.api.workflow import GeneratesTokens, RewardFn, Sample
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.rollout.workflows import ChatWorkflow


class MultiTurnWorkflow(ChatWorkflow):
    """Asks again, with the wrong answers in context, until the answer is right or the turns are used up.

    The reward of the last turn is multiplied by ``turn_discount`` for each earlier turn, except a cost, which more turns
    must not reduce. An answer is right if its accuracy is 1, or, without an accuracy, if its reward is above 0.
    """

    reads_reward = "midway"

    def __init__(
        self,
        reward: RewardFn,
        gconfig: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_turns: int = 3,
        turn_discount: float = 0.9,
        retry_message: str = "That is not correct. Try again.",
    ):
        super().__init__(reward, gconfig, tokenizer, system_prompt=system_prompt, chat_template_kwargs=chat_template_kwargs)
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns, self.turn_discount, self.retry_message = max_turns, turn_discount, retry_message

    async def arun_episode(self, engine: GeneratesTokens, data: Mapping[str, Any]) -> Sample:
        chat = self.start(data)
        for turn in range(self.max_turns):
            stop_reason = await self.reply(engine, chat)
            result = await self.judge(chat, data)
            right = result.value > 0 if result.accuracy is None else result.accuracy >= 1
            if right or stop_reason == StopReason.LENGTH or turn + 1 == self.max_turns:
                break
            chat.say(self.retry_message)
        discount = self.turn_discount**turn
        parts = {name: value if name == self.reward.cost else value * discount for name, value in result.rewards.items()}
        return chat.sample(result.value * discount, metrics={"turns": turn + 1.0}, **result.details() | {"rewards": parts})
