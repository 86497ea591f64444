"""The page of tools: its tables are those of the code, and its snippets are tools that a model can call."""

import re
from pathlib import Path

import pytest

from tandem.api.services import Services
from tandem.config.generation import GenerationConfig
from tandem.config.services import SERVICES
from tandem.protocol.tool_families import FAMILIES
from tandem.rollout.tools.workflow import FAULTS, STOPS, ToolWorkflow
from tests.rollout.test_tools import Right, call_of, observations, play
from tests.tiny import tiny_tokenizer

PAGE = (Path(__file__).resolve().parents[2] / "docs/agents_tools.md").read_text()


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
    weather, shop = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
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
