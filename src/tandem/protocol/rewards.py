"""Judging over HTTP: what a reward server is asked, and what it answers.

Four layouts are known. `tandem` is our own: results carry the number of their question, so their order says nothing, and a
completion that cannot be judged has a reason. Its messages show images and sounds by their numbers: the server says which of
them it lacks (``POST /media/missing``), and is sent those (``POST /media``). `openrlhf` is what the remote reward servers of
OpenRLHF take (``query``, ``prompts``, ``labels`` → ``rewards``), `slime` what those of slime take (one sample: ``prompt``,
``response``, ``label`` → a number), `vllm` what vLLM and SGLang serve of a sequence classifier (``model``, ``input`` →
``data`` with ``probs``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.api.media import Medium
from tandem.protocol.schema import array, record, text


@dataclass(frozen=True)
class Question:
    """One completion that is to be judged."""

    messages: tuple[Mapping[str, Any], ...]
    """The conversation; the completion is its last reply. Empty if it is not known."""

    prompt: str
    """The prompt of the model, as text in its own chat template."""

    completion: str
    answer: str | None = None
    """The expected answer, where the row has one."""


@dataclass(frozen=True)
class NotJudged:
    """Why a server cannot judge a completion."""

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
"""Answer of ``POST /score``: each question has a ``score``, or a ``reason`` why it has none."""

MISSING_BODY = record({"numbers": array(_MEDIUM_NUMBER, 1, 4096)}, ("numbers",))
"""Body of ``POST /media/missing``."""

MISSING_ANSWER = record({"missing": array(_MEDIUM_NUMBER, 0, 4096)}, ("missing",))
"""Those of the numbers whose images and sounds the server has not."""

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
    """The shape in which a kind of server is asked."""

    path: str
    """The route, if the URL names none."""

    at_once: bool
    """True if one request carries many questions."""

    ask: Callable[[Sequence[Question], str | None], dict[str, Any]]
    """The body of a request: the questions, and the name of the server's model."""

    read: Callable[[Any, int, int | None], list[Verdict]]
    """The verdicts of an answer to so many questions, in their order; which of the classes counts, where there are some.
    Raises `ValueError`: it is something else."""

    shows_media: bool = False
    """True if questions may have images and sounds in their messages."""

    has_classes: bool = False
    """True if an answer has a number for each of several classes."""


def plain_text(content: Any) -> str:
    """The text of a message: its text, the texts of its parts, or nothing where it only calls tools."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return "" if content is None else str(content)


def _shown(content: Any) -> str | list[dict[str, Any]]:
    """The content of a message: parts where images or sounds are among them, else its text."""
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
    listed = []
    for question in questions:
        entry: dict[str, Any] = {"prompt": question.prompt, "completion": question.completion}
        if question.messages:
            entry["messages"] = [
                {"role": str(message["role"]), "content": _shown(message.get("content"))} for message in question.messages
            ]
        if question.answer is not None:
            entry["answer"] = question.answer
        listed.append(entry)
    return {"questions": listed} | ({} if model is None else {"model": model})


def _read_tandem(answer: Any, count: int, chosen: int | None) -> list[Verdict]:
    results = answer.get("results") if isinstance(answer, Mapping) else None
    if not isinstance(results, list):
        raise ValueError("it has no list `results`")
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
    for place, one in enumerate(data):
        probs: Any = one.get("probs") if isinstance(one, Mapping) else None
        if not isinstance(probs, list) or not probs:
            raise ValueError(f"data[{place}] has no list `probs`")
        if chosen is None and len(probs) > 1:
            raise ValueError(
                f"its model has {len(probs)} classes; say with class_label which one counts, 0 to {len(probs) - 1}"
            )
        if not 0 <= (chosen or 0) < len(probs):
            raise ValueError(f"class_label={chosen}, and its model has {len(probs)} classes, from 0 on")
        verdicts[one.get("index", place)] = _number(probs[chosen or 0])
    if sorted(verdicts) != list(range(count)):
        raise ValueError(f"`index` must be 0…{count - 1}, each once, got {sorted(map(str, verdicts))}")
    return [verdicts[number] for number in range(count)]


def _only(value: Any) -> Any:
    """A number that stands alone in a list is that number: some servers answer with a row a sample."""
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
