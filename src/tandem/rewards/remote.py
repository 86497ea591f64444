"""A reward that another server gives, over HTTP: ``remote(url=http://judge:8001)``."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tandem.api.failures import RewardFailure, described
from tandem.api.media import kinds_of, media_of
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.protocol.limits import ServerLimits
from tandem.protocol.rewards import LAYOUTS, NotJudged, Question, Verdict, plain_text
from tandem.rewards.asking import AskedServer, finite_knobs, token_of

Waiting = tuple[Question, asyncio.Future[Verdict]]

_GATHER_S = 0.01
_LARGEST = ServerLimits.max_media_body_bytes - 1024  # of base64 in a body
"""The first question of a request waits this long for others, unless the request is full before."""


class RewardServer:
    """Asks one server for verdicts. Questions that come close together share a request; a request that fails is repeated."""

    def __init__(
        self,
        url: str,
        *,
        layout: str,
        model: str | None,
        class_label: int | None,
        token: str | None,
        batch_size: int,
        request_timeout_s: float,
        patience_s: float,
    ):
        """``request_timeout_s``: of one request. ``patience_s``: of a question, all tries of its request together."""
        self._layout, self._model, self._class = LAYOUTS[layout], model, class_label
        self._server = AskedServer(url, token, self._layout.path, request_timeout_s=request_timeout_s, patience_s=patience_s)
        self._batch_size = batch_size if self._layout.at_once else 1
        # by event loop: training and evaluation may ask from different ones, and one may end with questions that wait
        self._waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Waiting]] = WeakKeyDictionary()
        self._requests: set[asyncio.Task[None]] = set()
        self._bringing: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def judge(self, question: Question) -> Verdict:
        """The verdict of one completion.

        Raises:
            RewardFailure: ``reward_server_failed``, when there was none in time; ``reward_refused``, when the server takes
                this question for wrong.
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
        """Asks all that wait, in one request."""
        waiting = self._waiting.pop(loop, [])
        if not waiting:
            return
        task = loop.create_task(self._answer(waiting, self._server.until()))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        for _, future in waiting:
            future.add_done_callback(lambda _: task.cancel() if all(verdict.done() for _, verdict in waiting) else None)

    async def _answer(self, waiting: list[Waiting], until: float) -> None:
        """Gives each question that somebody still waits for its verdict, or the reason why there is none.

        A request of several that fails is cut in halves: one bad question, or too many for the server's time, must not cost
        the others theirs. Only a single question is asked again and again.
        """
        waiting = [(question, future) for question, future in waiting if not future.done()]
        try:
            verdicts = await self._ask([question for question, _ in waiting], until) if waiting else []
        except Exception as error:  # the reward boundary: whoever waits for the verdict raises it
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
            # one after another, so that what two requests show is sent once; each ends by its own `until`
            async with self._bringing.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
                await self._bring(numbers, until)
        body, several = self._layout.ask(questions, self._model), len(questions) > 1
        return await self._server.ask(
            body, lambda answer: self._layout.read(answer, len(questions), self._class), until=until, once=several
        )

    async def _bring(self, numbers: set[int], until: float) -> None:
        """Sends the server those of the images and sounds that it has not."""
        from tandem.media.parts import sent  # noqa: PLC0415 — numpy, which a graph is drawn without

        try:
            asked = {"numbers": sorted(numbers)}
            missing = await self._server.ask(asked, _field("missing", list), until=until, beside="/media/missing")
        except RewardFailure as failure:
            if getattr(failure.__cause__, "status", None) != 404:
                raise
            raise RewardFailure(
                "reward_refused",
                "the server takes no images and sounds: it is of a release before this one, or its models read text alone; "
                "show_media=false sends it the texts alone",
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
        """Drops all connections."""
        self._server.close()


def _field(name: str, kind: type) -> Callable[[Any], Any]:
    def read(answer: Any) -> Any:
        found = answer.get(name) if isinstance(answer, Mapping) else None
        if not isinstance(found, kind):
            raise ValueError(f"`{name}` must be of type {kind.__name__}, got {answer!r:.80}")
        return found

    return read


def _failure(error: Exception) -> RewardFailure:
    """A failure of one sample's own."""
    if isinstance(error, RewardFailure):
        return RewardFailure(error.reason, str(error))
    return RewardFailure("reward_raised", described(error))


class RemoteReward(RewardFn):
    """The score of another server.

    ``url``: of the server, with the route if it has another than its layout's. ``layout``: the shape of requests, `tandem`
    (what `tandem serve-reward` serves), `openrlhf`, `slime` or `vllm` (a classifier behind vLLM or SGLang).
    ``model``: which of its models is asked. ``class_label``: number of the class whose probability counts, where that model
    has several. ``token_env``: the environment variable with its bearer token. ``batch_size``: most completions of one
    request. ``patience_s``: how long a completion waits for its score, all tries together. One try has `reward_timeout_s`.
    ``center`` is subtracted from scores, and ``scale`` divides them. ``above``: the reward is 1 where this is exceeded, else
    0. ``show_media``: whether the server is shown the images and sounds of the conversation, or its texts alone.
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
        self._server = RewardServer(
            str(url),
            layout=layout,
            model=model,
            class_label=None if class_label is None else number,
            token=token_of(name, token_env),
            batch_size=batch_size,
            request_timeout_s=timeout_s,
            patience_s=patience_s,
        )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Before training. Raises `ConfigError` for a row with images or sounds that the layout cannot carry."""
        self._check_media(row.get("messages") or ())

    def _check_media(self, messages: Sequence[Mapping[str, Any]]) -> None:
        if self._show_media and not LAYOUTS[self._layout].shows_media:
            kinds = {kind for message in messages for kind in kinds_of(message.get("content"))}
            if kinds:
                raise ConfigError(
                    f"reward {self.name!r}: layout={self._layout} carries texts alone, and there are parts of type "
                    f"{', '.join(sorted(kinds))}; use a server of layout=tandem, model(path=FOLDER), or show_media=false, "
                    "which judges the texts alone"
                )

    async def _shown(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """The messages as the server is to see them. Raises `RewardFailure` where it cannot."""
        if not any(kinds_of(message.get("content")) for message in messages):
            return tuple(messages)
        if not self._show_media:
            return tuple({**message, "content": plain_text(message.get("content"))} for message in messages)
        from tandem.media.parts import read_media  # noqa: PLC0415 — numpy, which a graph is drawn without

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
        prompt_ids: tuple[int, ...],
        completion_ids: tuple[int, ...],
        row: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> RewardResult:
        """Implements `RewardFn.__call__`. What the server cannot judge fails under the reason that it gives."""
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
        """Drops all connections."""
        self._server.close()
