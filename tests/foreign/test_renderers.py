"""Our reader of calls and that of the library renderers agree, on the families that both know: whole, cut off, and broken.

Needs ``envs/renderers`` of ``scripts/foreign_agents.sh``.
"""

import json
import random
import subprocess

import pytest

from tandem.api.requests import StopReason
from tandem.protocol.tool_calls import CallReader
from tests.foreign.peers import ENVS, SCRIPTS
from tests.protocol.templates import TEMPLATES
from tests.protocol.test_tool_calls import read, tool_and_call, written
from tests.tiny import tiny_tokenizer

PYTHON = ENVS / "renderers/bin/python"
KNOWN = {"hermes": "qwen3", "qwen_coder": "qwen3.5", "glm": "glm-4.5", "deepseek": "deepseek-v3"}
"""Our family → their renderer."""

SECTIONS = {"deepseek": "<｜tool▁calls▁begin｜>"}
"""The mark before all calls of a reply, without which they see none."""

BROKEN = ("invalid_json", "missing_name", "malformed_structure")
STATUSES = {"unclosed_block": "unclosed", "unknown_tool": "ok", "wrong_arguments": "ok", **dict.fromkeys(BROKEN, "broken")}
"""Theirs or ours → what both can know: they look at no schema."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="renderers is not there; scripts/foreign_agents.sh makes it"),
]


def cases(family, reader, draw):
    """Replies as the family's template writes them, cut off, and (marked so) with a few characters lost."""
    for _ in range(40):
        tool, arguments = tool_and_call(draw)
        text, prompt = written(reader, [tool], (tool["function"]["name"], arguments))
        text = SECTIONS.get(family, "") + text
        yield tool, text, prompt, False
        for _ in range(3):
            yield tool, text[: draw.randrange(len(text))], prompt, False
        place = draw.randrange(len(SECTIONS.get(family, "")), len(text))
        yield tool, text[:place] + text[place + draw.randrange(1, 4) :], prompt, True


@pytest.mark.parametrize("family", KNOWN)
def test_both_read_the_same_calls(family):
    reader = CallReader(tiny_tokenizer(TEMPLATES[family]))
    made = list(cases(family, reader, random.Random(family)))
    asked = [{"renderer": KNOWN[family], "text": text, "tools": [tool["function"]]} for tool, text, *_ in made]
    command = [str(PYTHON), str(SCRIPTS / "renderers_parser.py")]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    for (tool, text, prompt, is_broken), theirs in zip(made, json.loads(done.stdout), strict=True):
        calls = read(reader, text, [tool], StopReason.LENGTH, prompt=prompt).calls
        ours = [(str(call.status), call.name, dict(call.arguments)) for call in calls]
        if is_broken:  # they carry out what is half legible; what we carry out, they do
            assert all(call in map(tuple, theirs) for call in ours if call[0] == "ok"), (text, ours, theirs)
        else:
            assert plain(ours, family) == plain(theirs, family), (text, ours, theirs)


def plain(calls, family):
    """What both can know of calls; theirs may name one that is none, and has one word for all such in DeepSeek."""
    same = STATUSES | (dict.fromkeys(("unclosed", "unclosed_block"), "broken") if family in SECTIONS else {})
    known = [(same.get(status, status), name, arguments) for status, name, arguments in calls]
    return [(status, name, arguments) if status == "ok" else (status,) for status, name, arguments in known]
