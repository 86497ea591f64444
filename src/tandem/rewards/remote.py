"""Rewards that another server computes, over HTTP: ``remote(url=http://judge:8001)``, and the client with which they ask it.

A request is repeated until the server answers or a time limit has passed.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from tandem.api.failures import DataFailure, RewardFailure, ServerFailed, described
from tandem.api.media import kinds_of, media_of
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.protocol.access import ServerLimits
from tandem.protocol.client import HttpClient
from tandem.protocol.reward_layouts import LAYOUTS, NotJudged, Question, RequestShape, Verdict, plain_text

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""First and longest pause between two tries of a request, in seconds; each pause is twice the previous one."""

_TRY_AGAIN = (408, 429)
"""HTTP statuses from 400 to 499 after which the same request may succeed later."""


class RetryingClient:
    """A client of one server. It repeats a failed request until the server answers or the patience (a time limit) ends.

    If the patience of a request ends, and no other request was answered meanwhile, the server counts as dead: until it
    answers again, each request is tried only once. So a dead server costs a run the patience once, and not in each batch.
    """

    def __init__(self, url: str, token: str | None, path: str, *, request_timeout_s: float, patience_s: float):
        """``path``: see `client_and_path`. ``request_timeout_s``: time limit of one try, in seconds. ``patience_s``: time
        limit of a request with all its tries, in seconds."""
        self._client, self._path = client_and_path(url, token, path)
        self._request_timeout_s, self._patience_s = request_timeout_s, patience_s
        self._answered = -math.inf
        self.is_silent = False

    def until(self) -> float:
        """Returns the monotonic time at which the patience ends for a request that starts now."""
        return time.monotonic() + self._patience_s

    async def ask(
        self,
        body: dict[str, Any],
        read: Callable[[Any], T],
        *,
        until: float | None = None,
        once: bool = False,
        beside: str | None = None,
    ) -> T:
        """Sends ``body`` and returns ``read(answer)``; ``read`` raises `ValueError` for an answer of the wrong form.

        A failed request is repeated, with growing pauses, until the monotonic time ``until``; with ``once`` it is not
        repeated. ``beside``: replaces the last segment of the route, such as ``/media`` to reach a neighbouring route.

        Raises:
            RewardFailure: ``reward_server_failed``: no answer of the right form in time; ``reward_refused``: the server
                rejects the request.
        """
        began, pause_s, tries = time.monotonic(), 0.0, 0
        until = self.until() if until is None else until
        path = self._path if beside is None else self._path.rpartition("/")[0] + beside
        while True:
            tries += 1
            try:
                answer = await self._try(path, body, read, until)
                self._answered, self.is_silent = time.monotonic(), False
                return answer
            except DataFailure as failure:
                raise RewardFailure("reward_refused", str(failure)) from failure
            except ServerFailed as error:
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                final = error.status is not None and 400 <= error.status < 500 and error.status not in _TRY_AGAIN
                late = time.monotonic() + pause_s >= until
                if final or late or once or self.is_silent:
                    words = self._words(error, tries, began)
                    self.is_silent |= late and self._answered < began
                    raise RewardFailure("reward_server_failed", words) from error
                await asyncio.sleep(pause_s)

    async def _try(self, path: str, body: dict[str, Any], read: Callable[[Any], T], until: float) -> T:
        left_s = max(until - time.monotonic(), 1e-3)
        answer = await self._client.post(path, body, deadline_s=min(self._request_timeout_s, left_s))
        try:
            return read(answer)
        except ValueError as error:
            raise ServerFailed(f"{self._client.base_url}{path}: its answer cannot be read: {error}") from error

    def _words(self, error: ServerFailed, tries: int, began: float) -> str:
        after = f"after {tries} tries in {time.monotonic() - began:.0f} s" if tries > 1 else "at once"
        slow = f"; a try has reward_timeout_s={self._request_timeout_s:g}" if "no answer within" in str(error) else ""
        silent = f"; it has left a question unanswered for patience_s={self._patience_s:g}" if self.is_silent else ""
        return f"{error} (given up {after}{slow}{silent})"

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()


def client_and_path(url: str, token: str | None, path: str) -> tuple[HttpClient, str]:
    """Returns a client of the server at ``url``, and the route of requests: the URL's path, or ``path`` if the URL has none.
    If the URL's path ends with the first segment of ``path``, the other segments are appended: ``http://judge/v1`` with
    ``/v1/chat/completions`` gives ``/v1/chat/completions``."""
    route = urlsplit(url).path
    client, route = HttpClient(url.removesuffix(route) or url, token=token), route.rstrip("/")
    first = f"/{path.split('/')[1]}" if path.count("/") > 1 else path
    return client, path if not route else route + path.removeprefix(first) if route.endswith(first) else route


def token_of(name: str, token_env: str | None) -> str | None:
    """Returns the bearer token in an environment variable; None if ``token_env`` is None.

    Raises:
        ConfigError: the variable is not set. ``name``: the reward's name, for the message.
    """
    if token_env is None:
        return None
    token = os.environ.get(str(token_env))
    if not token:
        raise ConfigError(f"reward {name!r}: token_env={token_env}, and the environment has no variable {token_env}")
    return token


def finite_knobs(name: str, **knobs: Any) -> None:
    """Raises `ConfigError` if a knob is not a finite number. ``name``: the reward's name, for the message."""
    for knob, value in knobs.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"reward {name!r}: {knob} must be a finite number, got {value!r}")


def read_knob_file(name: str, knob: str, file: str) -> str:
    """Returns the text of the file that the knob ``knob`` of the reward ``name`` names.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward {name!r}: the {knob} {file} cannot be read: {error}") from error


Waiting = tuple[Question, asyncio.Future[Verdict]]

_LARGEST = ServerLimits.max_media_body_bytes - 1024  # maximum size of a medium's base64 in a body
_GATHER_S = 0.01
"""Seconds that the first question of a request waits for further questions, unless the request is full earlier."""


class RewardServer:
    """Gets verdicts from one server. Questions that arrive close together share a request; a failed request is repeated."""

    def __init__(
        self,
        server: RetryingClient,
        layout: RequestShape,
        *,
        model: str | None,
        class_label: int | None,
        batch_size: int,
    ):
        self._server, self._layout, self._model, self._class = server, layout, model, class_label
        self._batch_size = batch_size if self._layout.at_once else 1
        # by event loop: training and evaluation may use different ones, and one may end while questions wait
        self._waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Waiting]] = WeakKeyDictionary()
        self._requests: set[asyncio.Task[None]] = set()
        self._bringing: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def judge(self, question: Question) -> Verdict:
        """Returns the verdict on one completion.

        Raises:
            RewardFailure: ``reward_server_failed``: no verdict in time; ``reward_refused``: the server rejects the question.
        """
        loop = asyncio.get_running_loop()
        verdict: asyncio.Future[Verdict] = loop.create_future()
        waiting = self._waiting.setdefault(loop, [])
        waiting.append((question, verdict))
        if len(waiting) >= self._batch_size:
            self._send(loop)
        elif len(waiting) == 1:
            loop.call_later(_GATHER_S, self._send, loop)
        return await verdict

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sends all waiting questions in one request."""
        waiting = self._waiting.pop(loop, [])
        if not waiting:
            return
        task = loop.create_task(self._answer(waiting, self._server.until()))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        for _, future in waiting:
            future.add_done_callback(lambda _: task.cancel() if all(verdict.done() for _, verdict in waiting) else None)

    async def _answer(self, waiting: list[Waiting], until: float) -> None:
        """Asks the server, and passes the verdicts, or the failure, to the callers that still wait.

        A failed request with several questions is split in halves. So one bad question, or too many questions for the
        server's time limit, does not fail the others. Only single questions are retried.
        """
        waiting = [(question, future) for question, future in waiting if not future.done()]
        try:
            verdicts = await self._ask([question for question, _ in waiting], until) if waiting else []
        except Exception as error:  # the reward boundary: raised by the callers that wait for the verdicts
            dead = self._server.is_silent and getattr(error.__cause__, "status", None) is None
            if len(waiting) > 1 and time.monotonic() < until and not dead:
                middle = len(waiting) // 2
                await asyncio.gather(self._answer(waiting[:middle], until), self._answer(waiting[middle:], until))
                return
            for _, future in waiting:
                if not future.done():
                    future.set_exception(_failure(error))
            return
        for (_, future), verdict in zip(waiting, verdicts, strict=True):
            if not future.done():
                future.set_result(verdict)

    async def _ask(self, questions: Sequence[Question], until: float) -> list[Verdict]:
        if numbers := {medium.number for question in questions for medium in media_of(question.messages)}:
            # one request at a time, so that media of two requests are sent once; each ends by its own `until`
            async with self._bringing.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                await self._bring(numbers, until)
        body, several = self._layout.ask(questions, self._model), len(questions) > 1
        return await self._server.ask(
            body, lambda answer: self._layout.read(answer, len(questions), self._class), until=until, once=several
        )

    async def _bring(self, numbers: set[int], until: float) -> None:
        """Sends the server the images and sounds that it lacks. ``numbers``: the numbers of the media in the questions."""
        from tandem.media.parts import sent  # noqa: PLC0415 — imports numpy, which drawing a graph must not need

        try:
            body = {"numbers": sorted(numbers)}
            missing = await self._server.ask(body, _field("missing", list), until=until, beside="/media/missing")
        except RewardFailure as failure:
            if getattr(failure.__cause__, "status", None) != 404:
                raise
            raise RewardFailure(
                "reward_refused",
                "the server takes no images and sounds: it is of a release before this one, or its models read only text; "
                "show_media=false sends only the texts",
            ) from failure
        for number in numbers.intersection(missing):
            medium = await asyncio.to_thread(sent, number)
            if (size := len(medium["data"])) > _LARGEST:
                raise RewardFailure(
                    "media_too_large",
                    f"an {medium['kind']} of the row takes {size / 2**20:.1f} MiB as it is sent, and a reward server takes "
                    f"{_LARGEST / 2**20:.0f}: make it smaller in the data, start the server on this machine with the run's "
                    "own media store, or use show_media=false",
                )
            stored = await self._server.ask(medium, _field("number", int), until=until, beside="/media")
            if stored != number:
                raise RewardFailure(
                    "reward_refused", f"the server reads medium {number} as another; is it of another release?"
                )

    def close(self) -> None:
        """Closes all connections."""
        self._server.close()


def _field(name: str, kind: type) -> Callable[[Any], Any]:
    def read(answer: Any) -> Any:
        value = answer.get(name) if isinstance(answer, Mapping) else None
        if not isinstance(value, kind):
            raise ValueError(f"`{name}` must be of type {kind.__name__}, got {answer!r:.80}")
        return value

    return read


def _failure(error: Exception) -> RewardFailure:
    """Returns a new failure for one sample, because samples must not share an exception."""
    if isinstance(error, RewardFailure):
        return RewardFailure(error.reason, str(error))
    return RewardFailure("reward_raised", described(error))


class RemoteReward(RewardFn):
    """The score of another server.

    ``url``: the server, with the route if it differs from the layout's. ``layout``: the format of requests, `tandem` (of
    `tandem serve-reward`), `openrlhf`, `slime` or `vllm` (a classifier behind vLLM or SGLang). ``model``: the server's model
    to use. ``class_label``: number of the class whose probability is the score, if the model has several. ``token_env``: the
    environment variable with the bearer token. ``batch_size``: maximum number of completions in one request. ``patience_s``:
    time limit of a completion's score in seconds, including retries; one try has `reward_timeout_s`. The reward is (score −
    ``center``) / ``scale``. ``above``: makes the reward 1 if it exceeds this threshold, else 0. ``show_media``: show the
    server the conversation's images and sounds; else only its texts.
    """

    reads_messages = True

    def __init__(
        self,
        *,
        timeout_s: float,
        url: str,
        name: str = "remote",
        layout: str = "tandem",
        model: str | None = None,
        class_label: int | str | None = None,
        token_env: str | None = None,
        batch_size: int = 32,
        patience_s: float = 120.0,
        center: float = 0.0,
        scale: float = 1.0,
        above: float | None = None,
        show_media: bool = True,
    ):
        if layout not in LAYOUTS:
            raise ConfigError(f"reward {name!r}: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        number = class_label if isinstance(class_label, int) and not isinstance(class_label, bool) else -1
        if class_label is not None and (not LAYOUTS[layout].has_classes or number < 0):
            with_classes = ", ".join(known for known in LAYOUTS if LAYOUTS[known].has_classes)
            raise ConfigError(
                f"reward {name!r}: class_label is the number of a class, from 0 on, with layout={with_classes}; got "
                f"{class_label!r} with layout={layout}"
            )
        finite_knobs(name, patience_s=patience_s, center=center, scale=scale, **({} if above is None else {"above": above}))
        if patience_s <= 0 or scale <= 0:
            raise ConfigError(f"reward {name!r}: patience_s and scale must be above 0, got {patience_s} and {scale}")
        self.name, self.center, self.scale, self.above = name, center, scale, above
        self._show_media, self._layout = show_media, layout
        form, token = LAYOUTS[layout], token_of(name, token_env)
        client = RetryingClient(str(url), token, form.path, request_timeout_s=timeout_s, patience_s=patience_s)
        label = None if class_label is None else number
        self._server = RewardServer(client, form, model=model, class_label=label, batch_size=batch_size)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks a row before training. Raises `ConfigError` for a row with images or sounds that the layout does not
        support."""
        self._check_media(row.get("messages") or ())

    def _check_media(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if self._show_media and not LAYOUTS[self._layout].shows_media:
            kinds = {kind for message in messages for kind in kinds_of(message.get("content"))}
            if kinds:
                raise ConfigError(
                    f"reward {self.name!r}: layout={self._layout} carries texts alone, and there are parts of type "
                    f"{', '.join(sorted(kinds))}; use a server of layout=tandem, model(path=FOLDER), or show_media=false, "
                    "which sends only the texts"
                )

    async def _shown(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Returns the messages in the form in which the server gets them. Raises `RewardFailure` for media that the layout
        does not support."""
        if not any(kinds_of(message.get("content")) for message in messages):
            return tuple(messages)
        if not self._show_media:
            return tuple({**message, "content": plain_text(message.get("content"))} for message in messages)
        from tandem.media.parts import read_media  # noqa: PLC0415 — imports numpy, which drawing a graph must not need

        try:
            self._check_media(messages)
        except ConfigError as error:
            raise RewardFailure("media_refused", str(error)) from error
        return tuple(await asyncio.to_thread(read_media, messages))

    async def __call__(
        self,
        *,
        prompt: str,
        completion: str,
        row: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] = (),
        **_: Any,
    ) -> RewardResult:
        """Implements `RewardFn.__call__`. If the server cannot judge a completion, fails with the server's reason."""
        answer = row.get("answer")
        question = Question(await self._shown(messages), prompt, completion, None if answer is None else str(answer))
        verdict = await self._server.judge(question)
        if isinstance(verdict, NotJudged):
            raise RewardFailure(verdict.reason, f"{self.name}: {verdict.message}")
        if not math.isfinite(verdict):
            raise RewardFailure("reward_not_finite", f"{self.name}: the server's score is {verdict}")
        score = (verdict - self.center) / self.scale
        return RewardResult(score if self.above is None else float(score > self.above))

    def close(self) -> None:
        """Closes all connections."""
        self._server.close()
