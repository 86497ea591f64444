"""A chat with tools: what was sampled is trained, and whatever a tool does, the model is told and the chat goes on."""

import asyncio
import json
import re
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy
import pytest
import torch

from tandem.api.failures import DataFailure
from tandem.api.requests import LLMResponse, StopReason
from tandem.api.services import Services
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.config.rollout import GenerationConfig
from tandem.rollout.tools.calculator import calculator
from tandem.rollout.tools.tool import FunctionBox, Tool, Toolbox, ToolFailure, tool_schema
from tandem.rollout.tools.tool_workflow import ToolWorkflow
from tests.protocol.templates import TEMPLATES
from tests.tiny import tiny_tokenizer

GCONFIG = GenerationConfig(temperature=0.7, max_new_tokens=400)
ROW = {"messages": [{"role": "user", "content": "12 * 34?"}], "answer": "408"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 34"}}\n</tool_call>'


class Scripted:
    """An engine that says the given replies in order, and notes what it was sent and returned."""

    def __init__(self, tokenizer, *replies, remaining_s=None):
        self.tokenizer, self.replies, self.log = tokenizer, list(replies), []
        if remaining_s is not None:
            self.remaining_s = remaining_s

    async def agenerate(self, request):
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        cut = reply.endswith("…")
        ids = self.tokenizer(reply.removesuffix("…"), add_special_tokens=False)["input_ids"]
        ids += [] if cut else [self.tokenizer.eos_token_id]
        reason = StopReason.LENGTH if cut else StopReason.STOP
        response = LLMResponse(request.input_ids, tuple(ids), (-0.5,) * len(ids), (0,) * len(ids), reason, 0.7)
        self.log.append(response)
        return response


class Right(RewardFn):
    async def __call__(self, *, completion, row, **rest):
        return RewardResult(float(str(row.get("answer")) in completion))


def workflow(tools=calculator, tokenizer=None, **limits):
    """The workflow with functions or toolboxes as its tools."""
    tokenizer = tokenizer or tiny_tokenizer()
    made = ToolWorkflow(Right(), GCONFIG, tokenizer, "calculator", Services(), **limits)
    tools = tools if isinstance(tools, list) else [tools]
    made.boxes = [tool if isinstance(tool, Toolbox) else FunctionBox(tool) for tool in tools]
    return made


def play(made, *replies, remaining_s=None):
    engine = Scripted(made.tokenizer, *replies, remaining_s=remaining_s)
    return asyncio.run(made.arun_episode(engine, dict(ROW))), engine


def observations(sample):
    return [message["content"] for message in sample.messages if message["role"] == "tool"]


def call_of(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    "family", ["no tools", "hermes", "qwen_coder", "glm", "deepseek", "kimi", "llama", "gemma4", "mistral"]
)
def test_the_trained_tokens_are_those_that_were_sampled_over_several_turns(family):
    tokenizer = tiny_tokenizer(TEMPLATES[family]) if family in TEMPLATES else tiny_tokenizer()
    made = workflow(tokenizer=tokenizer)
    assistant = {"role": "assistant", "content": ""}
    replies = []
    for expression in ("12 * 34", "408 +  1"):
        call = {
            "id": "000000001",
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": expression}},
        }
        text = made.reader.render([*ROW["messages"], assistant | {"tool_calls": [call]}], [], add_generation_prompt=False)
        replies.append(
            " " + text.split("<|im_start|>assistant\n")[1].removesuffix("<|im_end|>\n")
        )  # a space no template writes
    sample, engine = play(made, *replies, "It is 408.")

    (trajectory,) = sample.trajectories
    one, two, three = engine.log
    assert two.input_ids[: len(one.input_ids + one.output_ids)] == one.input_ids + one.output_ids
    assert three.input_ids[: len(two.input_ids + two.output_ids)] == two.input_ids + two.output_ids
    assert tuple(trajectory.input_ids.tolist()) == three.input_ids + three.output_ids
    assert tuple(trajectory.input_ids[trajectory.loss_mask].tolist()) == one.output_ids + two.output_ids + three.output_ids
    assert observations(sample) == ["408", "409"] and sample.reward == 1.0
    text = tokenizer.decode(trajectory.input_ids.tolist(), skip_special_tokens=False)
    canonical = made.reader.render(sample.messages, [t.tool.schema for t in made.boxes], add_generation_prompt=False)
    assert text.replace("\n ", "\n").split() == canonical.replace("\n ", "\n").split()  # but for the space


def test_a_template_that_drops_thinking_begins_a_new_trajectory_of_the_same_sample():
    forgetful = TEMPLATES["hermes"].replace("m.content }}", "m.content.split('</think>')[-1] }}")
    made = workflow(tokenizer=tiny_tokenizer(forgetful))
    sample, engine = play(made, f"<think>hm</think>{CALL}", "408")
    assert len(sample.trajectories) == 2
    for trajectory, response in zip(sample.trajectories, engine.log, strict=True):
        assert tuple(trajectory.input_ids[trajectory.loss_mask].tolist()) == response.output_ids


def slow(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


async def asleep(seconds: float) -> dict:
    """Waits.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def broken(word: str) -> str:
    """Breaks.

    Args:
        word: any
    """
    raise KeyError(word)


def unwritable(word: str) -> object:
    """Gives what has no words.

    Args:
        word: any
    """
    return {"found": object()}


FAULTS = {
    "malformed": ('<tool_call>\n{"name": "calculator", "arg\n</tool_call>', "call cannot be read"),
    "unknown_tool": (call_of("calc", expression="1"), "There is no tool 'calc'"),
    "wrong_arguments": (call_of("calculator", term="1"), "'expression' is missing"),
    "tool_raised": (call_of("broken", word="x"), "KeyError: 'x'"),
    "tool_timeout": (call_of("slow", seconds=30), "was not done after"),
    "wrong_result": (
        call_of("unwritable", word="x"),
        "returned a value that cannot be written as JSON: it contains a object. Return text, numbers, lists or dicts",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_an_observation_and_counted_by_its_name(fault):
    reply, words = FAULTS[fault]
    made = workflow([calculator, broken, slow, unwritable], tool_seconds=0.2)
    began = time.monotonic()
    sample, _ = play(made, reply, CALL, "408")
    assert time.monotonic() - began < 25  # the slow one sleeps for 30
    assert any(words in m["content"] for m in sample.messages if m["role"] != "assistant")
    counted = {name.removeprefix("tools/") for name in sample.metrics if name.removeprefix("tools/") in FAULTS}
    assert counted == set(FAULTS)
    assert {name for name in FAULTS if sample.metrics[f"tools/{name}"]} == {fault}
    assert sample.reward == 1.0 and sample.words["stop"] == "answer" and sample.metrics["tools/stop/answer"] == 1


@pytest.mark.parametrize(
    ("limits", "replies", "stop"),
    [
        ({"max_turns": 2}, [CALL, CALL], "turns"),
        ({"max_calls": 1}, [CALL, CALL], "calls"),
        ({"max_tokens": 50}, [CALL], "tokens"),
        ({}, [CALL, DataFailure("prompt_too_long")], "tokens"),
        ({"max_seconds": 0.001}, [CALL], "seconds"),
        ({}, [CALL + "…"], "length"),
        ({}, ["408"], "answer"),
    ],
)
def test_each_limit_ends_the_chat_by_its_name_and_it_is_judged(limits, replies, stop):
    sample, _ = play(workflow(**limits), *replies)
    assert sample.words["stop"] == stop
    assert {name for name, value in sample.metrics.items() if name.startswith("tools/stop/") and value} == {
        f"tools/stop/{stop}"
    }


def test_calls_of_one_reply_run_at_once_and_those_above_the_limit_are_not_done():
    three = asyncio.Barrier(3)

    async def meets(word: str) -> str:
        """Waits for two others.

        Args:
            word: any
        """
        await three.wait()
        return "met"

    sample, _ = play(workflow([meets], max_calls=3), "\n".join([call_of("meets", word="x")] * 4), "408")
    assert observations(sample) == ["met"] * 3 + ["Not done: no more than 3 calls are allowed."]


def test_a_flood_of_calls_is_bounded():
    sample, _ = play(workflow(max_calls=4), CALL * 500, "408")
    assert sample.metrics["tools/calls"] == 4


def test_deadlines_nest_and_come_from_the_time_of_the_episode():
    made = workflow([slow])
    sample, _ = play(made, call_of("slow", seconds=20), "408", remaining_s=2.0)
    (said,) = re.findall(r"slow was not done after ([\d.]+) s", observations(sample)[0])
    assert 0 < float(said) <= 2.0 * 0.9 / 4  # a call has a quarter of what is left for the chat
    assert sample.metrics["tools/tool_timeout"] == 1 and sample.reward == 1.0
    with pytest.raises(ConfigError, match="tool_seconds must be above 0, got 0"):
        workflow(tool_seconds=0)


def test_calls_that_hang_for_ever_close_the_tool_and_nothing_else():
    release = threading.Event()

    def hangs(word: str) -> str:
        """Hangs.

        Args:
            word: any
        """
        release.wait(20)
        return word

    made = workflow([FunctionBox(hangs, max_stuck=2), calculator], tool_seconds=0.1)
    sample, _ = play(made, call_of("hangs", word="a") * 2, call_of("hangs", word="b"), CALL, "408")
    release.set()
    assert "closed" in observations(sample)[2] and observations(sample)[3] == "408"


@dataclass
class Weather:
    city: str
    rain: dict


class Thermometer(Toolbox):
    """A toolbox whose tool returns whatever it was given."""

    def __init__(self, result):
        self.result = result

    @asynccontextmanager
    async def open(self, data):
        async def run(arguments):
            return self.result

        yield [Tool(tool_schema(broken), run)]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (21.5, "21.5"),
        (None, "null"),
        ([1, "grün"], '[1, "grün"]'),
        ({"day": date(2026, 1, 2), "at": Path("a/b")}, '{"day": "2026-01-02", "at": "a/b"}'),
        (Weather("Ulm", {"mm": 3}), '{"city": "Ulm", "rain": {"mm": 3}}'),
        (
            {"raw": b"gr\xc3\xbcn", "at": [numpy.int64(3), numpy.arange(2), torch.ones(1, 2)]},
            '{"raw": "grün", "at": [3, [0, 1], [[1.0, 1.0]]]}',
        ),
        (b"text", "text"),
        (b"\xff", "Error: broken returned a value that cannot be written as JSON: 'utf-8' codec"),
        ({(1, 2): 3}, "Error: broken returned a value that cannot be written as JSON: keys must be str"),
        ({"seen": {1}}, "Error: broken returned a value that cannot be written as JSON: it contains a set. Return text"),
    ],
)
def test_a_tool_of_a_toolbox_may_return_what_is_no_text(result, words):
    sample, _ = play(workflow([Thermometer(result)]), call_of("broken", word="x"), "408")
    assert observations(sample)[0].startswith(words)
    assert sample.metrics["tools/wrong_result"] == words.startswith("Error")


def test_a_long_result_is_cut_and_not_written_to_its_end():
    def shout(word: str) -> str:
        """Shouts.

        Args:
            word: any
        """
        return word * 10_000

    sample, _ = play(workflow([shout], max_result_characters=20), call_of("shout", word="ab"), "408")
    assert observations(sample) == ["ab" * 10 + "\n… 19980 more characters"]
    for many in (numpy.broadcast_to(0, (1, 10**15)), torch.zeros(1, dtype=torch.int8).expand(1, 10**15)):  # take no memory
        sample, _ = play(workflow([Thermometer(many)], max_result_characters=20), call_of("broken", word="ab"), "408")
        assert observations(sample) == ["[[0, 0, 0, 0, 0, 0, \n… and more"]


def ends(word: str) -> str:
    """Ends.

    Args:
        word: how
    """
    raise ERRORS[word]


async def ends_at_once(word: str) -> str:
    """Ends.

    Args:
        word: how
    """
    raise ERRORS[word]


ERRORS = {
    "exit": SystemExit(3),
    "cancel": asyncio.CancelledError(),
    "interrupt": KeyboardInterrupt(),
    "stop": StopIteration(),
    "plain": RuntimeError(),
}


@pytest.mark.parametrize("word", ERRORS)
def test_a_tool_that_calls_for_the_end_of_the_process_is_a_call_that_raised(word):
    made = workflow([FunctionBox(ends, max_stuck=1), ends_at_once, asleep], tool_seconds=60.0)
    for name in ("ends", "ends_at_once"):
        began = time.monotonic()
        sample, _ = play(made, call_of(name, word=word) + call_of("asleep", seconds=0.01), "408")
        assert type(ERRORS[word]).__name__ in observations(sample)[0] and sample.metrics["tools/tool_raised"] == 1
        assert observations(sample)[1] == '{"waited": 0.01}' and time.monotonic() - began < 30


def test_a_call_whose_error_has_no_text_says_its_type():
    sample, _ = play(workflow([ends_at_once]), call_of("ends_at_once", word="plain"), "408")
    assert observations(sample)[0] == "Error: RuntimeError"


def test_the_end_of_an_episode_cancels_its_tools():
    async def cut_off():
        made = workflow([asleep], tool_seconds=60.0)
        episode = made.arun_episode(Scripted(made.tokenizer, call_of("asleep", seconds=30)), dict(ROW))
        await asyncio.wait_for(episode, 0.2)

    with pytest.raises(TimeoutError):
        asyncio.run(cut_off())


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 * (3 + 4.5)", "90"),
        ("2^10", "1024"),
        ("7 // 2", "3"),
        ("sqrt(2)", "1.41421356237"),
        ("-3 - -4", "1"),
        ("1/3*3", "1"),
    ],
)
def test_the_calculator_computes(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "9**9**9",
        "9**99999999",
        "(1).real",
        "[1]*9",
        "1/0",
        "",
        "a",
        "(" * 400,
        "'a'*9",
        "(-8)**0.5",
        "True",
        "0x" + "f" * 600,
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic_or_too_large(expression):
    with pytest.raises(ToolFailure):
        calculator(expression)


def test_a_function_without_types_or_docstring_is_refused_with_what_to_write():
    with pytest.raises(ConfigError, match="Args:"):
        tool_schema(lambda x: x)


def test_tools_come_from_names_files_and_lists(tmp_path):
    file = tmp_path / "my_tools.py"
    file.write_text(
        "from contextlib import asynccontextmanager\n"
        "from tandem import Tool, Toolbox, tool_schema\n"
        "def double(n: int) -> int:\n    '''Doubles.\n\n    Args:\n        n: a number\n    '''\n    return 2 * n\n"
        "class Counter(Toolbox):\n"
        "    def __init__(self, *, start: int = 0):\n        self.start = start\n"
        "    @asynccontextmanager\n"
        "    async def open(self, data):\n"
        "        state = {'n': self.start}\n"
        "        async def run(arguments):\n            state['n'] += arguments['n']\n            return str(state['n'])\n"
        "        schema = tool_schema(double)\n        schema['function']['name'] = 'add'\n"
        "        yield [Tool(schema, run)]\n"
    )
    with Services() as services:
        names = ["calculator", f"{file}:double", f"{file}:Counter(start=5)"]
        made = ToolWorkflow(Right(), GCONFIG, tiny_tokenizer(), names, services)
        sample, _ = play(made, call_of("double", n=4) + call_of("add", n="2"), call_of("add", n=1), "408")
        assert observations(sample) == ["8", "7", "8"]
        assert ToolWorkflow(Right(), GCONFIG, tiny_tokenizer(), names, services).boxes == made.boxes  # once for a run
        for wrong, words in (
            ("calculater", "did you mean 'calculator'"),
            (f"{file}:double(n=3)", "no knobs"),
            ([], "name a tool"),
            ([f"{file}:double", f"{file}:double"], "two tools called 'double'"),
            (f"{file}:Counter(end=3)", "no knob 'end'"),
        ):
            with pytest.raises(ConfigError, match=words):
                play(ToolWorkflow(Right(), GCONFIG, tiny_tokenizer(), wrong, services), "408")


def test_a_message_of_a_malformed_call_stays_as_it_was_written():
    sample, engine = play(workflow(), FAULTS["malformed"][0], "408")
    assert sample.messages[-3]["content"] == FAULTS["malformed"][0] and sample.messages[-2]["role"] == "user"
    assert len(sample.trajectories) == 1 and replace(engine.log[0]).input_ids
