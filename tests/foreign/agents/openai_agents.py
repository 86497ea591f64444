"""OpenAI's Agents SDK: chat completions and responses, whole and streamed."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def episode(session, kind):
    client = AsyncOpenAI(base_url=session["base_url"], api_key=session["key"])
    model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[kind.partition("-")[0]]
    agent = Agent(name="solver", instructions="Use the tool.", tools=[add], model=model("policy", openai_client=client))
    if kind.endswith("-stream"):
        result = Runner.run_streamed(agent, session["question"])
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, session["question"])
    return result.final_output


async def main(kind, sessions):
    return await asyncio.gather(*(episode(session, kind) for session in sessions))


print(json.dumps(asyncio.run(main(sys.argv[1], json.load(sys.stdin)))))
