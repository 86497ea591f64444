"""The turns of one session as a forest that only grows, so that training sees exactly the engine's tokens.

A node is one turn of the model: the messages since the previous turn, and the reply. A request attaches to the deepest node
whose whole path of messages it repeats. The tokens of that path are reused, and only the messages behind it are rendered.
If the template would write the path differently, the reply was cut off, or the client rewrote its history, the request
begins a new root: all its messages are rendered anew and are context.
"""

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from tandem.api.chat_template import special_ids, text_of
from tandem.api.failures import DataFailure
from tandem.api.media import MediaTokens, Medium, encode, media_of, prompt_key, reader_of
from tandem.api.requests import LLMResponse, StopReason
from tandem.media.parts import read_for
from tandem.protocol.turns import Message, Reply
from tandem.rollout.workflows import SENTINEL, Tokens

LONG = 1 << 16
"""If a message's content has more characters than this, its digest is compared instead. So other threads wait less."""


def meaning(message: Message) -> str:
    """Returns a key that is equal for messages of the same meaning: role, content, and calls by name and parsed arguments.

    Absent, null and empty content are equal, and text parts equal their text. White space around a reply is ignored. So are
    the ids of calls and results, because their order matches, and thinking, see `thought`.
    """
    content = _words(message.get("content"))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    if message["role"] == "assistant":
        content = content.strip()
    if len(content) > LONG:
        content = hashlib.blake2b(content.encode("utf-8", "surrogatepass")).hexdigest()
    return json.dumps([message["role"], content, calls], ensure_ascii=False, sort_keys=True)


def _words(content: Any) -> str:
    """Returns the text of a content, with the number of each image or sound in its place."""
    if not isinstance(content, list | tuple):
        return text_of(content)
    media = (part.get("medium") if isinstance(part, Mapping) else None for part in content)
    return "".join(
        f"\0{medium.number}\0" if isinstance(medium, Medium) else text_of(part)
        for part, medium in zip(content, media, strict=True)
    )


def thought(message: Message) -> str:
    """Returns the thinking of an earlier reply, as the client sends it back in a message; empty if the client left it
    out."""
    return str(message.get("reasoning_content") or "").strip()


def digests(messages: Iterable[Message], start: bytes = b"") -> list[bytes]:
    """Returns for each message the digest of the path up to it. ``start``: the digest of the path before the first
    message."""
    values, last = [], start
    for message in messages:
        last = hashlib.blake2b(last + meaning(message).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        values.append(last)
    return values


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = [arguments]  # not an object, so equal to the same text only
    return [function.get("name"), _plain(arguments or {})]


def _plain(value: Any) -> Any:
    """Returns the value with integral floats as integers, because JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


Tools = Sequence[Mapping[str, Any]]

USED = 20
"""Minimum length, in characters, of a reply that counts as used if a later message contains its text. A shorter text may
occur there by chance."""


class ReplyReader(Protocol):
    """Renders a chat and parses replies; see `tandem.protocol.tool_calls.CallReader`."""

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """Renders a chat as the text that the model reads."""
        ...

    def read(self, ids: Sequence[int], tools: Tools = (), *, prompt: str = "", stop_reason: StopReason) -> Reply:
        """Parses a reply."""
        ...


class Unrenderable(ValueError):
    """The chat template rejects the messages; the message says why."""

    code = "template_refuses"


class TooLong(Unrenderable):
    """The messages have more tokens than the context allows."""

    code = "context_length_exceeded"


class Text(NamedTuple):
    """Length and digest of a long text, for a comparison with other texts."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> "Text":
        """Returns length and digest of a text."""
        return cls(len(text), hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())

    def begins(self, text: str) -> bool:
        """True if ``text`` begins with the text of this object."""
        return len(text) >= self.length and Text.of(text[: self.length]) == self


@dataclass(frozen=True, eq=False)
class TokenisedRequest:
    """A request for a turn, with its tokens."""

    parent: "Node | None"
    """The node that the request continues; None: the request begins a root."""

    tail: tuple[Message, ...]
    """The messages behind the parent's path."""

    tools: Tools
    text: str
    """The whole prompt."""

    prompt: Text
    path: bytes
    """Digest of the messages."""

    input_ids: tuple[int, ...]
    context: tuple[int, ...]
    """The input tokens behind the parent's path."""

    media: tuple[int, ...]
    """The media number of each input token; empty if there are no media."""

    context_media: tuple[int, ...]
    """The media number of each token of `context`; empty if there are no media."""

    opening: bool
    """True if no turn of the session had ended when the request came."""

    number: int
    """Number of the request in order of arrival."""

    digest: bytes = b""
    """Digest of the input tokens."""


@dataclass(eq=False)
class Node:
    """One turn: the request and the reply."""

    request: TokenisedRequest
    reply: Message
    """The reply as the client sees it."""

    words: str
    """The reply's text without special tokens, for rewards."""

    raw_text: str
    """The reply's text with special tokens, but without the special token that ended the turn."""

    response: LLMResponse
    """The engine's response without ``input_ids``, which are the tokens of the path."""

    key: int
    """Identifies the turn in its session. Derived from the prompt, so it does not depend on the order of requests."""

    path: bytes
    """Digest of the messages up to and including the reply."""

    prompt_text: str
    """The whole prompt for a root; empty for other nodes."""

    taken: bool = False
    """True if a client has received the reply."""

    children: list["Node"] = field(default_factory=list)

    @property
    def parent(self) -> "Node | None":
        """The previous turn; None for a root."""
        return self.request.parent

    @property
    def root(self) -> "Node":
        """The first turn of this turn's path."""
        return self if self.parent is None else self.parent.root

    def line(self) -> "list[Node]":
        """Returns the path from the root to this turn."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def messages(self) -> list[Message]:
        """Returns the conversation up to and including the reply."""
        return [message for node in self.line() for message in (*node.request.tail, node.reply)]


class Forest:
    """The turns of one session. Does no input or output of its own.

    Example::

        request = forest.ask(messages, tools)
        node = forest.add(request, response, reply)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reader: ReplyReader,
        template_kwargs: Mapping[str, Any] | None = None,
        context: int | None = None,
    ):
        """``context``: maximum number of tokens that the engine accepts; None: unknown."""
        self._tokenizer, self.reader, self._kwargs = tokenizer, reader, dict(template_kwargs or {})
        self._context, self.takes_media = context, reader_of(tokenizer) is not None
        self._special = frozenset(special_ids(tokenizer))
        self._ends: dict[bytes, list[Node]] = {}
        self.nodes: list[Node] = []
        self._count = itertools.count(1)  # safe if two threads call at the same time

    # ------------------------------------------------------------------ growing

    def arrival(self) -> tuple[int, bool]:
        """Returns the number of a request that arrives now, and True if no turn has ended yet."""
        return next(self._count), not self.nodes

    def ask(
        self, messages: Sequence[Message], tools: Tools = (), arrival: tuple[int, bool] | None = None
    ) -> TokenisedRequest:
        """Tokenises a request. ``arrival``: the result of `arrival` when the request came; None: now.

        Raises:
            Unrenderable: the template rejects the messages.
            TooLong: the messages cannot fit into the context; found before all of them are tokenised.
            DataFailure: an image or sound in the messages cannot be read.
        """
        (number, opening), messages = arrival or self.arrival(), tuple(read_for(self._tokenizer, messages))
        paths = digests(messages)
        for length in range(len(messages), 0, -1):
            nodes = [node for node in self._ends.get(paths[length - 1], ()) if _thinks_alike(node, messages)]
            for node in sorted(nodes, key=lambda node: node.key):
                attached = self._attached(node, messages[length:], tools, paths[-1], number)
                if attached is not None:
                    return attached
            if nodes:
                break
        text = self._render(messages, tools)
        ids, media = map(tuple, self._encode(text, media_of(messages)))
        digest = _digest(ids, media)
        return TokenisedRequest(
            None, messages, tools, text, Text.of(text), paths[-1], ids, ids, media, media, opening, number, digest
        )

    def add(self, request: TokenisedRequest, response: LLMResponse, reply: Message, key: int = 0) -> Node:
        """Adds the reply to a request and returns its node.

        Raises:
            ValueError: the response answers other tokens.
        """
        if tuple(response.input_ids) != request.input_ids:
            raise ValueError("the response answers another request: its input_ids are not the tokens of this session")
        end = self._end_token(response)
        output = list(response.output_ids)
        words = str(self._tokenizer.decode(output, skip_special_tokens=True))
        (path,) = digests([reply], request.path)
        node = Node(
            replace(request, text="", input_ids=(), media=(), digest=b""),
            reply,
            words,
            self._decode(output[:-1] if end else output),
            replace(response, input_ids=()),
            key,
            path,
            request.text if request.parent is None else "",
        )
        if request.parent is not None:
            request.parent.children.append(node)
        self._ends.setdefault(path, []).append(node)
        self.nodes.append(node)
        return node

    def _attached(
        self, node: Node, tail: tuple[Message, ...], tools: Tools, end: bytes, number: int
    ) -> TokenisedRequest | None:
        """Returns the request as a continuation of ``node``; None if that is impossible."""
        if node.response.stop_reason != StopReason.STOP:
            return None  # the template would end a reply that the model did not end
        path = node.messages()
        try:
            full = self._render([*path, *tail], tools)
            addition = self._addition(node, path, tail, tools, full)
        except Unrenderable:
            return None
        if addition is None:
            return None
        context, media_numbers = map(tuple, self._encode(addition, media_of(tail)))
        before = _tokens(node)
        ids, media = (*before.ids, *context), (*before.media, *(media_numbers or (0,) * len(context)))
        media = media if any(media) else ()
        return TokenisedRequest(
            node,
            tail,
            tools,
            full,
            Text.of(full),
            end,
            ids,
            context,
            media,
            media_numbers,
            False,
            number,
            _digest(ids, media),
        )

    def _addition(self, node: Node, path: list[Message], tail: Sequence[Message], tools: Tools, full: str) -> str | None:
        """Returns the text that the template writes behind a reply's tokens if ``tail`` follows; None if the template writes
        the path differently.

        The end-of-turn token is left out if the model has generated it.
        """
        if not node.request.prompt.begins(full):
            return None
        start, end = node.request.prompt.length, self._end_token(node.response)
        if node.reply.get("tool_calls"):
            rendered = self._render(path, tools, add_generation_prompt=False)
            cut = rendered.rfind(end, start) if end else -1
            if cut < 0 or not full.startswith(rendered):
                return None
            written, after = rendered[start:cut], rendered[cut + len(end) :] + full[len(rendered) :]
        else:
            marked = self._render([*path[:-1], {**path[-1], "content": SENTINEL}, *tail], tools)
            _, marker, after = marked.partition(SENTINEL)
            if not marker or not full.endswith(after) or len(full) < start + len(after):
                return None
            written = full[start : len(full) - len(after)]
            ended = after.find(end) if end else -1
            if ended >= 0 and not after[:ended].strip():
                after = after[ended + len(end) :]
        return after if self._reads_alike(written, node, tools, full[:start]) else None

    def _reads_alike(self, written: str, node: Node, tools: Tools, prompt: str) -> bool:
        """True if the template's text for a reply has the same meaning as the model's own."""
        if written.strip() == node.raw_text.strip():
            return True
        ids = self._encode(written).ids
        parsed = self.reader.read(ids, tools, prompt=prompt, stop_reason=StopReason.STOP).shown().message()
        return meaning(parsed) == meaning(node.reply) and thought(parsed) == thought(node.reply)

    # ------------------------------------------------------------------ harvesting

    def left(self) -> list[Node]:
        """Returns the turns whose reply was neither received by a client nor continued by a request."""
        return [node for node in self.nodes if not node.taken and not node.children]

    def task(self, nodes: Sequence[Node]) -> set[Node]:
        """Returns the roots among those of ``nodes`` that belong to the task. The others are side calls.

        A side call was requested before the session's first reply, and nothing depends on it: it is not the root of the
        first turn, shares no first message with a root of the task, repeats no reply of the task, and no later turn of the
        task has one of its replies in the messages. So every request after the first reply belongs to the task, for example
        those of a critic, a summary, or an answer in a separate context.

        The first turn's root is chosen by these criteria in order: it has tools, it was requested before any reply, it has
        the most turns, it has the longest prompt. So a title that an agent requests beside the task is a side call.
        """
        trees: dict[Node, list[Node]] = {}
        for node in nodes:
            trees.setdefault(node.root, []).append(node)
        if not trees:
            return set()
        first = max(
            trees, key=lambda r: (bool(r.request.tools), r.request.opening, len(trees[r]), len(r.request.context), -r.key)
        )
        task = {first} | {root for root in trees if not root.request.opening}
        others = set(trees) - task
        while True:
            begin = {meaning(root.request.tail[0]) for root in task}
            replies = {meaning(node.reply) for root in task for node in trees[root]}
            joining = {
                root
                for root in others
                if meaning(root.request.tail[0]) in begin
                or any(m["role"] == "assistant" and meaning(m) in replies for m in root.request.tail)
                or any(_is_used(node, trees[other]) for node in trees[root] for other in task)
            }
            if not joining:
                return task
            task, others = task | joining, others - joining

    def leaves(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns the last turn of each path through these turns.

        The order depends on the contents only; the path with the turn that was requested last comes last.
        """
        inside = set(nodes)
        last = max(nodes, key=lambda node: node.request.number, default=None)
        leaves = [node for node in nodes if not inside.intersection(node.children)]
        return sorted(leaves, key=lambda node: (last in node.line(), node.key))

    def trajectories(self, nodes: Sequence[Node]) -> Iterator[Tokens]:
        """Yields the tokens of the paths from root to leaf through these turns, in the order of `leaves`. A turn that is on
        several paths is trained on in the first one only."""
        done: set[Node] = set()
        for leaf in self.leaves(nodes):
            tokens: Tokens | None = None
            for node in leaf.line():
                if tokens is None:
                    tokens = Tokens(node.request.context, node.request.context_media)
                else:
                    tokens.add_context(node.request.context, node.request.context_media)
                tokens.add_completion(node.response, trained=node not in done)
                done.add(node)
            assert tokens is not None
            yield tokens

    # ------------------------------------------------------------------ text and tokens

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = True) -> str:
        try:
            return self.reader.render(messages, tools, add_generation_prompt=add_generation_prompt, **self._kwargs)
        except DataFailure as error:
            raise Unrenderable(
                f"the chat template of this model refuses the messages: {error.__cause__ or error}"
            ) from error

    def _encode(self, text: str, media: Sequence[Medium] = ()) -> MediaTokens:
        if self._context is not None and len(text) > (first := 8 * self._context):
            tokens = len(self._tokenizer(text[:first], add_special_tokens=False)["input_ids"])
            if tokens > 1.25 * self._context:  # cutting the text changes few tokens
                raise TooLong(
                    f"the first {first} of {len(text)} characters have {tokens} tokens, and the context {self._context}"
                )
        return encode(self._tokenizer, text, media)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _end_token(self, response: LLMResponse) -> str:
        """Returns the text of the special token with which the model ended its turn; empty if there is none."""
        last = response.output_ids[-1] if response.output_ids else None
        if response.stop_reason != StopReason.STOP or last not in self._special:
            return ""
        return self._decode([last])


def _thinks_alike(node: Node, messages: Sequence[Message]) -> bool:
    """True if the thinking that the client repeats equals the path's, or is left out."""
    return all(thought(sent) in ("", thought(message)) for message, sent in zip(node.messages(), messages, strict=False))


def _is_used(node: Node, turns: Sequence[Node]) -> bool:
    """True if a later turn of ``turns`` has the text of ``node``'s reply in its messages."""
    words = str(node.reply.get("content") or "").strip()
    later = (message for turn in turns if turn.request.number > node.request.number for message in turn.request.tail)
    return len(words) >= USED and any(words in str(message.get("content") or "") for message in later)


def _tokens(node: Node) -> MediaTokens:
    """Returns all tokens up to the end of a node's reply."""
    tokens = MediaTokens([], [])
    for ancestor in node.line():
        context, output = ancestor.request.context, ancestor.response.output_ids
        tokens.ids.extend((*context, *output))
        tokens.media.extend((*(ancestor.request.context_media or (0,) * len(context)), *(0,) * len(output)))
    return tokens


def _digest(ids: Sequence[int], media: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", prompt_key(ids, media)).tobytes(), digest_size=16).digest()
