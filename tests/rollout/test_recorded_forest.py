"""Whatever a client does to its history, no token is trained that was not sampled in exactly that context."""

import json
import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.api.requests import LLMResponse, StopReason
from tandem.protocol.dialects.openai_chat import answer, read
from tandem.protocol.tool_calls import CallReader
from tandem.protocol.turns import Call, CallStatus, Reply, Turn
from tandem.rollout.forest import Forest, meaning, thought
from tests.rollout.scripted import untruthful
from tests.rollout.test_chat import FORGETFUL
from tests.tiny import CHATML, tiny_tokenizer

# Writes thinking where it is told of it; FORGETFUL and CHATML never do.
REMEMBERING = CHATML.replace(
    "'\n' + message['content']",
    "'\n' + ('<think>' + message['reasoning_content'] + '</think>' if message['reasoning_content'] is defined else '')"
    " + message['content']",
)
# Each turn of the history is numbered from the end, so that every one is rewritten by the next.
RENUMBERING = CHATML.replace("message['role'] + '\n'", "message['role'] + (loop.revindex | string) + '\n'")

WORDS = [
    "an|swer",
    " leading",
    "x|yz  ",
    "é|漢",
    "",
    "tw|o\nlin|es\n\n",
    "<think>hm</think>7",
    "<think>a|b</think>\n\nyes|",
    "7\ufffd",
]
CALLS = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": [2,  3]}}\n</tool_call>',
    'Well.\n<tool_call>{"arguments":{"a": 2,"b":[]},"name":"add"}</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": []}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [1]}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "argum',
    '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "array"}}},
        },
    }
]
HARMLESS = ("nothing", "forget thinking", "write arguments anew", "null", "parts", "other ids", "strip")
REWRITES = ("edit", "edit a result", "truncate", "summarise", "calls as text", "merge")
STOP_TEXT = "Obs:"


class Client:
    """Keeps a history as a client does, and rewrites it; knows which requests continue a turn, by the rules of the page."""

    def __init__(self, forest, tokenizer, chance, tools, keeps):
        self.forest, self.tokenizer, self.chance, self.tools, self.keeps = forest, tokenizer, chance, tools, keeps
        self.history = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 4 <|im_end|>?"}]
        self.log, self.roots, self.number = [], 0, 0
        self.turns = []
        """The turns that the history still repeats: (place behind the reply, node, whether it can be continued)."""

    def turn(self, words, end):
        """One request and its reply; checks that it continues a turn where it must, and nowhere else."""
        turn = read({"messages": self.history, "tools": self.tools})
        asked = self.forest.ask(turn.messages, turn.tools)
        _, node, continues = self.turns[-1] if self.turns else (0, None, False)
        assert asked.parent is (node if continues else None)
        self.roots += asked.parent is None
        reason = StopReason.LENGTH if end == "cut" else StopReason.STOP
        words += f"|{STOP_TEXT}" if end == "stop text" else ""
        ids = [i for piece in words.split("|") for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
        ids += {"eos": [self.tokenizer.eos_token_id], "cut": [9], "stop text": []}[end]
        self.number += 1
        response = LLMResponse(
            asked.input_ids, tuple(ids), (-0.1 * self.number,) * len(ids), (self.number,) * len(ids), reason
        )
        self.log.append((asked, response))
        read_reply = self.forest.reader.read(ids, turn.tools, prompt=asked.text, stop_reason=reason)
        reply = read_reply.shown([STOP_TEXT] if reason == StopReason.STOP else [])
        node = self.forest.add(asked, response, reply.shown().message(), self.number)
        continues = reason == StopReason.STOP and self.keeps(reply) and not (end == "stop text" and reply.calls)
        self.turns.append((len(self.history) + 1, node, continues))
        usage = {"prompt_tokens": len(asked.input_ids), "completion_tokens": len(ids)}
        self.message = answer(turn, reply, response_id="1", model="m", usage=usage)["choices"][0]["message"]
        self.message.pop("refusal")

    def say(self, what):
        """Repeats the reply, and says something; ``what`` happens to the history."""
        message, chance = dict(self.message), self.chance
        calls = message.get("tool_calls") or []
        if what == "forget thinking":
            message.pop("reasoning_content", None)
        if what == "strip" and message["content"]:
            message["content"] = message["content"].strip()
        if what == "write arguments anew":
            for call in calls:
                arguments = json.loads(call["function"]["arguments"])
                arguments = {k: int(v) if isinstance(v, float) and v == int(v) else v for k, v in arguments.items()}
                call["function"] = {**call["function"], "arguments": json.dumps(arguments, indent=1, sort_keys=True)}
        if what == "null" and not message["content"]:
            message["content"] = chance.choice([None, ""])
        if what == "parts" and message["content"]:
            cut = chance.randrange(len(message["content"]))
            message["content"] = [{"type": "text", "text": t} for t in (message["content"][:cut], message["content"][cut:])]
        if what == "other ids":
            calls = message["tool_calls"] = [{**call, "id": f"c{i}"} for i, call in enumerate(calls)]
        if what == "calls as text" and calls:
            message = {"role": "assistant", "content": f"{message['content'] or ''} Calling {calls}"}
            calls = []
            self.turns.pop()
        tail = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"} for i, call in enumerate(calls)]
        if not tail or chance.random() < 0.2:
            tail += [{"role": "user", "content": f" and {chance.random()}"}]
        self.history += [message, *tail]
        if what == "merge":
            texts = [str(m["content"] or "") for m in self.history[-1 - len(tail) :]]
            self.history[-1 - len(tail) :] = [{"role": "user", "content": " ".join(texts)}]
            self.turns.pop()
        old = [i for i, m in enumerate(self.history[: -len(tail)]) if m["role"] == "tool"]
        if what == "edit a result" and old:
            place = chance.choice(old)
            self.history[place] = {**self.history[place], "content": f"edited {chance.random()}"}
            self.turns = [turn for turn in self.turns if turn[0] <= place]
        if what == "edit":
            self.history[1] = {"role": "user", "content": f"edited {chance.random()}"}
        if what == "truncate":
            first = next((i for i, m in enumerate(self.history[2:], 2) if m["role"] == "user"), len(self.history) - 1)
            self.history[1:first] = [{"role": "user", "content": f"… {chance.random()}"}]
        if what == "summarise":
            self.history[1:] = [{"role": "user", "content": f"So far: nothing. {chance.random()}"}]
        if what in ("edit", "truncate", "summarise"):
            self.turns = []


def keeps(template, reply):
    """Says whether the template writes such a reply so that the model would know it again."""
    if template == RENUMBERING:
        return False
    return template == REMEMBERING or not reply.reasoning


@settings(max_examples=120, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(
    "template", [CHATML, FORGETFUL, REMEMBERING, RENUMBERING], ids=["chatml", "forgets", "remembers", "numbers"]
)
def test_only_tokens_sampled_in_their_context_are_trained_and_roots_are_as_predicted(template, data):
    tokenizer = tiny_tokenizer(template)
    tools = TOOLS if data.draw(st.booleans()) else []
    forest = Forest(tokenizer, CallReader(tokenizer))
    chance = random.Random(data.draw(st.integers(0, 9999)))
    client = Client(forest, tokenizer, chance, tools, partial(keeps, template))
    for _ in range(data.draw(st.integers(2, 7))):
        words = data.draw(st.sampled_from(WORDS + (CALLS if tools else [])))
        client.turn(words, data.draw(st.sampled_from(["eos"] * 5 + ["cut", "stop text"])))
        client.say(data.draw(st.sampled_from(HARMLESS * 2 + REWRITES)))

    assert sum(node.parent is None for node in forest.nodes) == client.roots
    trajectories = list(forest.trajectories(forest.nodes))
    for tokens in trajectories:
        assert untruthful(client, tokens) == []
    assert sum(sum(tokens.mask) for tokens in trajectories) == sum(len(response.output_ids) for _, response in client.log)


def end(forest, asked, words, key=None):
    """The reply to a request."""
    ids = (*tiny_tokenizer()(words, add_special_tokens=False)["input_ids"], tiny_tokenizer().eos_token_id)
    response = LLMResponse(asked.input_ids, ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.STOP)
    node = forest.add(asked, response, {"role": "assistant", "content": words}, len(forest.nodes) if key is None else key)
    node.taken = True
    return node


def grow(forest, messages, words, tools=()):
    """One turn of a forest."""
    return end(forest, forest.ask(messages, tools), words)


def said(*texts):
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


@pytest.fixture
def forest():
    tokenizer = tiny_tokenizer()
    return Forest(tokenizer, CallReader(tokenizer))


def test_a_turn_that_two_leaves_share_is_trained_once(forest):
    first = grow(forest, said("a"), "one")
    left, right = (grow(forest, said("a", "one", more), "two") for more in "bc")
    assert left.parent is first and right.parent is first
    one, two = forest.trajectories(forest.nodes)
    assert one.ids[: len(two.ids) // 2] == two.ids[: len(two.ids) // 2]
    shared = len(first.response.output_ids)
    assert sum(one.mask) == shared + len(left.response.output_ids) and sum(two.mask) == len(right.response.output_ids)


def test_a_reply_that_nobody_took_leaves_and_one_that_was_continued_stays(forest):
    first = grow(forest, said("a"), "one")
    left = grow(forest, said("a", "one", "b"), "two")
    first.taken = left.taken = False
    assert forest.left() == [left]


def test_a_side_call_came_before_the_first_reply_and_nothing_depends_on_it(forest):
    """An agent asks for a title beside the task, goes on, rewrites its history in two ways, and asks a critic."""
    system = {"role": "system", "content": "Solve."}
    title, task = (forest.ask([{"role": "system", "content": first}, *said("task")]) for first in ("Title!", "Solve."))
    title, task = end(forest, title, "A title"), end(forest, task, "one")
    further = grow(forest, [system, *said("task", "one", "go on")], "two")
    summary = grow(forest, [system, *said("shorter")], "three")
    cut = grow(forest, said("earlier", "two", "and?"), "four")
    critic = grow(forest, said("Is this right? three"), "five")
    assert further.root is task and forest.task(forest.nodes) == {task, summary, cut, critic} and critic.root is critic
    assert forest.task([title]) == {title}


def test_an_answer_in_a_context_of_its_own_and_a_plan_that_others_use_are_the_task(forest):
    """A planner, a worker with tools that is given the plan, and the answer by another prompt that shows neither."""
    asked = [forest.ask([{"role": "system", "content": first}, *said("task")]) for first in ("Plan!", "Title!")]
    words = "First add the two numbers"
    plan, _ = (end(forest, one, reply) for one, reply in zip(asked, (words, "A title"), strict=True))
    worker = grow(forest, said(f"A title of mine. Do this: {words}"), "7", TOOLS)
    answer = grow(forest, [{"role": "system", "content": "Extract."}, *said("what is it?")], "seven")
    assert forest.task(forest.nodes) == {plan, worker, answer}


def test_a_reply_that_repeats_the_task_is_not_used_by_it(forest):
    """The words were in the task before the side call was asked for."""
    words = "a list of all the trees"
    task, title = (forest.ask([{"role": "system", "content": first}, *said(words)]) for first in ("Solve.", "Title!"))
    task, title = end(forest, task, "one"), end(forest, title, f" {words}")
    assert forest.task(forest.nodes) == {task}
    grow(forest, said(f"It is about {words}."), "two")
    assert title in forest.task(forest.nodes), "now it is"


def test_a_side_call_that_repeats_a_reply_of_the_task_belongs_to_it(forest):
    task, check = forest.ask(said("task"), TOOLS), forest.ask(said("Is this right?", "one", "Say so."))
    task, check = end(forest, task, "one"), end(forest, check, "yes")
    assert forest.task(forest.nodes) == {task, check}
    check.request.tail[1]["content"] = "two"
    assert forest.task(forest.nodes) == {task}


def test_of_turns_that_are_alike_one_is_continued_whatever_their_order(forest):
    asked = [forest.ask(said("a")) for _ in range(2)]
    _, first = (end(forest, one, "one", key) for one, key in zip(asked, (5, 3), strict=True))
    assert forest.ask(said("a", "one", "b")).parent is first


def test_what_follows_a_reply_that_the_template_does_not_close_is_not_lost():
    """The token that ended the reply ends the user's next turn too."""
    turns = "{{ message['role'] + ': ' + message['content'] + ('<|im_end|>' if message['role'] == 'user' else '') + '\n' }}"
    prompt = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = tiny_tokenizer("{% for message in messages %}" + turns + "{% endfor %}" + prompt)
    forest = Forest(tokenizer, CallReader(tokenizer))
    first = grow(forest, said("a"), "one")
    asked = forest.ask(said("a", "one", "b"))
    assert asked.parent is first and tokenizer.decode(asked.context) == "\nuser: b<|im_end|>\nassistant: "


def test_what_is_read_late_came_when_it_arrived(forest):
    """The task waits to be read while the reply to a title that came behind it is already there."""
    arrival = forest.arrival()
    title = grow(forest, [{"role": "system", "content": "Title!"}, *said("task")], "A title")
    task = end(forest, forest.ask([{"role": "system", "content": "Solve."}, *said("a long task")], arrival=arrival), "one")
    assert task.request.number < title.request.number and forest.task(forest.nodes) == {task}


def test_the_path_that_was_asked_for_last_comes_last(forest):
    grow(forest, said("a"), "one")
    earlier, last = (forest.ask(said("a", "one", more)) for more in "bc")
    last, earlier = end(forest, last, "two"), end(forest, earlier, "three")
    assert last.key < earlier.key and forest.leaves(forest.nodes) == [earlier, last]


def test_a_root_with_tools_holds_the_task(forest):
    """Also where the title was there before the task was asked for."""
    grow(forest, [{"role": "system", "content": "Title!"}, *said("task")], "A title")
    task = grow(forest, [{"role": "system", "content": "Solve."}, *said("task")], "one", TOOLS)
    assert forest.task(forest.nodes) == {task}


def test_messages_that_say_the_same_are_the_same():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1.0, "y": {"z": [2]}}'}}
    other = {"id": "2", "type": "function", "function": {"name": "f", "arguments": {"y": {"z": [2.0]}, "x": 1}}}
    same = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [other], "reasoning_content": "hm"},
        {"role": "assistant", "content": [], "tool_calls": [call]},
    ]
    assert len(set(map(meaning, same))) == 1
    assert meaning({"role": "user", "content": "ab"}) == meaning({"role": "user", "content": [{"text": "a"}, {"text": "b"}]})
    assert meaning({"role": "user", "content": " a"}) != meaning({"role": "user", "content": "a"})
    assert meaning({"role": "tool", "content": "a"}) != meaning({"role": "user", "content": "a"})
    one, other, half = (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        for arguments in ('{"x": ', '{"y": ', {"x": 1.5})
    )
    assert meaning(one) == meaning(dict(one)) != meaning(other), "arguments that cannot be read are a text"
    assert meaning(half) != meaning({**half, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]})
    assert thought({"role": "assistant", "reasoning_content": " hm\n"}) == "hm"


def test_a_call_that_cannot_be_carried_out_is_text_but_not_a_text_that_ends_the_turn():
    broken = Call("f", status=CallStatus.UNCLOSED, text="<tool_call>{")
    assert Reply("Well. ", calls=(broken, Call("g"))).shown().content == "Well. <tool_call>{"
    wrong = Call("f", {"x": "one"}, status=CallStatus.WRONG_ARGUMENTS, text="<tool_call>…")
    assert Reply("", calls=(wrong,)).shown() == Reply("", calls=(replace(wrong, status=CallStatus.OK),)), "to be repaired"
    both = Reply("", calls=(broken, replace(broken, name="g")))  # of one block that has two of them
    assert both.shown().content == "<tool_call>{"
    for stops in (["Observation:"], ["End:", "Observation:"], ["Observation:", "b"]):
        assert Reply("a Observation: b").shown(stops).content == "a "
    assert Turn(()).tool_choice == "auto"
