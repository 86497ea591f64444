"""When two messages say the same: clients write what they were given in their own way before they send it back."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.api.chat_template import text_of
from tandem.api.media import Medium
from tandem.protocol.turns import Message

LONG = 1 << 16
"""Characters of a content above which its digest stands for it: other threads need not wait for that."""


def meaning(message: Message) -> str:
    """A text that is equal for messages which say the same: role, content, and calls by name and parsed arguments.

    Content that is absent, null or empty is one thing, and parts of text are their text. White space around a reply is no
    word of it. The ids of calls and results do not count, because their order agrees; nor does thinking, see `thought`.
    """
    content = _words(message.get("content"))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if message["role"] == "assistant":
        content = content.strip()
    if len(content) > LONG:
        content = hashlib.blake2b(content.encode("utf-8", "surrogatepass")).hexdigest()
    return json.dumps([message["role"], content, calls], ensure_ascii=False, sort_keys=True)


def _words(content: Any) -> str:
    """The text of a content; the number of an image or sound stands in its place."""
    if not isinstance(content, list | tuple):
        return text_of(content)
    media = (part.get("medium") if isinstance(part, Mapping) else None for part in content)
    return "".join(
        f"\0{medium.number}\0" if isinstance(medium, Medium) else text_of(part)
        for part, medium in zip(content, media, strict=True)
    )


def thought(message: Message) -> str:
    """The thinking that a message repeats; empty where the client left it out."""
    return str(message.get("reasoning_content") or "").strip()


def digests(messages: Iterable[Message], start: bytes = b"") -> list[bytes]:
    """Gives for each message the digest of the path that ends with it; ``start``: that of the path before the first."""
    made, last = [], start
    for message in messages:
        last = hashlib.blake2b(last + meaning(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        made.append(last)
    return made


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = [arguments]  # no object, so equal to the same text only
    return [function.get("name"), _plain(arguments or {})]


def _plain(value: Any) -> Any:
    """The value with whole numbers written one way: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
