"""One sample's session with the model: runs the turns that clients request, and makes the sample from them.

A *verdict* is a reward that an agent returns or posts for its own work: a number, or a mapping with ``reward`` and other
fields of a sample.
"""

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
from numbers import Real
from typing import Any, Literal

from tandem.api.failures import DataFailure, EngineDied, EpisodeFailure
from tandem.api.requests import LLMRequest, StopReason
from tandem.api.workflow import GeneratesTokens, Sample
from tandem.config.rollout import GenerationConfig
from tandem.protocol.bodies import Refusal
from tandem.protocol.dialects.wire import refused
from tandem.protocol.turns import CallStatus, Reply, Turn
from tandem.rollout.episode_engine import generated
from tandem.rollout.forest import Forest, Node, TokenisedRequest, Unrenderable

log = logging.getLogger(__name__)

_SHORT, _LONG = ThreadPoolExecutor(1, "recorder"), ThreadPoolExecutor(1, "long-recorder")
"""Threads that parse requests, one at a time and in order, so that the run's event loop need not wait."""

_LONG_BYTES = 1 << 16
"""A request longer than this is parsed in the second thread, so that short ones need not wait."""


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of one session. A request over a limit is refused with a message that names the limit."""

    max_turns: int = 256
    """Maximum number of turns."""

    max_concurrent: int = 16
    """Maximum number of concurrent requests."""

    retry_s: float = 600.0
    """A turn that ended longer ago than this, in seconds, is not reused for a retry."""


@dataclass(frozen=True)
class Retry:
    """A client's headers about a request that may be a repetition."""

    count: int = 0
    """Number of times that the request was sent before."""

    key: str = ""
    """The idempotency key; empty if there is none."""


@dataclass(eq=False)
class PendingTurn:
    """One requested turn, and the requests that wait for its reply."""

    turn: Turn
    request: TokenisedRequest
    number: int
    """Number of the turn among those with the same prompt."""

    retry_key: str
    done: "asyncio.Future[Answered]"
    listeners: int = 0
    ended: float | None = None
    taken: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def noise(self) -> int:
        """Key of the sampling noise of this turn: a hash of its prompt and its number, not of its order of arrival."""
        name = hashlib.blake2b(self.request.digest + self.number.to_bytes(4, "big"), digest_size=8).digest()
        return int.from_bytes(name, "big") >> 2

    @property
    def wanted(self) -> bool:
        """True if a client has received the reply or waits for it."""
        return self.taken or self.listeners > 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Context manager in which one more request waits for the reply."""
        self.listeners += 1
        try:
            yield
        finally:
            self.listeners -= 1


@dataclass(frozen=True)
class Answered:
    """A turn with its reply as the client sees it."""

    turn: Turn
    reply: Reply
    node: Node
    response_id: str
    usage: Mapping[str, int]

    @property
    def names(self) -> dict[str, Any]:
        """The arguments that a dialect needs in addition to the reply."""
        return {"response_id": self.response_id, "usage": self.usage}


@dataclass
class Counts:
    """Counts of a session, for the metrics."""

    retries: int = 0
    refused: int = 0
    """Number of requests that were not served."""

    overridden: Counter[str] = field(default_factory=Counter)
    without_call: int = 0
    """Number of turns that had to call a tool and called none."""

    wrong_arguments: int = 0
    """Number of tool calls with wrong arguments."""


def session_ended() -> Refusal:
    """Returns the refusal of a request to a session that has ended."""
    return Refusal(410, "this session is over", code="session_ended")


class RecordingSession:
    """The turns of one sample. Runs on one event loop; `close` ends the session and refuses waiting requests."""

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
        """The engine's failure in the last turn, which the agent saw as a refusal; None after a success."""

        self.outdone = False
        """True if a side call that is left out got a higher reward than the judged reply."""

        self.refused: Refusal | None = None
        """The last refusal of a request."""

        self.has_requests = False
        """True if a turn was requested."""

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
    ) -> tuple[Turn, TokenisedRequest]:
        """Parses a body of ``size`` bytes, in a thread. Returns the turn that it requests, and the turn's tokens.

        Raises:
            Refusal: too many requests are being parsed, the template rejects the messages, an image or sound cannot be read,
                the messages are too long, or the session has ended.
        """
        self._check_open()
        self._check_running(self._reading)
        arrival = self.forest.arrival()  # taken now, because parsing may have to wait for others

        def ask() -> tuple[Turn, TokenisedRequest]:
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

    def begin(self, turn: Turn, prompt: TokenisedRequest, retry: Retry) -> PendingTurn:
        """Returns the turn that a request asks for: a new one, or the one that the request repeats.

        A request repeats another if both have the same prompt, and either the client says so, or the reply to the other
        request was not received and no client waits for it.

        Raises:
            Refusal: a limit is exceeded, or the session has ended.
        """
        self._check_open()
        self.has_requests = True
        same = (prompt.digest, turn.stops, turn.max_tokens, turn.tool_choice)
        attempt = self._repeated(same, retry)
        if attempt is not None:
            self.counts.retries += 1
            return attempt
        self._check_bounds()
        self.counts.overridden.update(turn.overridden)
        if turn.max_tokens is not None and turn.max_tokens > self._gconfig.max_new_tokens:
            self.counts.overridden["max_tokens"] += 1
        self._started += 1
        attempt = PendingTurn(turn, prompt, self._take_number(prompt), retry.key, asyncio.get_running_loop().create_future())
        # retrieves the error, in case no client waits
        attempt.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._attempts.setdefault(same, []).append(attempt)
        attempt.task = asyncio.create_task(self._run(attempt, same))
        return attempt

    def took(self, attempt: PendingTurn) -> None:
        """Marks the reply as received by a client."""
        attempt.taken = True
        attempt.done.result().node.taken = True

    def set_reward(self, verdict: Mapping[str, Any]) -> None:
        """Sets the agent's own verdict; the last one counts.

        Raises:
            Refusal: the session has ended.
        """
        self._check_open()
        self.reward = dict(verdict)

    def refuse(self, refusal: Refusal) -> None:
        """Records that a request of this session was refused."""
        if not self._closed:
            self.refused = refusal
            self.counts.refused += 1

    async def close(self) -> None:
        """Ends the session: refuses further turns and cancels running ones."""
        self._closed = True
        over = session_ended()
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
            raise session_ended()

    def _check_bounds(self) -> None:
        if self._started >= self._limits.max_turns:
            raise Refusal(403, f"this session has had its {self._limits.max_turns} turns (max_turns)", code="max_turns")
        self._check_running(sum(not attempt.done.done() for attempts in self._attempts.values() for attempt in attempts))

    def _check_running(self, running: int) -> None:
        if running >= self._limits.max_concurrent:
            message = f"{running} turns of this session are under way, of at most {self._limits.max_concurrent}"
            raise Refusal(429, message, code="max_concurrent", headers={"Retry-After": "1"})

    def _repeated(self, same: tuple[Any, ...], retry: Retry) -> PendingTurn | None:
        """Returns the turn that a request with this prompt repeats; None if it is a new turn."""
        now = time.monotonic()
        candidates = [a for a in self._attempts.get(same, ()) if a.ended is None or now - a.ended < self._limits.retry_s]
        keyed = [a for a in candidates if retry.key and a.retry_key == retry.key]
        unwanted = [a for a in candidates if not a.wanted]
        declared = [a for a in candidates if retry.count > 0 and not (a.ended is not None and a.done.result().node.children)]
        return next(iter([*keyed, *unwanted, *declared[::-1]]), None)

    def _take_number(self, prompt: TokenisedRequest) -> int:
        used = self._numbers.setdefault(prompt.digest, set())
        number = next(i for i in range(len(used) + 1) if i not in used)
        used.add(number)
        return number

    async def _run(self, attempt: PendingTurn, same: tuple[Any, ...]) -> None:
        """Runs a turn. All requests that wait for the turn get its reply or its error."""
        try:
            answered = await self._sampled(attempt)
            attempt.ended, self.failure = time.monotonic(), None
            # the node's tokens are known from its path
            attempt.request = replace(attempt.request, text="", input_ids=(), media=())
            if not attempt.done.done():
                attempt.done.set_result(answered)
        except Exception as error:  # the request boundary: the waiting requests raise it, and a retry samples again
            self._attempts[same].remove(attempt)
            self._numbers[attempt.request.digest].discard(attempt.number)
            if isinstance(error, EpisodeFailure):
                self.failure = error
            if not attempt.done.done():
                attempt.done.set_exception(_refusal(error))

    async def _sampled(self, attempt: PendingTurn) -> Answered:
        turn, prompt, gconfig = attempt.turn, attempt.request, self._gconfig
        limit = gconfig.max_new_tokens if turn.max_tokens is None else min(turn.max_tokens, gconfig.max_new_tokens)
        stops = tuple(dict.fromkeys((*gconfig.stop, *turn.stops)))
        base = getattr(self._engine, "noise_key", None)
        key = None if base is None else base._replace(trajectory=attempt.noise)
        gconfig = replace(gconfig, max_new_tokens=limit, stop=stops)
        request = LLMRequest(prompt.input_ids, gconfig, noise_key=key, media=prompt.media)
        response = await generated(self._engine, request)
        tools = () if turn.tool_choice == "none" else turn.tools
        reader = self.forest.reader
        reply = reader.read(response.output_ids, tools, prompt=prompt.text, stop_reason=response.stop_reason)
        self.counts.wrong_arguments += sum(call.status == CallStatus.WRONG_ARGUMENTS for call in reply.calls)
        reply = reply.shown(stops if response.stop_reason == StopReason.STOP else ())
        if turn.tool_choice == "required" and not reply.calls:
            self.counts.without_call += 1
        node = self.forest.add(prompt, response, reply.shown().message(), attempt.noise)
        usage = {"prompt_tokens": len(prompt.input_ids), "completion_tokens": len(response.output_ids)}
        return Answered(turn, reply, node, f"{attempt.noise:016x}", usage)

    # ------------------------------------------------------------------ the sample

    @property
    def nodes(self) -> list[Node]:
        """The turns that are trained on: a client has received the reply or continued it. Side calls are left out, unless
        ``side_calls`` is ``train``."""
        unread = set(self.forest.left())
        nodes = [node for node in self.forest.nodes if node not in unread]
        task = self.forest.task(nodes)
        return [node for node in nodes if self._side_calls == "train" or node.root in task]

    @property
    def last(self) -> Node:
        """The last turn of the task, in order of requests.

        Raises:
            DataFailure: ``agent_never_called``, ``agent_refused`` or ``agent_exited_early``.
        """
        nodes = self.nodes
        if nodes:
            return max(nodes, key=lambda node: node.request.number)
        if self.failure is not None:
            raise self.failure
        if not self.has_requests and self.refused is None:
            raise DataFailure(
                "agent_never_called",
                "the agent ended without requesting a turn; if it did request some in earlier steps, turn off its own cache "
                "that answers equal prompts",
            )
        if self.refused is not None and not self.forest.nodes:
            raise DataFailure("agent_refused", f"no request of the agent could be served; the last: {self.refused.message}")
        raise DataFailure("agent_exited_early", "the agent ended before it had received a reply")

    @property
    def ended_by_cut(self) -> bool:
        """True if the last received reply was cut off at its maximum length."""
        taken = [node for node in self.forest.nodes if node.taken]
        last = max(taken, key=lambda node: node.request.number, default=None)
        return last is not None and last.response.stop_reason == StopReason.LENGTH

    def failed(self, reason: str, words: str) -> DataFailure:
        """Returns the failure of an episode whose agent raised an error, with the likely cause if its last reply was cut
        off."""
        if not self.ended_by_cut:
            return DataFailure(reason, words)
        return DataFailure(
            f"{reason}_on_cut_reply",
            f"{words}; its last reply had been cut at its length. If this is the cause, only samples with short "
            "replies are kept, and training is biased: raise gconfig.max_new_tokens, or let the agent accept cut replies",
        )

    @property
    def left_out(self) -> list[Node]:
        """The side calls that are not trained on."""
        excluded = {*self.nodes, *self.forest.left()}
        return [node for node in self.forest.nodes if node not in excluded]

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the recorded turns, for the sample."""
        nodes, left_out = self.nodes, self.left_out
        numbers = [max((node.request.number for node in turns), default=0) for turns in (nodes, left_out)]
        flags = {"last": numbers[1] > numbers[0], "best": self.outdone}
        for which in (name for name, flag in flags.items() if flag):
            _warn_once(
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
            "last_left_out": flags["last"],
            "best_left_out": flags["best"],
            "cut": sum(node.response.stop_reason == StopReason.LENGTH for node in nodes),
            "refused": self.counts.refused,
            "overridden": self.counts.overridden.total(),
            "without_call": self.counts.without_call,
            "wrong_arguments": self.counts.wrong_arguments,
        }
        return {f"rollout/recorded/{name}": float(value) for name, value in values.items()}

    def sample(self, reward: float, *, metrics: Mapping[str, float] | None = None, **details: Any) -> Sample:
        """Returns the finished sample with every trajectory that has trained tokens. ``details``: other fields of `Sample`.

        Raises:
            DataFailure: see `last`.
        """
        last, nodes = self.last, self.nodes
        paths = list(zip(self.forest.leaves(nodes), self.forest.trajectories(nodes), strict=True))
        trained = [(leaf, tokens) for leaf, tokens in paths if any(tokens.mask)] or paths[-1:]
        messages = tuple(last.messages())
        return Sample(
            trajectories=tuple(tokens.trajectory() for _, tokens in trained),
            reward=float(reward),
            prompt_text=last.root.prompt_text,
            completion_text=last.words,
            messages=messages,
            conversations=tuple(tuple(leaf.messages()) for leaf, _ in trained) if len(trained) > 1 else (),
            metrics=self.metrics() | dict(metrics or {}),
            timings=tuple(node.response.timing for node in nodes if node.response.timing is not None),
            **details,
        )


@functools.cache
def _warn_once(text: str) -> None:
    """Logs each warning once a process."""
    log.warning("%s", text)


def _refusal(error: Exception) -> BaseException:
    """Returns the refusal for a request that failed with this error."""
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


NUMBERS = ("reward", "accuracy")
MAPPINGS = ("rewards", "metrics")


def read_verdict(verdict: Any) -> dict[str, Any] | None:
    """Checks a verdict and returns it as arguments of `RecordingSession.sample`; None for no verdict.

    Raises:
        ValueError: the verdict has another form; the message says which.
    """
    if verdict is None:
        return None
    if _is_number(verdict):
        return {"reward": float(verdict), "own_reward": True}
    if not isinstance(verdict, Mapping):
        raise ValueError(f"got a {type(verdict).__name__}")
    unknown = set(verdict) - {*NUMBERS, *MAPPINGS}
    if unknown or "reward" not in verdict:
        names = ", ".join((*NUMBERS, *MAPPINGS))
        raise ValueError(f"a dict has 'reward', and may have {names}; got {', '.join(map(str, verdict)) or 'an empty one'}")
    for name in NUMBERS:
        if name in verdict and not _is_number(verdict[name]):
            raise ValueError(f"{name} must be a number up to 9e307, got {verdict[name]!r:.80}")
    for name in MAPPINGS:
        values = verdict.get(name, {})
        if not isinstance(values, Mapping) or not all(_is_number(value) for value in values.values()):
            raise ValueError(f"{name} must map names to numbers up to 9e307, got {values!r:.80}")
    made: dict[str, Any] = {"own_reward": True} | {name: float(verdict[name]) for name in NUMBERS if name in verdict}
    return made | {name: {str(k): float(v) for k, v in verdict[name].items()} for name in MAPPINGS if name in verdict}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not (isinstance(value, int) and abs(value) >> 1023)
