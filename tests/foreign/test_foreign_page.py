"""docs/agents_foreign.md: its table is that of the tests of foreign agents, and its lines are those that they run."""

import inspect
import re
from pathlib import Path

from tandem.protocol.dialects import DIALECTS
from tests.foreign import peers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents_foreign.md").read_text()


def test_the_table_lists_the_agents_that_are_tested():
    rows = [
        f"| {peer.name} | {peer.dialect} | {peer.history} | {peer.roots} of {peer.turns} | {peer.needs} |"
        for peer in peers.PEERS
    ]
    assert [line for line in PAGE.splitlines() if line in rows] == rows


def test_the_versions_are_those_that_are_installed():
    script = (ROOT / "scripts/foreign_agents.sh").read_text()
    block = script.partition("environment agents")[2].partition("environment verifiers")[0]
    pinned = re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", block) + re.findall(r"(@?[\w/-]+)@([\d.]+)", script)
    assert len(pinned) == 18 and [name for name, version in pinned if f"{name} {version}" not in PAGE] == []


def test_the_lines_of_an_agent_are_those_that_run():
    sources = [path.read_text() for path in sorted(peers.SCRIPTS.glob("*.py"))]
    there = {line.strip() for source in (*sources, inspect.getsource(peers)) for line in source.splitlines()}
    there = {re.sub(r'session\["(\w+)"\]', r"\1", line) for line in there}
    section = PAGE.partition("## The lines")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```", section, re.M | re.S)
    shown = [line.strip() for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]
    assert len(shown) > 10 and [line for line in shown if line not in there] == []


def test_every_dialect_has_its_row():
    assert all(f"| `{dialect.path}` |" in PAGE for dialect in DIALECTS)
