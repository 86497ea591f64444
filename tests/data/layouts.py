"""Five rows of each published layout, made by hand in its shape; the number tells the rows apart."""

from typing import Any, NamedTuple

from tandem.data.examples import conversations, judged, pairs, safety, steps
from tandem.data.rows import normalise


def user(text):
    return {"role": "user", "content": text}


def reply(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(arguments):
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


class Layout(NamedTuple):
    """A row with ``{n}`` in its texts, and what it means."""

    reader: Any
    row: dict
    asked: list
    """The messages of the prompt."""

    learnt: list = []  # noqa: RUF012
    """The replies that are learnt; for pairs the chosen and the rejected side; for questions the answer."""

    reads: str = ""


OPENR1 = {
    "problem": "What is {n} + 1?",
    "solution": "Add one to {n}. The sum is $\\boxed{{m}}$.",
    "answer": "{m}",
    "problem_type": "Algebra",
    "question_type": "math-word-problem",
    "source": "olympiads",
    "uuid": "u-{n}",
    "generations": ["<think>{n} and one</think> \\boxed{{m}}", "{m}"],
    "correctness_math_verify": [True, True],
    "messages": [user("What is {n} + 1?"), reply("<think>{n} and one</think> It is {m}.")],
}

LAYOUTS = {
    # -- questions with an answer
    "GSM8K": Layout(
        normalise,
        {"question": "Ann has {n} nuts and finds one. How many?", "answer": "{n}+1=<<{n}+1={m}>>{m}\n#### {m}"},
        [user("Ann has {n} nuts and finds one. How many?")],
        ["{n}+1=<<{n}+1={m}>>{m}\n#### {m}"],
        "reads: question (the prompt), answer",
    ),
    "MATH-500": Layout(
        normalise,
        {
            "problem": "What is ${n}+1$?",
            "solution": "It is $\\boxed{{m}}$.",
            "answer": "{m}",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/{n}.json",
        },
        [user("What is ${n}+1$?")],
        ["{m}"],
        "reads: problem (the prompt), answer; not read: solution, subject, level, unique_id",
    ),
    "OpenR1-Math": Layout(
        normalise,
        OPENR1,
        [user("What is {n} + 1?")],
        ["{m}"],
        "reads: messages (the prompt, without its last reply), answer; not read: problem, solution, problem_type, "
        "question_type, source, uuid, generations, correctness_math_verify",
    ),
    "verl": Layout(
        normalise,
        {
            "data_source": "openai/gsm8k",
            "prompt": [system("Be brief."), user("What is {n} + 1?")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "{m}"},
            "extra_info": {"split": "train", "index": 7},
        },
        [system("Be brief."), user("What is {n} + 1?")],
        ["{m}"],
        "reads: prompt, reward_model.ground_truth (the answer); not read: data_source, ability, extra_info",
    ),
    "OpenMathReasoning": Layout(
        normalise,
        {"problem": "{n} + 1?", "expected_answer": "{m}", "problem_type": "has_answer", "generated_solution": "It is {m}."},
        [user("{n} + 1?")],
        ["{m}"],
        "reads: problem (the prompt), expected_answer (the answer); not read: problem_type, generated_solution",
    ),
    "SVAMP": Layout(
        normalise,
        {"ID": "chal-{n}", "Body": "Ann has {n} nuts", "Question": "How many with one more?", "Answer": 3.0},
        [user("Ann has {n} nuts. How many with one more?")],
        ["3"],
        "reads: Body (the prompt), Question (the prompt), Answer (the answer); not read: ID",
    ),
    # -- conversations to imitate
    "OpenR1-Math, imitated": Layout(
        conversations,
        OPENR1,
        [user("What is {n} + 1?")],
        [reply("<think>{n} and one</think> It is {m}.")],
        "reads: messages (every assistant turn); not read: problem, solution, answer, problem_type, question_type, source, "
        "uuid, generations, correctness_math_verify",
    ),
    "UltraChat": Layout(
        conversations,
        {
            "prompt": "Say {n}.",
            "prompt_id": "p{n}",
            "messages": [user("Say {n}."), reply("{n}"), user("One more."), reply("{m}")],
        },
        [user("Say {n}."), user("One more.")],
        [reply("{n}"), reply("{m}")],
        "reads: messages (every assistant turn); not read: prompt, prompt_id",
    ),
    "Alpaca": Layout(
        conversations,
        {"instruction": "Translate to French.", "input": "the number {n}", "output": "le nombre {n}"},
        [user("Translate to French.\n\nthe number {n}")],
        [reply("le nombre {n}")],
        "reads: instruction (the prompt), input (the prompt), output (learnt)",
    ),
    "Alpaca without input": Layout(
        conversations,
        {"instruction": "Count to {n}.", "input": "", "output": "… {n}", "text": "### Instruction: Count to {n}."},
        [user("Count to {n}.")],
        [reply("… {n}")],
        "reads: instruction (the prompt), input (the prompt), output (learnt); not read: text",
    ),
    "Dolly": Layout(
        conversations,
        {"instruction": "Who won?", "context": "Team {n} won.", "response": "Team {n}.", "category": "closed_qa"},
        [user("Who won?\n\nTeam {n} won.")],
        [reply("Team {n}.")],
        "reads: instruction (the prompt), context (the prompt), response (learnt); not read: category",
    ),
    "ShareGPT": Layout(
        conversations,
        {
            "id": "s{n}",
            "system": "Be brief.",
            "conversations": [
                {"from": "human", "value": "Say {n}."},
                {"from": "gpt", "value": "{n}"},
                {"from": "human", "value": "And then?"},
                {"from": "gpt", "value": "{m}"},
            ],
        },
        [system("Be brief."), user("Say {n}."), user("And then?")],
        [reply("{n}"), reply("{m}")],
        "reads: conversations (every assistant turn), system (the system message); not read: id",
    ),
    "OpenAI fine-tuning": Layout(
        conversations,
        {"messages": [system("Marv."), user("{n}?"), reply("no", weight=0), user("{n}!"), reply("{m}", weight=1)]},
        [system("Marv."), user("{n}?"), user("{n}!")],
        [reply("{m}")],
        "reads: messages (every assistant turn)",
    ),
    "OpenAI tool calls": Layout(
        conversations,
        {
            "messages": [
                user("Weather in city {n}?"),
                reply(None, tool_calls=[call('{"city": "{n}"}')]),
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                reply("Sunny in {n}.", tool_calls=None, name=None),
            ],
            "tools": [WEATHER],
            "parallel_tool_calls": False,
        },
        [user("Weather in city {n}?"), {"role": "tool", "tool_call_id": "c1", "content": "sunny"}],
        [reply("", tool_calls=[call('{"city": "{n}"}')]), reply("Sunny in {n}.")],
        "reads: messages (every assistant turn), tools; not read: parallel_tool_calls",
    ),
    "OpenOrca": Layout(
        conversations,
        {"id": "o{n}", "system_prompt": "Explain.", "question": "Why {n}?", "response": "Because of {m}."},
        [system("Explain."), user("Why {n}?")],
        [reply("Because of {m}.")],
        "reads: question (the prompt), system_prompt (the system message), response (learnt); not read: id",
    ),
    "MetaMathQA": Layout(
        conversations,
        {"type": "GSM_AnsAug", "query": "{n} + 1?", "original_question": "{n} plus 1?", "response": "The answer is: {m}"},
        [user("{n} + 1?")],
        [reply("The answer is: {m}")],
        "reads: query (the prompt), response (learnt); not read: type, original_question",
    ),
    "TRL prompt and completion": Layout(
        conversations,
        {"prompt": [user("{n}?")], "completion": [reply("{m}")]},
        [user("{n}?")],
        [reply("{m}")],
        "reads: prompt, completion (learnt)",
    ),
    # -- judged answers
    "UltraFeedback binarised": Layout(
        pairs,
        {
            "prompt": "Say {n}.",
            "prompt_id": "p{n}",
            "chosen": [user("Say {n}."), reply("{n}")],
            "rejected": [user("Say {n}."), reply("no")],
            "messages": [user("Say {n}."), reply("{n}")],
            "score_chosen": 8.5,
            "score_rejected": 4.0,
        },
        [user("Say {n}.")],
        [reply("{n}"), reply("no")],
        "reads: chosen, rejected, prompt; not read: prompt_id, messages, score_chosen, score_rejected",
    ),
    "HH-RLHF": Layout(
        pairs,
        {"chosen": "\n\nHuman: Say {n}.\n\nAssistant: {n}", "rejected": "\n\nHuman: Say {n}.\n\nAssistant: no"},
        [user("Say {n}.")],
        [reply("{n}"), reply("no")],
        "reads: chosen, rejected",
    ),
    "Orca DPO pairs": Layout(
        pairs,
        {"system": "Be brief.", "question": "Say {n}.", "chosen": "{n}", "rejected": "no"},
        [system("Be brief."), user("Say {n}.")],
        [reply("{n}"), reply("no")],
        "reads: chosen, rejected, question (the prompt), system (the system message)",
    ),
    "ShareGPT pairs": Layout(
        pairs,
        {
            "conversations": [{"from": "human", "value": "Say {n}."}],
            "chosen": {"from": "gpt", "value": "{n}"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        [user("Say {n}.")],
        [reply("{n}"), reply("no")],
        "reads: chosen, rejected, conversations (the prompt)",
    ),
    "PKU-SafeRLHF": Layout(
        safety,
        {
            "prompt": "Say {n}.",
            "response_0": "no",
            "response_1": "{n}",
            "is_response_0_safe": False,
            "is_response_1_safe": True,
            "better_response_id": 0,
            "safer_response_id": 1,
        },
        [user("Say {n}.")],
        [reply("{n}"), reply("no")],
        "reads: response_0, response_1, safer_response_id, is_response_0_safe, is_response_1_safe, prompt; "
        "not read: better_response_id",
    ),
    "KTO": Layout(
        judged,
        {"prompt": "Say {n}.", "completion": "{n}", "label": True},
        [user("Say {n}.")],
        [reply("{n}")],
        "reads: completion, label, prompt",
    ),
    "judged steps": Layout(
        steps,
        {"prompt": "{n} + 1?", "completions": ["Take {n}.", "Get {m}."], "labels": [True, True], "dataset": "math_shepherd"},
        [user("{n} + 1?")],
        ["Take {n}.", "Get {m}."],
        "reads: completions, labels, prompt; not read: dataset",
    ),
}


def filled(value, n):
    """The value with the row's number in its texts."""
    if isinstance(value, str):
        return value.replace("{n}", str(n)).replace("{m}", str(n + 1))
    if isinstance(value, dict):
        return {key: filled(item, n) for key, item in value.items()}
    return [filled(item, n) for item in value] if isinstance(value, list) else value
