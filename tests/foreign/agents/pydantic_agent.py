"""pydantic-ai."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


async def episode(session, kind):
    provider = OpenAIProvider(base_url=session["base_url"], api_key=session["key"])
    model = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]("policy", provider=provider)
    agent = Agent(model, instructions="Use the tool.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    return (await agent.run(session["question"])).output


async def main(kind, sessions):
    return await asyncio.gather(*(episode(session, kind) for session in sessions))


print(json.dumps(asyncio.run(main(sys.argv[1], json.load(sys.stdin)))))
