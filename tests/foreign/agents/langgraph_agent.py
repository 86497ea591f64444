"""LangGraph's ready-made agent over langchain-openai."""

import asyncio
import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def episode(session):
    model = ChatOpenAI(model="policy", base_url=session["base_url"], api_key=session["key"])
    agent = create_react_agent(model, [add], prompt="Use the tool.")
    result = await agent.ainvoke({"messages": [("user", session["question"])]})
    return result["messages"][-1].content


async def main(sessions):
    return await asyncio.gather(*map(episode, sessions))


print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
