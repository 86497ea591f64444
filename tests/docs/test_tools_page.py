"""The page of tools: its tables are those of the code, and its snippets are tools that a model can call."""

import asyncio
import re
from pathlib import Path

import pytest

from tandem.api.services import Services
from tandem.config.rollout import GenerationConfig
from tandem.config.services import SERVICES
from tandem.protocol.tool_families import FAMILIES
from tandem.rollout.tools.tool_workflow import FAULTS, STOPS, ToolWorkflow
from tests.rollout.scripted import ScriptedEngine
from tests.rollout.test_agent_workflow import run
from tests.rollout.test_tools import ROW, Right, call_of, observations, play
from tests.tiny import tiny_tokenizer

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, AGENTS = (DOCS / "agents_tools.md").read_text(), (DOCS / "agents.md").read_text()


def snippet(page, name):
    """The names of the file that a page shows under this name."""
    (code,) = re.findall(rf"^```python\n(# {name}\n.*?)^```", page, re.M | re.S)
    names = {"__name__": name}
    exec(code, names)
    return names


def section(title):
    return PAGE.split(f"## {title}")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Built-in tools", SERVICES["tool"]),
        ("Limits", STOPS),
        ("When a call goes wrong", [f"tools/{fault}" for fault in FAULTS]),
        ("Which models", FAMILIES),
    ],
)
def test_the_tables_have_every_name(title, names):
    cells = " ".join(line for line in section(title).splitlines() if line.startswith("|"))
    assert [name for name in names if not re.search(rf"`{re.escape(name)}\b", cells)] == []


def test_the_snippets_are_tools(tmp_path):
    weather, shop, _ = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "my_tools.py").write_text(weather)
    (tmp_path / "my_shop.py").write_text(shop)
    names = [f"{tmp_path}/my_tools.py:weather", f"{tmp_path}/my_shop.py:Shop(money=20)"]
    with Services() as services:
        made = ToolWorkflow(Right(), GenerationConfig(temperature=0.7), tiny_tokenizer(), names, services)
        calls = (
            call_of("weather", city="Ulm"),
            call_of("buy", item="a hat", price=15),
            call_of("buy", item="a coat", price=15),
        )
        sample, _ = play(made, *calls, "408")
    assert observations(sample) == [
        "In 1 days it will rain in Ulm.",
        "You have a hat, and 5.0 euros.",
        "Error: there are only 5.0 euros left",
    ]


class Asks(ScriptedEngine):
    """Calls the page's tool once with what fits and once with what does not, and then says the result."""

    def __init__(self):
        lines = [call_of("add", a=3, b=4) + call_of("add", a="three"), "It is 7."]
        super().__init__(lambda request, number: lines[number])

    @property
    def read(self):
        """The text that the model was sent before its second reply."""
        return self.tokenizer.decode(list(self.log[1][0].input_ids), skip_special_tokens=False)


def test_a_loop_of_ones_own_carries_out_the_calls_of_a_chat():
    loop = snippet(PAGE, "my_loop.py")["Loop"]
    engine = Asks()
    sample = asyncio.run(
        loop(Right(), GenerationConfig(temperature=0.7), engine.tokenizer).arun_episode(engine, ROW | {"answer": "7"})
    )
    assert observations(sample) == ["7", "Wrong arguments for add: argument 'b' is missing."]
    (trajectory,) = sample.trajectories
    assert trajectory.input_ids[trajectory.loss_mask].tolist() == [i for _, reply in engine.log for i in reply.output_ids]
    assert sample.reward == 1.0


def test_a_loop_of_ones_own_over_http_reads_the_calls_of_a_reply():
    agent, engine = snippet(AGENTS, "my_solver.py")["agent"], Asks()
    sample = run(agent, engine)
    assert sample.reward == 1.0 and sample.completion_text == "It is 7."
    assert "<tool_response>\n7\n</tool_response>" in engine.read
