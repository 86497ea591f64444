#!/usr/bin/env python3
"""Says whether a change left the answers of `tandem serve` and of the recorder the same, but for ids and times.

    PYTHONPATH=src .venv/bin/python scripts/same_wire.py record before.json
    PYTHONPATH=src .venv/bin/python scripts/same_wire.py compare before.json

`serve` answers with a tiny model, with and without a token, and with replies that are written down here (calls of tools,
thinking, special tokens); the recorder answers with such replies in all its dialects.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp

from tandem.api.requests import StopReason
from tandem.models.tokenizer import load_tokenizer
from tests.protocol.templates import TEMPLATES
from tests.rollout.scripted import ScriptedEngine, opened
from tests.serve.served import TOKEN, Saying, Served
from tests.tiny import CHATML, tiny_model_folder

CHAT, LEGACY = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 3 + 4?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": PARAMETERS}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "sun"}
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
HISTORY = [MESSAGES[1], {"role": "assistant", "content": None, "tool_calls": [CALLED]}, RESULT]
REPLIES = {
    "plain": "It is 7.",
    "call": 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": "3"}}\n</tool_call>',
    "two": '<tool_call>\n{"name": "weather", "arguments": {"city": "A"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "B"}}\n</tool_call>',
    "bad": '<tool_call>\n{"name": "weather", "arguments": {"city"\n</tool_call>',
    "unknown": '<tool_call>\n{"name": "wether", "arguments": {"city": "A"}}\n</tool_call>',
    "unfit": '<tool_call>\n{"name": "weather", "arguments": {"days": "x"}}\n</tool_call>',
    "thinks": "<think>\nHm.\n</think>\n\nIt is 7.",
}


def sampled(**more):
    return {"model": "tiny", "max_tokens": 24, "seed": 5, "temperature": 0.9} | more


def chat(**more):
    return CHAT, sampled(messages=MESSAGES) | more


def legacy(**more):
    return LEGACY, sampled(prompt="There are three trees") | more


def said(text):
    return chat(messages=[{"role": "user", "content": text}])


def part(text):
    return {"type": "text", "text": text}


STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

REQUESTS = {
    "models": ("/v1/models", None),
    "chat": chat(),
    "chat greedy": chat(temperature=0),
    "chat n": chat(n=3),
    "chat logprobs": chat(logprobs=True),
    "chat n logprobs": chat(n=2, logprobs=True),
    "chat no limit": (CHAT, {"model": "tiny", "messages": MESSAGES, "temperature": 0, "seed": 1}),
    "chat max_completion_tokens": (CHAT, {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_completion_tokens": 3}),
    "chat nulls": chat(top_p=None, stop=None, n=None, stream=None, logprobs=None, tools=None, tool_choice=None),
    "chat neutral": chat(frequency_penalty=0, presence_penalty=0, logit_bias={}, response_format={"type": "text"}),
    "chat more": chat(top_k=5, min_tokens=10, top_p=0.9, stop_token_ids=[40]),
    "chat whole numbers as fractions": chat(max_tokens=5.0, seed=2.0),
    **{f"chat stop {stop!r}": chat(stop=stop, max_tokens=60) for stop in ("e", ["a", "t"], "zz", [])},
    "chat stop min": chat(stop="e", max_tokens=60, min_tokens=20),
    **{
        f"chat stream {i}": chat(**STREAM, **more)
        for i, more in enumerate(({}, {"n": 2}, {"logprobs": True}, {"stop": "e"}))
    },
    "chat stream usage": chat(**USAGE),
    "chat stream stop min": chat(stop=["e", "th"], max_tokens=60, min_tokens=20, seed=3, **STREAM),
    "chat parts": chat(messages=[{"role": "user", "content": [part("a"), part("b")]}]),
    "chat developer": chat(messages=[{"role": "developer", "content": "x"}, MESSAGES[1]]),
    "chat name": chat(messages=[{"role": "user", "name": "Bo", "content": "x"}]),
    "chat history": chat(messages=[MESSAGES[1], {"role": "assistant", "content": "7"}, MESSAGES[1]]),
    "chat tools": chat(tools=[TOOL]),
    "chat tools none": chat(tools=[TOOL], tool_choice="none"),
    "chat tools auto": chat(tools=[TOOL], tool_choice="auto"),
    "chat tools empty": chat(tools=[]),
    "chat calls": chat(messages=HISTORY),
    "chat calls tools": chat(messages=HISTORY, tools=[TOOL]),
    "legacy": legacy(),
    "legacy n": legacy(n=2),
    "legacy logprobs": legacy(logprobs=0, n=2),
    "legacy ids": legacy(prompt=[5, 6, 7]),
    "legacy several": legacy(prompt=["a", "four"]),
    "legacy several ids": legacy(prompt=[[5, 6], [7]], n=2),
    "legacy no limit": (LEGACY, {"model": "tiny", "prompt": "a", "seed": 3}),
    "legacy stream": legacy(**STREAM),
    "legacy stream n": legacy(**USAGE, n=2, logprobs=0),
    "legacy stop": legacy(stop="e", max_tokens=60),
    "generate": ("/generate", {"input_ids": [5, 6], "sampling": {"max_new_tokens": 5}, "noise_key": [1]}),
    "tokens": (
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 5, "seed": 1}, "request_id": "r"},
    ),
    **{
        f"refused {json.dumps(more)[-200:]}": chat(**more)
        for more in (
            {"frequency_penalty": 0.5},
            {"logit_bias": {"5": 1}},
            {"top_logprobs": 2},
            {"response_format": {"type": "json_object"}},
            {"tool_choice": "required"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {"tool_choice": "x"},
            {"user": "me"},
            {"min_p": 0.1},
            {"temperature": -1},
            {"temperature": 3},
            {"temperature": "1"},
            {"top_p": 0},
            {"n": 1000},
            {"n": 0},
            {"max_tokens": 100_000},
            {"max_completion_tokens": 3},
            {"stop": [""]},
            {"stop": ["a"] * 17},
            {"stream": 1},
            {"stream_options": {"include_usage": True}},
            {"stream_options": {"a": 1}, "stream": True},
            {"model": "gpt"},
            {"messages": []},
            {"messages": "hi"},
            {"messages": [{"role": "x", "content": "a"}]},
            {"messages": [{"content": "a"}]},
            {"messages": [{"role": "user", "content": 3}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            {"messages": [MESSAGES[1], {"role": "assistant", "content": "7"}]},
            {"messages": [{"role": "user", "content": "a", "x": 1}]},
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "a", "arguments": "{"}}]},
                    RESULT,
                ]
            },
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "a", "arguments": "[]"}}]},
                    RESULT,
                ]
            },
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}, RESULT]},
            {"messages": [{"role": "user", "content": "word " * 1000}]},
            {"tools": "x"},
            {"tools": [{"type": "function"}]},
            {"tools": [{"type": "search"}]},
            {"tools": [{"type": "function", "function": {}}]},
        )
    },
    **{f"refused prompt {prompt!r}": legacy(prompt=prompt) for prompt in ("", [], [[]], ["a", 1], [-1], None, {"a": 1})},
    **{
        f"refused legacy {more}": legacy(**more)
        for more in ({"logprobs": 2}, {"echo": True}, {"best_of": 2}, {"suffix": "a"})
    },
    "refused no route": ("/v1/nothing", {}),
    "refused no object": (CHAT, []),
    "refused no model": (CHAT, {"messages": MESSAGES}),
    "refused no messages": (CHAT, {"model": "tiny"}),
    "refused deep": (CHAT, {"a": json.loads("[" * 40 + "]" * 40)}),
    "refused long": (CHAT, {"model": "x" * 70_000}),
    "openapi": ("/openapi.json", None),
}


def merged(text: str) -> str:
    """The events of a stream by completion, pieces of a text that came one after another joined: timing cuts them."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    events.sort(key=lambda event: event["choices"][0]["index"] if event.get("choices") else 1e9)
    joined: list[tuple[str, str, list[object]]] = []
    for event in events:
        text_of, entries = "", []
        for choice in event.get("choices") or ():
            holder = choice.get("delta", choice)
            for name in ("content", "text"):
                if holder.get(name):
                    text_of = holder.pop(name)
            entries += [entry for entry in [choice.pop("logprobs", None)] if entry is not None]
        rest = json.dumps(event)
        if joined and joined[-1][0] == rest:
            joined[-1] = (rest, joined[-1][1] + text_of, joined[-1][2] + entries)
        else:
            joined.append((rest, text_of, entries))
    return json.dumps(joined) + text[-20:] if joined else text


def plain(raw: bytes) -> str:
    text = raw.decode()
    text = re.sub(r'"(id)": ?"(chatcmpl|cmpl)-[0-9a-f]+"', r'"\1": "\2-ID"', text)
    text = re.sub(r'"(created|created_at|completed_at)": ?\d+', r'"\1": 0', text)
    text = re.sub(r'"instance": ?"[0-9a-f]+"', '"instance": "I"', text)
    text = re.sub(r"(-?\d\.\d{5})\d*(e-?\d+)?", r"\1\2", text)  # the last digits of a log-probability
    return merged(text) if text.startswith("data: {") and '"choices"' in text else text


def of_serve(folder: Path) -> dict[str, object]:
    made = {}

    def ask(name, served, path, body, **options):
        method = "GET" if body is None else "POST"
        status, raw = served.request(method, path, body, **options)
        made[name] = [status, plain(raw)]

    with Served(folder / "plain", max_completions=8, default_chat_tokens=16, max_body_bytes=60_000) as served:
        for name, (path, body) in REQUESTS.items():
            ask(name, served, path, body)
        for name, headers in (
            ("host", {"Host": "evil"}),
            ("kind", {"Content-Type": "text/plain"}),
            ("origin", {"Origin": "http://e"}),
        ):
            ask(f"refused {name}", served, *chat(), headers=headers)
        ask("refused method", served, CHAT, None)
        ask("refused query", served, CHAT + "?a=1", chat()[1])
        ask("refused no json", served, CHAT, b"{")
    with Served(folder / "plain", token=TOKEN) as served:
        for name, token in (("right", TOKEN), ("wrong", "x"), ("none", None)):
            ask(f"token {name}", served, *chat(), token=token)
    for kind in ("hermes", "plain"):
        with Served(folder / kind) as served:
            for name, text in REPLIES.items():
                for reason in (StopReason.STOP, StopReason.LENGTH):
                    served.service.engine = Saying(load_tokenizer(folder / kind), text, reason)
                    for tools in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {"logprobs": True}):
                        for stream in ({}, STREAM):
                            what = (
                                f"scripted {kind} {name} {reason.name} {' '.join(map(str, tools))} {'stream' * bool(stream)}"
                            )
                            ask(what, served, *chat(**tools, **stream))
            served.service.engine = served.engine
    return made


DIALECTS = {
    "/chat/completions": {"messages": MESSAGES, "tools": [TOOL]},
    "/responses": {"input": "What is 3 + 4?", "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}]},
    "/messages": {"messages": MESSAGES[1:], "max_tokens": 50, "tools": [{"name": "weather", "input_schema": PARAMETERS}]},
}
MORE = (
    *({}, {"stream": True}, {"tools": []}, {"tool_choice": "none"}, {"tool_choice": "required"}, {"temperature": 0.1}),
    *({"stop": ["7"]}, {"stop_sequences": ["7"]}, {"messages": []}, {"input": []}, {"n": 2}, {"tools": [{"type": "x"}]}),
    *({"tool_choice": {"type": "none"}}, {"new": 1}, {"max_tokens": 3}, {"max_tokens": 0}, {"logprobs": True}, {"tools": 3}),
    *(
        {"messages": HISTORY},
        {"messages": [{"role": "developer", "content": "x"}, MESSAGES[1]]},
        {"response_format": {"type": "x"}},
    ),
)


async def of_recorder() -> dict[str, object]:
    made = {}
    async with aiohttp.ClientSession() as http:
        for name, text in REPLIES.items():
            for reason in (StopReason.STOP, StopReason.LENGTH):
                for path, body in DIALECTS.items():
                    for more in MORE if (name, reason) == ("plain", StopReason.STOP) else MORE[:4]:
                        engine = ScriptedEngine(lambda request, number, text=text, reason=reason: (text, reason))
                        async with opened(engine) as (session, _):
                            headers = {"Authorization": f"Bearer {session.key}"}
                            async with http.post(session.base_url + path, json=body | more, headers=headers) as answer:
                                what = f"recorder {name} {reason.name} {path} {json.dumps(more)}"
                                made[what] = [answer.status, plain(await answer.read()).replace(session.key, "KEY")]
        async with opened(engine) as (session, _):
            for key in ("", "x"):
                async with http.post(
                    session.base_url + CHAT[3:], json={}, headers={"Authorization": f"Bearer {key}"}
                ) as answer:
                    made[f"recorder key {key}"] = [answer.status, plain(await answer.read())]
    return made


def answers() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for kind, template in (("plain", CHATML), ("hermes", TEMPLATES["hermes"])):
            tiny_model_folder(folder, chat_template=template).rename(folder / kind)
        return of_serve(folder) | asyncio.run(of_recorder())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1000, help="characters of an answer that are shown")
    arguments = parser.parse_args()
    now = answers()
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(now, indent=1, ensure_ascii=False))
        print(f"{len(now)} answers are in {arguments.file}")
        return 0
    before = json.loads(arguments.file.read_text())
    differing = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    for name in differing:
        print(name, *(f"  {str(made.get(name))[: arguments.width]}" for made in (before, now)), sep="\n")
    print(f"{len(differing)} of {len(now)} answers differ")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
