"""The wire formats of reward servers: the body of a scoring request, and the parsing of its answer.

Four layouts are supported. `tandem` is our own: each result carries the number of its question, so that the order of results
does not matter, and a completion that cannot be judged gets a reason. Its messages refer to images and sounds by number: the
client asks which media the server lacks (``POST /media/missing``) and sends these (``POST /media``). `openrlhf` is the
layout of OpenRLHF's remote reward servers (``query``, ``prompts``, ``labels`` → ``rewards``), `slime` the one of slime's
(one sample: ``prompt``, ``response``, ``label`` → a number), `vllm` the one that vLLM and SGLang serve for a sequence
classifier (``model``, ``input`` → ``data`` with ``probs``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.api.media import Medium
from tandem.protocol.bodies import array, record, text


@dataclass(frozen=True)
class Question:
    """One completion to be judged."""

    messages: tuple[Mapping[str, Any], ...]
    """The conversation; its last message is the completion. Empty if only the prompt's text is known."""

    prompt: str
    """The prompt as text, rendered by the chat template of the policy."""

    completion: str
    answer: str | None = None
    """The expected answer, if the row has one."""


@dataclass(frozen=True)
class NotJudged:
    """The reason why a server cannot judge a completion."""

    reason: str
    message: str


Verdict = float | NotJudged

_NUMBER = {"type": "number"}
_MEDIUM_NUMBER = {"type": "integer", "minimum": -(2**63), "maximum": -1}
_PARTS = (
    record({"type": {"enum": ["text"]}, "text": {"type": "string"}}, ("type", "text")),
    record({"type": {"enum": ["image", "audio"]}, "medium": _MEDIUM_NUMBER}, ("type", "medium")),
)
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": text(64, 1),
        "content": {"anyOf": [{"type": "string"}, array({"anyOf": list(_PARTS)}, 0, 1024)]},
    },
    "required": ["role", "content"],
}
SCORE_BODY = record(
    {
        "model": text(256, 1, "Name of a model of the server; may be left out if it has one."),
        "questions": array(
            record(
                {
                    "messages": {"type": "array", "items": _MESSAGE, "maxItems": 4096},
                    "prompt": {"type": "string"},
                    "completion": {"type": "string"},
                    "answer": {"type": "string"},
                },
                ("completion",),
            ),
            1,
            1024,
        ),
    },
    ("questions",),
)
"""Body of ``POST /score``."""

SCORE_ANSWER = record(
    {
        "model": {"type": "string"},
        "results": array(
            record(
                {
                    "question": {"type": "integer", "minimum": 0},
                    "score": _NUMBER,
                    "reason": {"type": "string"},
                    "message": {"type": "string"},
                },
                ("question",),
            ),
            1,
            1024,
        ),
    },
    ("results",),
)
"""Answer of ``POST /score``: each question gets a ``score``, or a ``reason`` why it cannot be judged."""

MISSING_BODY = record({"numbers": array(_MEDIUM_NUMBER, 1, 4096)}, ("numbers",))
"""Body of ``POST /media/missing``."""

MISSING_ANSWER = record({"missing": array(_MEDIUM_NUMBER, 0, 4096)}, ("missing",))
"""Answer of ``POST /media/missing``: the numbers whose images or sounds are not on the server."""

MEDIUM_BODY = record({"kind": {"enum": ["image", "audio"]}, "data": text(2**25, 1, "base64 of a file")}, ("kind", "data"))
"""Body of ``POST /media``."""

MEDIUM_ANSWER = record({"number": _MEDIUM_NUMBER}, ("number",))

REWARDS_BODY = record(
    {
        "query": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1024},
        "prompts": {"type": "array", "items": {"type": "string"}, "maxItems": 1024},
        "labels": {"type": "array", "items": {}, "maxItems": 1024},
    },
    ("query",),
)
"""Body of ``POST /get_reward``, the route of OpenRLHF."""


@dataclass(frozen=True)
class RequestShape:
    """The wire format of one kind of reward server."""

    path: str
    """The default route, for a URL without a path."""

    at_once: bool
    """True if one request may carry several questions."""

    ask: Callable[[Sequence[Question], str | None], dict[str, Any]]
    """(questions, name of the server's model or None) → body of the request."""

    read: Callable[[Any, int, int | None], list[Verdict]]
    """(answer, number of questions, class to use or None) → the verdicts in the order of the questions. Raises `ValueError`
    if the answer has another format."""

    shows_media: bool = False
    """True if the messages of questions may contain images and sounds."""

    has_classes: bool = False
    """True if an answer has one number for each of several classes."""


def plain_text(content: Any) -> str:
    """Returns the text of a message's content, the joined texts of its parts, or "" for None (a message of tool calls
    only)."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return "" if content is None else str(content)


def _shown(content: Any) -> str | list[dict[str, Any]]:
    """Returns the content of a message: a list of parts if it contains images or sounds, otherwise a text."""
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else []
    if not any(isinstance(part.get("medium"), Medium) for part in parts):
        return plain_text(content)
    return [
        {"type": part["medium"].kind, "medium": part["medium"].number}
        if isinstance(part.get("medium"), Medium)
        else {"type": "text", "text": str(part["text"])}
        for part in parts
        if "text" in part or isinstance(part.get("medium"), Medium)
    ]


def _ask_tandem(questions: Sequence[Question], model: str | None) -> dict[str, Any]:
    entries = []
    for question in questions:
        entry: dict[str, Any] = {"prompt": question.prompt, "completion": question.completion}
        if question.messages:
            entry["messages"] = [
                {"role": str(message["role"]), "content": _shown(message.get("content"))} for message in question.messages
            ]
        if question.answer is not None:
            entry["answer"] = question.answer
        entries.append(entry)
    return {"questions": entries} | ({} if model is None else {"model": model})


def _read_tandem(answer: Any, count: int, chosen: int | None) -> list[Verdict]:
    results = answer.get("results") if isinstance(answer, Mapping) else None
    if not isinstance(results, list):
        raise ValueError("the list `results` is missing")
    verdicts: dict[int, Verdict] = {}
    for result in results:
        number: Any = result.get("question") if isinstance(result, Mapping) else None
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise ValueError(f"`question` must be one of 0…{count - 1}, got {number!r:.80}")
        if number in verdicts:
            raise ValueError(f"question {number} has two results")
        if "score" in result:
            verdicts[number] = _number(result["score"])
        elif isinstance(result.get("reason"), str) and result["reason"].isidentifier():
            verdicts[number] = NotJudged(result["reason"], str(result.get("message", "")))
        else:
            raise ValueError(f"question {number} has neither a score nor a reason of letters, digits and _")
    missing = [number for number in range(count) if number not in verdicts]
    if missing:
        raise ValueError(f"{len(missing)} of {count} questions have no result, the first is {missing[0]}")
    return [verdicts[number] for number in range(count)]


def _ask_openrlhf(questions: Sequence[Question], model: str | None) -> dict[str, Any]:
    return {
        "query": [question.prompt + question.completion for question in questions],
        "prompts": [question.prompt for question in questions],
        "labels": [question.answer or "" for question in questions],
    }


def _read_openrlhf(answer: Any, count: int, chosen: int | None) -> list[Verdict]:
    rewards = answer.get("rewards") if isinstance(answer, Mapping) else None
    if not isinstance(rewards, list) or len(rewards) != count:
        size = len(rewards) if isinstance(rewards, list) else "none"
        raise ValueError(f"`rewards` must be a list of {count} numbers, got {size}")
    return [_number(_only(reward)) for reward in rewards]


def _ask_slime(questions: Sequence[Question], model: str | None) -> dict[str, Any]:
    (question,) = questions
    return {"prompt": question.prompt, "response": question.completion, "label": question.answer}


def _read_slime(answer: Any, count: int, chosen: int | None) -> list[Verdict]:
    value = answer
    if isinstance(answer, Mapping):
        value = next((answer[key] for key in ("reward", "score") if key in answer), None)
    return [_number(value)]


def _ask_vllm(questions: Sequence[Question], model: str | None) -> dict[str, Any]:
    texts = [question.prompt + question.completion for question in questions]
    body: dict[str, Any] = {"input": texts if len(texts) > 1 else texts[0]}  # SGLang takes one text a request
    return body | ({} if model is None else {"model": model})


def _read_vllm(answer: Any, count: int, chosen: int | None) -> list[Verdict]:
    data = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(data, list) or len(data) != count:
        raise ValueError(f"`data` must be a list of {count}, got {len(data) if isinstance(data, list) else 'none'}")
    verdicts: dict[int, Verdict] = {}
    for place, entry in enumerate(data):
        probs: Any = entry.get("probs") if isinstance(entry, Mapping) else None
        if not isinstance(probs, list) or not probs:
            raise ValueError(f"data[{place}] has no list `probs`")
        if chosen is None and len(probs) > 1:
            raise ValueError(
                f"the server's model has {len(probs)} classes; say with class_label which one counts, 0 to {len(probs) - 1}"
            )
        if not 0 <= (chosen or 0) < len(probs):
            raise ValueError(f"class_label={chosen}, and the server's model has {len(probs)} classes, from 0 on")
        verdicts[entry.get("index", place)] = _number(probs[chosen or 0])
    if sorted(verdicts) != list(range(count)):
        raise ValueError(f"`index` must be 0…{count - 1}, each once, got {sorted(map(str, verdicts))}")
    return [verdicts[number] for number in range(count)]


def _only(value: Any) -> Any:
    """Returns the only element of a list of length one, and any other value unchanged. Some servers answer with a list for
    each sample."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a score must be a number, got {value!r:.80}")
    return float(value)


LAYOUTS = {
    "tandem": RequestShape("/score", True, _ask_tandem, _read_tandem, shows_media=True),
    "openrlhf": RequestShape("/get_reward", True, _ask_openrlhf, _read_openrlhf),
    "slime": RequestShape("", False, _ask_slime, _read_slime),
    "vllm": RequestShape("/classify", True, _ask_vllm, _read_vllm, has_classes=True),
}
