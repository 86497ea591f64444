"""The grammars that a turn must fit: those of its answer's JSON schema, or of a call of a tool that it must make."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.api.failures import DataFailure
from tandem.engines.inference.grammars import WHITE_SPACE, check_grammar, json_grammar
from tandem.protocol.dialects.wire import as_object
from tandem.protocol.refusal import Refusal
from tandem.protocol.tool_families import Family
from tandem.protocol.turns import Turn


async def grammar_of(turn: Turn, family: Family) -> str:
    """The grammar of a turn of a model whose calls are written as ``family`` has them; empty: it may write anything.

    Raises:
        Refusal: 400 for a schema that cannot be enforced, or a call that cannot be forced; names the part.
    """
    form, where = turn.answer_format, "tool_choice"
    if form is not None and turn.tools:
        message = "an answer that must be JSON cannot call tools: leave one out, or say tool_choice none"
        raise Refusal(400, message, param=form.where)
    try:
        if form is not None:
            where = form.where
            return await asyncio.to_thread(json_grammar, form.schema)
        if turn.tool_choice == "required":
            grammar = _call_grammar(turn, family)
            await asyncio.to_thread(check_grammar, grammar)
            return grammar
    except DataFailure as failure:
        raise Refusal(400, f"{where}: {failure}", code=failure.reason, param=where) from failure
    return ""


def _call_grammar(turn: Turn, family: Family) -> str:
    """A call of one of the turn's tools, or of that which was chosen, in the notation of Lark."""
    tools = [tool["function"] for tool in turn.tools if turn.chosen_tool in ("", tool["function"]["name"])]
    if not tools:
        message = f"tool_choice wants a call of {turn.chosen_tool or 'some tool'}, which is not among the tools"
        raise Refusal(400, message, param="tool_choice")
    if family.forced is None:
        message = f"tool_choice must be auto or none: calls in the format of this model ({family.name}) cannot be forced"
        raise Refusal(400, message, param="tool_choice")
    before, field, behind = family.forced
    calls = " | ".join(f"call_{number}" for number in range(len(tools)))
    return "\n".join([f"start: {_text(before)} ({calls}) {_text(behind)}", *_rules(tools, field)])


def _rules(tools: Sequence[Mapping[str, Any]], field: str) -> list[str]:
    """Each schema stands for itself, so that references inside it lead where they led."""
    rules = []
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "{field}": '
        schema = {**as_object(tool["parameters"], "tools.parameters"), "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        rules.append(f"call_{number}: {_text(head)} arguments_{number} {_text('}')}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return rules


def _text(words: str) -> str:
    return json.dumps(words, ensure_ascii=False)
