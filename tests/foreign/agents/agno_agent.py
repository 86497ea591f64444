"""agno."""

import asyncio
import json
import sys

from agno.agent import Agent
from agno.models.openai.like import OpenAILike


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def episode(session):
    model = OpenAILike(id="policy", base_url=session["base_url"], api_key=session["key"])
    agent = Agent(model=model, tools=[add], instructions="Use the tool.", telemetry=False)
    return (await agent.arun(session["question"])).content


async def main(sessions):
    return await asyncio.gather(*map(episode, sessions))


print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
