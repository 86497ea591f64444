"""smolagents: the agent that calls tools, and the one that writes code. Its agents are synchronous, so each has a thread."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def episode(session, kind):
    model = OpenAIServerModel(model_id="policy", api_base=session["base_url"], api_key=session["key"])
    agent = {"tools": ToolCallingAgent, "code": CodeAgent}[kind](tools=[add], model=model, max_steps=6, verbosity_level=0)
    return str(agent.run(session["question"]))


def main(kind, sessions):
    with ThreadPoolExecutor(len(sessions)) as threads:
        return list(threads.map(lambda session: episode(session, kind), sessions))


print(json.dumps(main(sys.argv[1], json.load(sys.stdin))))
