"""dspy's ReAct: every step is a prompt of its own, and so is the answer, which another prompt asks for."""

import asyncio
import json
import sys

import dspy


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def episode(session):
    lm = dspy.LM("openai/policy", api_base=session["base_url"], api_key=session["key"], cache=False)
    with dspy.context(lm=lm):
        return (await dspy.ReAct("question -> answer", tools=[add]).acall(question=session["question"])).answer


async def main(sessions):
    return await asyncio.gather(*map(episode, sessions))


print(json.dumps(asyncio.run(main(json.load(sys.stdin)))))
