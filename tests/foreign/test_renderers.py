"""Our reader of calls and that of the library renderers agree, on the families that both know: whole, cut off, and broken.

What we append to a sampled reply is what its bridge appends, in the one form whose template and tokenizer are here: ChatML.

Needs ``envs/renderers`` of ``scripts/foreign_agents.sh``.
"""

import json
import random
import subprocess

import pytest

from tandem.api.requests import LLMResponse, StopReason
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.tool_calls import CallReader
from tandem.rollout.forest import Forest
from tests.foreign.peers import ENVS, SCRIPTS
from tests.protocol.templates import TEMPLATES
from tests.protocol.test_tool_calls import read, tool_and_call, written
from tests.tiny import tiny_tokenizer

PYTHON = ENVS / "renderers/bin/python"
KNOWN = {
    "hermes": "qwen3",
    "qwen_coder": "qwen3.5",
    "glm": "glm-4.5",
    "deepseek": "deepseek-v3",
    "kimi": "kimi-k2",
    "gemma4": "gemma4",
    "llama": "llama-3",
}
"""Our family → their renderer."""

SECTIONS = {"deepseek": "<｜tool▁calls▁begin｜>", "kimi": "<|tool_calls_section_begin|>"}
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
        yield tool, text, prompt, "whole"
        for _ in range(3):
            yield tool, text[: draw.randrange(len(text))], prompt, "cut"
        place = draw.randrange(len(SECTIONS.get(family, "")), len(text))
        yield tool, text[:place] + text[place + draw.randrange(1, 4) :], prompt, "broken"


def answers(asked):
    """The answer of the library to each case."""
    command = [str(PYTHON), str(SCRIPTS / "renderers_parser.py")]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("family", KNOWN)
def test_both_read_the_same_calls(family):
    reader = CallReader(tiny_tokenizer(TEMPLATES[family]))
    made = list(cases(family, reader, random.Random(family)))
    asked = [{"renderer": KNOWN[family], "text": text, "tools": [tool["function"]]} for tool, text, *_ in made]
    for (tool, text, prompt, state), theirs in zip(made, answers(asked), strict=True):
        ended = StopReason.STOP if state == "whole" else StopReason.LENGTH
        calls = read(reader, text, [tool], ended, prompt=prompt).calls
        ours = [(str(call.status), call.name, dict(call.arguments)) for call in calls]
        if (
            state == "cut" and family == "llama"
        ):  # a call that has not ended is no call to them, and to us one that is unclosed
            assert theirs == [] and {status for status, *_ in ours} <= {"unclosed"}, (text, ours, theirs)
        elif state == "broken":  # they carry out what is half legible; what we carry out, they do
            assert all(call in map(tuple, theirs) for call in ours if call[0] == "ok"), (text, ours, theirs)
        else:
            assert plain(ours, family) == plain(theirs, family), (text, ours, theirs)


def plain(calls, family):
    """Their common facts about calls: the library may name one that is none, and has one word for all such in DeepSeek."""
    same = STATUSES | (dict.fromkeys(("unclosed", "unclosed_block"), "broken") if family in SECTIONS else {})
    known = [(same.get(status, status), name, arguments) for status, name, arguments in calls]
    return [(status, name, arguments) if status == "ok" else (status,) for status, name, arguments in known]


RESULTS = [{"role": "tool", "tool_call_id": f"{number:09d}", "content": said} for number, said in enumerate(["7", "a\nb "])]
TAILS = {
    "words": [{"role": "user", "content": " And then? ü\n"}],
    "a result": RESULTS[:1],
    "two results": RESULTS,
    "a result and words": [*RESULTS[:1], {"role": "user", "content": "Go on."}],
}


@pytest.mark.parametrize("tail", TAILS)
def test_both_append_the_same_to_a_sampled_reply(tail):
    tokenizer = load_tokenizer(resolve("smollm2-135m"))
    reader, draw = CallReader(tokenizer), random.Random(tail)
    made, asked = [], []
    for number in range(20):
        tool, arguments = tool_and_call(draw)
        call = {"name": tool["function"]["name"], "arguments": arguments}
        said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if "result" in tail else f"It is {number} .\n\n  So"
        forest, question = Forest(tokenizer, reader), [{"role": "user", "content": f"What is {number} + 2?"}]
        first = forest.ask(question, [tool])
        output = (*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        response = LLMResponse(first.input_ids, output, (-0.5,) * len(output), (0,) * len(output), StopReason.STOP)
        reply = reader.read(output, [tool], stop_reason=StopReason.STOP).shown()
        forest.add(first, response, reply)
        again = forest.ask([*question, reply, *TAILS[tail]], [tool])
        made.append((again.parent is not None, tokenizer.decode(again.input_ids)))
        prompt, text = (tokenizer.decode(ids) for ids in (first.input_ids, output))
        asked.append(
            {"renderer": "qwen3", "prompt": prompt, "text": text, "messages": TAILS[tail], "tools": [tool["function"]]}
        )
    assert [(True, text) for text in answers(asked)] == made
