"""Workflows that talk to a partner, for tests: they dawdle, so that what arrives when is another at each run."""

import asyncio
import random

from tandem import ChatWorkflow


class Asks(ChatWorkflow):
    """The policy speaks, then the partner, then the policy; or the partner begins. ``dawdle_s``: the longest pause."""

    def __init__(self, partner, gconfig, tokenizer, *, first: bool = False, dawdle_s: float = 0.02, **rest):
        super().__init__(gconfig=gconfig, tokenizer=tokenizer, **rest)
        self.partner, self.first, self.dawdle_s = partner, first, dawdle_s

    async def arun_episode(self, engine, data):
        await asyncio.sleep(random.random() * self.dawdle_s)  # not the run's noise
        said = [await self.partner.reply(engine, data["messages"])] if self.first else []
        chat = self.start({"messages": [{"role": "user", "content": " ".join(said) or "Begin."}]})
        await self.reply(engine, chat)
        await asyncio.sleep(random.random() * self.dawdle_s)
        if len(chat.completion) % 3:  # some samples are done here, and nobody waits for them
            said.append(await self.partner.reply(engine, [{"role": "user", "content": chat.completion}]))
            chat.say(said[-1])
            await self.reply(engine, chat)
        turns = sum(message["role"] == "assistant" for message in chat.messages)
        return chat.sample(float(len(chat.completion) % 2), words={"partner": "|".join(said)}, metrics={"spoken": turns})


async def agent(base_url, api_key, data, partner):
    """An agent over HTTP has no engine of the episode, beside which a partner could be asked."""
