"""Strands Agents, which stream."""

import asyncio
import json
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def episode(session):
    model = OpenAIModel(client_args={"base_url": session["base_url"], "api_key": session["key"]}, model_id="policy")
    agent = Agent(model=model, tools=[add], system_prompt="Use the tool.", callback_handler=None)
    return str(await agent.invoke_async(session["question"])).strip()


async def main(sessions):
    return await asyncio.gather(*map(episode, sessions))


print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
