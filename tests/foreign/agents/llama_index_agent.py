"""LlamaIndex's FunctionAgent, which streams."""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def episode(session):
    llm = OpenAILike(
        model="policy",
        api_base=session["base_url"],
        api_key=session["key"],
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=65536,
    )
    return str(await FunctionAgent(tools=[add], llm=llm, system_prompt="Use the tool.").run(session["question"]))


async def main(sessions):
    return await asyncio.gather(*map(episode, sessions))


print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
