"""AutoGen's AssistantAgent."""

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABLE = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False, "family": "unknown"}


async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def episode(session):
    there = {"base_url": session["base_url"], "api_key": session["key"]}
    client = OpenAIChatCompletionClient(model="policy", model_info=ABLE, **there)
    agent = AssistantAgent("solver", client, tools=[add], system_message="Use the tool.", max_tool_iterations=5)
    return (await agent.run(task=session["question"])).messages[-1].content


async def main(sessions):
    return await asyncio.gather(*map(episode, sessions))


print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
