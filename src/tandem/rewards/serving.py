"""The answers of `tandem serve-reward`: `/score` in Tandem's layout, `/get_reward` in OpenRLHF's."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tandem.api.media import MediaKind, media_of
from tandem.media import store
from tandem.media.bound import StoreBound
from tandem.protocol.limits import ServerLimits
from tandem.protocol.media_intake import LACKING, LOG, MediaIntake
from tandem.protocol.openapi import document
from tandem.protocol.refusal import Refusal
from tandem.protocol.rewards import (
    MEDIUM_ANSWER,
    MEDIUM_BODY,
    MISSING_ANSWER,
    MISSING_BODY,
    REWARDS_BODY,
    SCORE_ANSWER,
    SCORE_BODY,
    NotJudged,
    Question,
    Verdict,
)
from tandem.protocol.server import Application, Route


@dataclass(frozen=True)
class ServedJudge:
    """Scores questions with a model: one verdict each. Called in one thread at a time."""

    score: Callable[[Sequence[Question]], list[Verdict]]
    media: tuple[MediaKind, ...] = ()
    """The kinds of media that the model takes."""

    def __call__(self, questions: Sequence[Question]) -> list[Verdict]:
        return self.score(questions)


MAX_WAITING = 8192
"""Questions that may wait; of a request that would make it more, none is taken."""


class RewardApplication(Application):
    """Reward models behind a server. Questions that wait are judged together, whoever asked them."""

    def __init__(
        self,
        judges: Mapping[str, ServedJudge],
        *,
        batch_size: int = 64,
        limits: ServerLimits | None = None,
        bound: StoreBound | None = None,
    ):
        """``judges``: by the names of their models. ``batch_size``: most questions that a model reads at once. ``bound``: of
        the media store; None: it grows."""
        self.limits = limits or ServerLimits()
        self._judges, self._batch_size, self._draining = judges, batch_size, False
        self._waiting: dict[str, list[tuple[Question, asyncio.Future[Verdict]]]] = {name: [] for name in judges}
        self.models = tuple(judges)
        self._judged = dict.fromkeys(judges, 0)
        self._news = asyncio.Event()
        self._intake = MediaIntake(self.limits, bound=bound)
        size = self.limits.max_body_bytes
        self._kinds = tuple(dict.fromkeys(kind for judge in judges.values() for kind in judge.media))
        self.routes = (
            *(self._media_routes(size) if self._kinds else ()),
            Route("GET", "/health", "data", "The models, and how many completions each has judged", self._health),
            Route("GET", "/openapi.json", "data", "This table", self._openapi, answer={"type": "object"}),
            Route("POST", "/score", "data", "Scores of completions", self._score, SCORE_BODY, SCORE_ANSWER, size),
            Route(
                "POST",
                "/get_reward",
                "data",
                "Scores of texts, in OpenRLHF's layout; of the first model",
                self._get_reward,
                REWARDS_BODY,
                {"type": "object"},
                size,
            ),
        )

    def _media_routes(self, size: int) -> tuple[Route, ...]:
        which, large = "Which of these images and sounds are not in the media store", self.limits.max_media_body_bytes
        keep = "Put an image or sound into the media store, for questions that name its number"
        return (
            Route("POST", "/media/missing", "data", which, self._missing, MISSING_BODY, MISSING_ANSWER, size),
            Route("POST", "/media", "data", keep, self._keep, MEDIUM_BODY, MEDIUM_ANSWER, large),
        )

    def busy(self) -> bool:
        """True while questions wait."""
        return any(self._waiting.values())

    def drain(self) -> None:
        """Refuses new questions."""
        self._draining = True

    async def watch(self) -> None:
        """Judges whatever waits, model after model."""
        while True:
            await self._news.wait()
            self._news.clear()
            for name, waiting in self._waiting.items():
                while waiting:
                    batch = waiting[: self._batch_size]
                    await self._judge(name, batch)
                    del waiting[: len(batch)]  # here, so that the server is busy until they are judged

    async def _judge(self, name: str, batch: Sequence[tuple[Question, asyncio.Future[Verdict]]]) -> None:
        asked = [pair for pair in batch if not pair[1].done()]  # whoever left wants no answer
        try:
            verdicts = await asyncio.to_thread(self._judges[name], [question for question, _ in asked])
        except Exception as error:  # the request boundary: these questions fail, the server goes on
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        self._judged[name] += len(asked)
        for (_, future), verdict in zip(asked, verdicts, strict=True):
            if not future.done():
                future.set_result(verdict)

    async def _verdicts(self, model: str | None, questions: Sequence[Question]) -> tuple[str, list[Verdict]]:
        name = next(iter(self._judges)) if model is None else model
        if name not in self._judges:
            raise Refusal(404, f"no model is called {name!r} here; there are: {', '.join(self._judges)}", param="model")
        if self._draining:
            raise Refusal(503, "the server is shutting down", headers={"Connection": "close"})
        if sum(map(len, self._waiting.values())) + len(questions) > MAX_WAITING:
            raise Refusal(503, f"more than {MAX_WAITING} questions would wait", headers={"Retry-After": "1"})
        futures = [asyncio.get_running_loop().create_future() for _ in questions]
        self._waiting[name] += zip(questions, futures, strict=True)
        self._news.set()
        try:
            return name, list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()

    async def _score(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        model = body.get("model")
        if model is None and len(self._judges) > 1:
            raise Refusal(400, f"say which `model`: {', '.join(self._judges)}", param="model")
        questions = await asyncio.to_thread(lambda: [_question(asked) for asked in body["questions"]])
        shown = [medium.number for question in questions for medium in media_of(question.messages)]
        with self._intake.using(shown):
            name, verdicts = await self._verdicts(model, questions)
        return {"model": name, "results": [_result(number, verdict) for number, verdict in enumerate(verdicts)]}

    async def _get_reward(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """This layout has no words for a text that cannot be judged, so the whole request is refused."""
        texts = body["query"]
        _, verdicts = await self._verdicts(None, [Question((), "", text) for text in texts])
        for number, verdict in enumerate(verdicts):
            result = _result(number, verdict)
            if "score" not in result:
                raise Refusal(422, f"query[{number}] cannot be judged: {result['reason']}: {result['message']}")
        return {"rewards": verdicts}

    async def _missing(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        numbers = body["numbers"]
        with self._intake.using(numbers):  # whoever asks is about to show them: what others send does not push them out
            return {"missing": await asyncio.to_thread(lambda: [n for n in set(numbers) if not store.is_whole(n)])}

    async def _keep(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        part = {"type": body["kind"], "data": body["data"]}
        (medium,) = media_of(await self._intake.read([{"content": [part]}], self._kinds, 2, "data"))
        return {"number": medium.number}

    async def close(self) -> None:
        """Ends the threads that read media."""
        self._intake.close()

    async def _health(self, body: dict[str, Any], request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "kind": "tandem-reward", "models": self._judged})

    async def _openapi(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return document("tandem serve-reward", self.routes)


def _question(asked: Mapping[str, Any]) -> Question:
    """A question of `SCORE_BODY` with its media. Raises `Refusal`, 422, for one that is not in the store."""

    def part(one: Mapping[str, Any]) -> dict[str, Any]:
        if "medium" not in one:
            return dict(one)
        medium = store.medium(one["medium"])
        return {"type": medium.kind, "medium": medium}

    try:
        messages = tuple(
            {**message, "content": content if isinstance(content := message["content"], str) else [*map(part, content)]}
            for message in asked.get("messages") or ()
        )
    except store.MediaMissing as error:
        LOG.warning("%s", error)
        raise Refusal(422, f"media_missing: {LACKING}", code="media_missing", param="questions") from error
    return Question(messages, asked.get("prompt", ""), asked["completion"], asked.get("answer"))


def _result(number: int, verdict: Verdict) -> dict[str, Any]:
    if isinstance(verdict, NotJudged):
        return {"question": number, "reason": verdict.reason, "message": verdict.message}
    if not math.isfinite(verdict):
        return {"question": number, "reason": "not_finite", "message": f"the model's score is {verdict}"}
    return {"question": number, "score": verdict}
