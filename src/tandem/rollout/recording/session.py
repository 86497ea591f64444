"""One sample's session with the model: its turns, whoever asks for them, and in the end its sample."""

import asyncio
import contextlib
import functools
import hashlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure
from tandem.api.requests import LLMRequest, StopReason
from tandem.api.samples import Sample
from tandem.api.workflow import GeneratesTokens
from tandem.config.generation import GenerationConfig
from tandem.protocol.dialects.wire import refused
from tandem.protocol.refusal import Refusal
from tandem.protocol.turns import CallStatus, Reply, Turn
from tandem.rollout.recording.forest import Asked, Forest, Node, Unrenderable

log = logging.getLogger(__name__)

_SHORT, _LONG = ThreadPoolExecutor(1, "recorder"), ThreadPoolExecutor(1, "long-recorder")
"""Threads that read requests, one at a time and in their order, so that the loop of the run need not wait."""

_LONG_BYTES = 1 << 16
"""A request above this is read beside the others."""


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """The bounds of one session; what passes a bound is refused by its name."""

    max_turns: int = 256
    """Most turns that are asked for."""

    max_concurrent: int = 16
    """Most requests at the same time."""

    retry_s: float = 600.0
    """A turn that ended longer ago is not given to a retry."""


@dataclass(frozen=True)
class Retry:
    """A client's words about a request that may be a repetition."""

    count: int = 0
    """Number of times that it was sent before."""

    key: str = ""
    """The idempotency key; empty without one."""


@dataclass(eq=False)
class PendingTurn:
    """One turn that was asked for, and all requests that wait for it."""

    turn: Turn
    asked: Asked
    number: int
    """Among turns with the same prompt."""

    retry_key: str
    done: "asyncio.Future[Answered]"
    listeners: int = 0
    ended: float | None = None
    taken: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def noise(self) -> int:
        """Names its noise in the session: a function of prompt and number, not of arrival."""
        name = hashlib.blake2b(self.asked.digest + self.number.to_bytes(4, "big"), digest_size=8).digest()
        return int.from_bytes(name, "big") >> 2

    @property
    def wanted(self) -> bool:
        """True if somebody has the reply, or waits for it."""
        return self.taken or self.listeners > 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which one more request waits."""
        self.listeners += 1
        try:
            yield
        finally:
            self.listeners -= 1


@dataclass(frozen=True)
class Answered:
    """A turn with its reply as the client is shown it."""

    turn: Turn
    reply: Reply
    node: Node
    response_id: str
    usage: Mapping[str, int]

    @property
    def names(self) -> dict[str, Any]:
        """The names that a dialect writes beside the reply."""
        return {"response_id": self.response_id, "usage": self.usage}


@dataclass
class Counts:
    """Counts of a session for the metrics."""

    retries: int = 0
    refused: int = 0
    """Requests that were not served."""

    overridden: Counter[str] = field(default_factory=Counter)
    without_call: int = 0
    wrong_arguments: int = 0
    """Turns that had to call a tool and called none."""


class RecordingSession:
    """Turns of one sample. Lives on one event loop; `close` ends it, and whoever still waits is told so."""

    def __init__(
        self,
        forest: Forest,
        engine: GeneratesTokens,
        gconfig: GenerationConfig,
        *,
        limits: SessionLimits | None = None,
        side_calls: Literal["skip", "train"] = "skip",
    ):
        self.key = f"sk-{secrets.token_hex(24)}"
        self.forest, self.counts = forest, Counts()
        self.reward: dict[str, Any] | None = None
        self.failure: EpisodeFailure | None = None
        """Why the last turn failed in the engine, which the agent saw as a refusal; None after one that went well."""

        self.outdone = False
        """True if the reward found a reply that is left out better than the one that it judges."""

        self.refused: Refusal | None = None
        """The last refusal of a request."""

        self.asked = False
        """True if a turn was asked for."""

        self.base_url, self.keyed_url = "", ""
        self._engine, self._gconfig = engine, gconfig
        self._limits, self._side_calls = limits or SessionLimits(), side_calls
        self._attempts: dict[tuple[Any, ...], list[PendingTurn]] = {}
        self._numbers: dict[bytes, set[int]] = {}
        self._started = self._reading = 0
        self._closed = False

    # ------------------------------------------------------------------ turns

    async def read(
        self, function: Callable[[Mapping[str, Any], bool], Turn], body: Mapping[str, Any], size: int
    ) -> tuple[Turn, Asked]:
        """The turn that a body of ``size`` bytes asks for, and its tokens; made beside the loop.

        Raises:
            Refusal: too many are read already, the template refuses the messages, an image or sound cannot be read, they are
                too long, or the session is over.
        """
        self._check_open()
        self._check_running(self._reading)
        arrival = self.forest.arrival()  # now, however long others are read before it

        def ask() -> tuple[Turn, Asked]:
            turn = function(body, self.forest.takes_media)
            if turn.answer_format is not None:
                raise refused(turn.answer_format.where, "a training run samples what the policy itself would write")
            return turn, self.forest.ask(turn.messages, turn.tools, arrival)

        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(_LONG if size > _LONG_BYTES else _SHORT, ask)
        except Unrenderable as error:
            raise Refusal(400, str(error), code=error.code, param="messages") from error
        except DataFailure as error:
            raise Refusal(400, str(error), code=error.reason, param="messages") from error
        finally:
            self._reading -= 1

    def begin(self, turn: Turn, asked: Asked, retry: Retry) -> PendingTurn:
        """The turn that a request asks for: a new one, or the one that it repeats.

        A request repeats another if both have the same prompt and the client says so, or nobody waits any more for the
        other and nobody has its reply.

        Raises:
            Refusal: a bound is passed, or the session is over.
        """
        self._check_open()
        self.asked = True
        same = (asked.digest, turn.stops, turn.max_tokens, turn.tool_choice)
        attempt = self._repeated(same, retry)
        if attempt is not None:
            self.counts.retries += 1
            return attempt
        self._check_bounds()
        self.counts.overridden.update(turn.overridden)
        if turn.max_tokens is not None and turn.max_tokens > self._gconfig.max_new_tokens:
            self.counts.overridden["max_tokens"] += 1
        self._started += 1
        attempt = PendingTurn(turn, asked, self._take_number(asked), retry.key, asyncio.get_running_loop().create_future())
        attempt.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, if nobody waits
        self._attempts.setdefault(same, []).append(attempt)
        attempt.task = asyncio.create_task(self._run(attempt, same))
        return attempt

    def took(self, attempt: PendingTurn) -> None:
        """A client read the reply."""
        attempt.taken = True
        attempt.done.result().node.taken = True

    def set_reward(self, given: Mapping[str, Any]) -> None:
        """The agent's own judgement; the last one counts.

        Raises:
            Refusal: the session is over.
        """
        self._check_open()
        self.reward = dict(given)

    def refuse(self, refusal: Refusal) -> None:
        """A request of this session was not served."""
        if not self._closed:
            self.refused = refusal
            self.counts.refused += 1

    async def close(self) -> None:
        """No turn is taken any more; those under way are cancelled."""
        self._closed = True
        over = Refusal(410, "this session is over", code="session_ended")
        tasks = []
        for attempts in self._attempts.values():
            for attempt in attempts:
                if not attempt.done.done():
                    attempt.done.set_exception(over)
                if attempt.task is not None and not attempt.task.done():
                    attempt.task.cancel()
                    tasks.append(attempt.task)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed:
            raise Refusal(410, "this session is over", code="session_ended")

    def _check_bounds(self) -> None:
        if self._started >= self._limits.max_turns:
            raise Refusal(403, f"this session has had its {self._limits.max_turns} turns (max_turns)", code="max_turns")
        self._check_running(sum(not attempt.done.done() for attempts in self._attempts.values() for attempt in attempts))

    def _check_running(self, running: int) -> None:
        if running >= self._limits.max_concurrent:
            message = f"{running} turns of this session are under way, of at most {self._limits.max_concurrent}"
            raise Refusal(429, message, code="max_concurrent", headers={"Retry-After": "1"})

    def _repeated(self, same: tuple[Any, ...], retry: Retry) -> PendingTurn | None:
        """The turn that a request with this prompt repeats."""
        now = time.monotonic()
        there = [a for a in self._attempts.get(same, ()) if a.ended is None or now - a.ended < self._limits.retry_s]
        keyed = [a for a in there if retry.key and a.retry_key == retry.key]
        left = [a for a in there if not a.wanted]
        declared = [a for a in there if retry.count > 0 and not (a.ended is not None and a.done.result().node.children)]
        return next(iter([*keyed, *left, *declared[::-1]]), None)

    def _take_number(self, asked: Asked) -> int:
        used = self._numbers.setdefault(asked.digest, set())
        number = next(i for i in range(len(used) + 1) if i not in used)
        used.add(number)
        return number

    async def _run(self, attempt: PendingTurn, same: tuple[Any, ...]) -> None:
        """Has the turn sampled; whoever waits for it gets the reply, or the reason why there is none."""
        try:
            answered = await self._sampled(attempt)
            attempt.ended, self.failure = time.monotonic(), None
            # the node knows its tokens by those before it
            attempt.asked = replace(attempt.asked, text="", input_ids=(), media=())
            if not attempt.done.done():
                attempt.done.set_result(answered)
        except Exception as error:  # the request boundary: whoever waits raises it, and a retry samples anew
            self._attempts[same].remove(attempt)
            self._numbers[attempt.asked.digest].discard(attempt.number)
            if isinstance(error, EpisodeFailure):
                self.failure = error
            if not attempt.done.done():
                attempt.done.set_exception(_refusal(error))

    async def _sampled(self, attempt: PendingTurn) -> Answered:
        turn, asked, gconfig = attempt.turn, attempt.asked, self._gconfig
        limit = gconfig.max_new_tokens if turn.max_tokens is None else min(turn.max_tokens, gconfig.max_new_tokens)
        stops = tuple(dict.fromkeys((*gconfig.stop, *turn.stops)))
        base = getattr(self._engine, "noise_key", None)
        key = None if base is None else base._replace(trajectory=attempt.noise)
        gconfig = replace(gconfig, max_new_tokens=limit, stop=stops)
        request = LLMRequest(asked.input_ids, gconfig, noise_key=key, media=asked.media)
        response = await self._engine.agenerate(request)
        if response.stop_reason == StopReason.CANCELLED:
            raise DataFailure("cancelled", "the request was cancelled, so the reply is not what the policy would have said")
        tools = () if turn.tool_choice == "none" else turn.tools
        reader = self.forest.reader
        reply = reader.read(response.output_ids, tools, prompt=asked.text, stop_reason=response.stop_reason)
        self.counts.wrong_arguments += sum(call.status == CallStatus.WRONG_ARGUMENTS for call in reply.calls)
        reply = reply.shown(stops if response.stop_reason == StopReason.STOP else ())
        if turn.tool_choice == "required" and not reply.calls:
            self.counts.without_call += 1
        node = self.forest.add(asked, response, reply.shown().message(), attempt.noise)
        usage = {"prompt_tokens": len(asked.input_ids), "completion_tokens": len(response.output_ids)}
        return Answered(turn, reply, node, f"{attempt.noise:016x}", usage)

    # ------------------------------------------------------------------ the sample

    @property
    def nodes(self) -> list[Node]:
        """The turns that are trained: whose reply somebody took or continued, side calls only if they are wanted."""
        left = set(self.forest.left())
        nodes = [node for node in self.forest.nodes if node not in left]
        ours = self.forest.task(nodes)
        return [node for node in nodes if self._side_calls == "train" or node.root in ours]

    @property
    def last(self) -> Node:
        """The turn of the task that was asked for last.

        Raises:
            DataFailure: ``agent_never_called``, ``agent_refused`` or ``agent_exited_early``.
        """
        nodes = self.nodes
        if nodes:
            return max(nodes, key=lambda node: node.asked.number)
        if self.failure is not None:
            raise self.failure
        if not self.asked and self.refused is None:
            raise DataFailure(
                "agent_never_called",
                "the agent ended without asking for a turn; if it did ask in earlier steps, turn off the cache of its own "
                "that answers equal prompts",
            )
        if self.refused is not None and not self.forest.nodes:
            raise DataFailure("agent_refused", f"no request of the agent could be served; the last: {self.refused.message}")
        raise DataFailure("agent_exited_early", "the agent ended before it had taken a reply")

    @property
    def ended_by_cut(self) -> bool:
        """True if the reply that was taken last was cut at its length."""
        taken = [node for node in self.forest.nodes if node.taken]
        last = max(taken, key=lambda node: node.asked.number, default=None)
        return last is not None and last.response.stop_reason == StopReason.LENGTH

    def failed(self, reason: str, words: str) -> DataFailure:
        """The drop of this episode, whose agent raised an error; with the likely cause if its last reply had been cut."""
        if not self.ended_by_cut:
            return DataFailure(reason, words)
        return DataFailure(
            f"{reason}_on_cut_reply",
            f"{words}; its last reply had been cut at its length. If that is why, only samples with short replies are left, "
            "and training is biased: raise gconfig.max_new_tokens, or let it take them",
        )

    @property
    def left_out(self) -> list[Node]:
        """The side calls that are not trained."""
        gone = {*self.nodes, *self.forest.left()}
        return [node for node in self.forest.nodes if node not in gone]

    def metrics(self) -> dict[str, float]:
        """The recorded turns as metrics of the sample."""
        nodes, left_out = self.nodes, self.left_out
        numbers = [max((node.asked.number for node in some), default=0) for some in (nodes, left_out)]
        left = {"last": numbers[1] > numbers[0], "best": self.outdone}
        for which in (name for name, yes in left.items() if yes):
            _tell(
                f"the {which} call of an episode is a side call, which is neither trained nor judged (metric "
                f"rollout/recorded/{which}_left_out counts them): if it belongs to the task, set "
                "workflow_args.side_calls=train"
            )
        values = {
            "turns": len(nodes),
            "roots": len({node.root for node in nodes}),
            "trajectories": sum(1 for node in nodes if not set(nodes).intersection(node.children)),
            "retries": self.counts.retries,
            "orphans": len(self.forest.left()),
            "side_calls": len(left_out),
            "last_left_out": left["last"],
            "best_left_out": left["best"],
            "cut": sum(node.response.stop_reason == StopReason.LENGTH for node in nodes),
            "refused": self.counts.refused,
            "overridden": self.counts.overridden.total(),
            "without_call": self.counts.without_call,
            "wrong_arguments": self.counts.wrong_arguments,
        }
        return {f"rollout/recorded/{name}": float(value) for name, value in values.items()}

    def sample(self, reward: float, *, metrics: Mapping[str, float] | None = None, **details: Any) -> Sample:
        """The finished sample, with every trajectory that has trained tokens. ``details``: other fields of `Sample`.

        Raises:
            DataFailure: see `last`.
        """
        last, nodes = self.last, self.nodes
        every = list(zip(self.forest.leaves(nodes), self.forest.trajectories(nodes), strict=True))
        spoken = [(leaf, tokens) for leaf, tokens in every if any(tokens.mask)] or every[-1:]
        messages = tuple(last.messages())
        return Sample(
            trajectories=tuple(tokens.trajectory() for _, tokens in spoken),
            reward=float(reward),
            prompt_text=last.root.prompt_text,
            completion_text=last.words,
            messages=messages,
            conversations=tuple(tuple(leaf.messages()) for leaf, _ in spoken) if len(spoken) > 1 else (),
            metrics=self.metrics() | dict(metrics or {}),
            timings=tuple(node.response.timing for node in nodes if node.response.timing is not None),
            **details,
        )


@functools.cache
def _tell(text: str) -> None:
    """Warns once a process."""
    log.warning("%s", text)


def _refusal(error: Exception) -> BaseException:
    """The answer to a request that failed."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, EngineDied):
        return Refusal(503, "the engine is gone", code="engine_died")
    if isinstance(error, DataFailure) and error.reason == "prompt_too_long":
        return Refusal(400, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, DataFailure):
        return Refusal(400, str(error), code=error.reason)
    if isinstance(error, EpisodeFailure):
        return Refusal(503, str(error), code=error.reason)
    return error
