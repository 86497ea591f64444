"""Inspect AI: one evaluation whose samples are the episodes, each with a model at its own session."""

import json
import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, get_model
from inspect_ai.solver import solver
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    return execute


@solver
def at_own_session():
    async def solve(state, ask):
        model = get_model(
            "openai-api/tandem/policy",
            base_url=state.metadata["base_url"],
            api_key=state.metadata["key"],
            memoize=False,
        )
        messages, state.output = await model.generate_loop([ChatMessageUser(content=state.input_text)], tools=[add()])
        state.messages += messages
        return state

    return solve


def main(sessions):
    dataset = [Sample(input=s["question"], target="", metadata=s) for s in sessions]
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(Task(dataset, solver=at_own_session()), model=None, log_dir=folder, display="none")
        if log.status != "success":
            raise SystemExit(f"{log.status}: {log.error}")
        return [sample.output.completion for sample in sorted(log.samples, key=lambda sample: sample.id)]


print(json.dumps(main(json.load(sys.stdin))))
