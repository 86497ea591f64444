"""The turns of one session as a forest that only grows: what is trained is what the engine saw and made.

A node is one turn of the model: the messages that came since the turn before, and the reply. A request attaches to the
deepest node whose whole path of messages it repeats. The tokens of that path are taken as they are, and only the messages
behind it are rendered. Where the template would write the path otherwise, where the reply was cut, or where the client
rewrote its history, the request begins a new root: then all its messages are context, rendered anew.
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
from tandem.rollout.chat import SENTINEL, Tokens

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
            arguments = [arguments]  # no object, so equal to the same text only
    return [function.get("name"), _plain(arguments or {})]


def _plain(value: Any) -> Any:
    """The value with whole numbers written one way: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


Tools = Sequence[Mapping[str, Any]]

USED = 20
"""A reply of fewer characters may stand in a later message by chance."""


class ReplyReader(Protocol):
    """Writes a chat as text, and reads a reply; see `tandem.protocol.tool_calls.CallReader`."""

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """The chat as the model reads it."""
        ...

    def read(self, ids: Sequence[int], tools: Tools = (), *, prompt: str = "", stop_reason: StopReason) -> Reply:
        """Reads a reply."""
        ...


class Unrenderable(ValueError):
    """The chat template refuses the messages; says why."""

    code = "template_refuses"


class TooLong(Unrenderable):
    """The messages have more tokens than the context."""

    code = "context_length_exceeded"


class Text(NamedTuple):
    """A long text that others are compared with: its length and digest."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> "Text":
        """Makes the digest of this text."""
        return cls(len(text), hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())

    def begins(self, text: str) -> bool:
        """Says whether a text begins with this one."""
        return len(text) >= self.length and Text.of(text[: self.length]) == self


@dataclass(frozen=True, eq=False)
class Asked:
    """A request for a turn, with its tokens."""

    parent: "Node | None"
    """The node that it attaches to; None: it begins a root."""

    tail: tuple[Message, ...]
    """The messages behind the path of the parent."""

    tools: Tools
    text: str
    """All of the prompt."""

    prompt: Text
    path: bytes
    """Digest of the messages."""

    input_ids: tuple[int, ...]
    context: tuple[int, ...]
    """Those of them that are behind the path of the parent."""

    media: tuple[int, ...]
    """The media number of each of `input_ids`; empty where all is text."""

    context_media: tuple[int, ...]
    """The media number of each of `context`, or empty."""

    opening: bool
    """No turn of the session had ended when it came."""

    number: int
    """In the order of requests."""

    digest: bytes = b""
    """Digest of the tokens."""


@dataclass(eq=False)
class Node:
    """One turn: what was asked, and the reply."""

    asked: Asked
    reply: Message
    """The reply as the client was shown it."""

    words: str
    """The text of the tokens without special ones, for rewards."""

    said: str
    """All of that text, but for the token that ended the turn."""

    response: LLMResponse
    """Without its ``input_ids``, which are the path."""

    key: int
    """Names it in its session, whatever the order in which requests arrive: a function of its prompt."""

    path: bytes
    """Digest of the messages up to the reply."""

    prompt_text: str
    """All of the prompt, of a root; empty elsewhere."""

    taken: bool = False
    """True if somebody read the reply."""

    children: list["Node"] = field(default_factory=list)

    @property
    def parent(self) -> "Node | None":
        """The turn before."""
        return self.asked.parent

    @property
    def root(self) -> "Node":
        """The first turn of its path."""
        return self if self.parent is None else self.parent.root

    def line(self) -> "list[Node]":
        """The path from the root to this turn."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def messages(self) -> list[Message]:
        """The conversation up to the reply."""
        return [message for node in self.line() for message in (*node.asked.tail, node.reply)]


class Forest:
    """The turns of one session. Pure: it asks nobody.

    Example::

        asked = forest.ask(messages, tools)
        node = forest.add(asked, response, reply)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reader: ReplyReader,
        template_kwargs: Mapping[str, Any] | None = None,
        context: int | None = None,
    ):
        """``context``: most tokens that the engine takes, if known."""
        self._tokenizer, self.reader, self._kwargs = tokenizer, reader, dict(template_kwargs or {})
        self._context, self.takes_media = context, reader_of(tokenizer) is not None
        self._special = frozenset(special_ids(tokenizer))
        self._ends: dict[bytes, list[Node]] = {}
        self.nodes: list[Node] = []
        self._count = itertools.count(1)  # also where two threads ask at once

    # ------------------------------------------------------------------ growing

    def arrival(self) -> tuple[int, bool]:
        """The number of a request that comes now, and whether no turn has ended yet."""
        return next(self._count), not self.nodes

    def ask(self, messages: Sequence[Message], tools: Tools = (), arrival: tuple[int, bool] | None = None) -> Asked:
        """The tokens of a request. ``arrival``: of one that came some time ago; None stands for now.

        Raises:
            Unrenderable: the template refuses the messages.
            TooLong: they cannot fit; known before all of them are tokenised.
            DataFailure: an image or sound of theirs cannot be read.
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
        return Asked(None, messages, tools, text, Text.of(text), paths[-1], ids, ids, media, media, opening, number, digest)

    def add(self, asked: Asked, response: LLMResponse, reply: Message, key: int = 0) -> Node:
        """The reply to a request.

        Raises:
            ValueError: the engine answered other tokens.
        """
        if tuple(response.input_ids) != asked.input_ids:
            raise ValueError("the response answers another request: its input_ids are not the tokens of this session")
        end = self._end_token(response)
        output = list(response.output_ids)
        words = str(self._tokenizer.decode(output, skip_special_tokens=True))
        (path,) = digests([reply], asked.path)
        node = Node(
            replace(asked, text="", input_ids=(), media=(), digest=b""),
            reply,
            words,
            self._decode(output[:-1] if end else output),
            replace(response, input_ids=()),
            key,
            path,
            asked.text if asked.parent is None else "",
        )
        if asked.parent is not None:
            asked.parent.children.append(node)
        self._ends.setdefault(path, []).append(node)
        self.nodes.append(node)
        return node

    def _attached(self, node: Node, tail: tuple[Message, ...], tools: Tools, end: bytes, number: int) -> Asked | None:
        """The request as a continuation of a turn; None if it cannot be one."""
        if node.response.stop_reason != StopReason.STOP:
            return None  # the template ends a reply that the model did not
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
        return Asked(
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
        """Finds what the template writes behind a reply's tokens when ``tail`` follows; None if it changed the path.

        The model's own last token, if it ended the turn, is not written again.
        """
        if not node.asked.prompt.begins(full):
            return None
        start, end = node.asked.prompt.length, self._end_token(node.response)
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
        """Says whether what the template writes for a reply says what the model said."""
        if written.strip() == node.said.strip():
            return True
        ids = self._encode(written).ids
        read = self.reader.read(ids, tools, prompt=prompt, stop_reason=StopReason.STOP).shown().message()
        return meaning(read) == meaning(node.reply) and thought(read) == thought(node.reply)

    # ------------------------------------------------------------------ harvesting

    def left(self) -> list[Node]:
        """The turns whose reply nobody took, and that nobody continued."""
        return [node for node in self.nodes if not node.taken and not node.children]

    def task(self, nodes: Sequence[Node]) -> set[Node]:
        """The roots that belong to the task, among those of ``nodes``; the others are side calls.

        A side call was asked for before the first reply of the session had come, and nothing depends on it: it is not the
        root of the first turn, shares no first message with a root of the task and repeats no reply of it, and no later turn
        of the task has a reply of it in its messages. So what an agent asks for once it has begun is the task, whatever it
        is about: a critic, a summary, or the answer in a context of its own.

        The first turn is in a root with tools, if there is one, that was asked for before any reply was there: of several of
        them in the one with the most turns and the longest prompt. So a title that an agent asks for beside the task is not.
        """
        trees: dict[Node, list[Node]] = {}
        for node in nodes:
            trees.setdefault(node.root, []).append(node)
        if not trees:
            return set()
        first = max(trees, key=lambda r: (bool(r.asked.tools), r.asked.opening, len(trees[r]), len(r.asked.context), -r.key))
        ours = {first} | {root for root in trees if not root.asked.opening}
        others = set(trees) - ours
        while True:
            begin = {meaning(root.asked.tail[0]) for root in ours}
            replies = {meaning(node.reply) for root in ours for node in trees[root]}
            more = {
                root
                for root in others
                if meaning(root.asked.tail[0]) in begin
                or any(m["role"] == "assistant" and meaning(m) in replies for m in root.asked.tail)
                or any(_is_used(node, trees[other]) for node in trees[root] for other in ours)
            }
            if not more:
                return ours
            ours, others = ours | more, others - more

    def leaves(self, nodes: Sequence[Node]) -> list[Node]:
        """The last turn of each path through these turns.

        Their order is a function of what was said; the path of the turn that was asked for last comes last.
        """
        inside = set(nodes)
        last = max(nodes, key=lambda node: node.asked.number, default=None)
        leaves = [node for node in nodes if not inside.intersection(node.children)]
        return sorted(leaves, key=lambda node: (last in node.line(), node.key))

    def trajectories(self, nodes: Sequence[Node]) -> Iterator[Tokens]:
        """The paths from root to leaf through these turns, in the order of `leaves`. A turn that several share is trained in
        the first alone."""
        done: set[Node] = set()
        for leaf in self.leaves(nodes):
            tokens: Tokens | None = None
            for node in leaf.line():
                if tokens is None:
                    tokens = Tokens(node.asked.context, node.asked.context_media)
                else:
                    tokens.add_context(node.asked.context, node.asked.context_media)
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
            if tokens > 1.25 * self._context:  # a cut changes few tokens
                raise TooLong(
                    f"the first {first} of {len(text)} characters have {tokens} tokens, and the context {self._context}"
                )
        return encode(self._tokenizer, text, media)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _end_token(self, response: LLMResponse) -> str:
        """The text of the special token with which the model ended its turn; empty if it did not."""
        last = response.output_ids[-1] if response.output_ids else None
        if response.stop_reason != StopReason.STOP or last not in self._special:
            return ""
        return self._decode([last])


def _thinks_alike(node: Node, messages: Sequence[Message]) -> bool:
    """Says whether the thinking that the client repeats is that of the path."""
    return all(thought(sent) in ("", thought(message)) for message, sent in zip(node.messages(), messages, strict=False))


def _is_used(node: Node, turns: Sequence[Node]) -> bool:
    """Says whether one of these turns, asked for later, has the words of a reply in its messages."""
    words = str(node.reply.get("content") or "").strip()
    later = (message for turn in turns if turn.asked.number > node.asked.number for message in turn.asked.tail)
    return len(words) >= USED and any(words in str(message.get("content") or "") for message in later)


def _tokens(node: Node) -> MediaTokens:
    """All tokens up to the end of a reply."""
    tokens = MediaTokens([], [])
    for ancestor in node.line():
        context, output = ancestor.asked.context, ancestor.response.output_ids
        tokens.ids.extend((*context, *output))
        tokens.media.extend((*(ancestor.asked.context_media or (0,) * len(context)), *(0,) * len(output)))
    return tokens


def _digest(ids: Sequence[int], media: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", prompt_key(ids, media)).tobytes(), digest_size=16).digest()
