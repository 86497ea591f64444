"""The routes of `tandem serve-reward`: `/score` in Tandem's layout, `/get_reward` in OpenRLHF's."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tandem.api.media import MediaKind, media_of
from tandem.media import store
from tandem.media.bound import StoreBound
from tandem.protocol.access import ServerLimits
from tandem.protocol.bodies import Refusal
from tandem.protocol.media_intake import LACKING, LOG, MediaIntake
from tandem.protocol.reward_layouts import (
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
from tandem.protocol.server import Application, Route, document


@dataclass(frozen=True)
class ServedJudge:
    """A model that scores questions, with one verdict for each. Called from one thread at a time."""

    score: Callable[[Sequence[Question]], list[Verdict]]
    media: tuple[MediaKind, ...] = ()
    """The kinds of media that the model takes."""

    def __call__(self, questions: Sequence[Question]) -> list[Verdict]:
        return self.score(questions)


MAX_WAITING = 8192
"""Maximum number of waiting questions. A request that would exceed the maximum is refused completely."""


class RewardApplication(Application):
    """A server of reward models. Waiting questions of different requests are judged together."""

    def __init__(
        self,
        judges: Mapping[str, ServedJudge],
        *,
        batch_size: int = 64,
        bound: StoreBound | None = None,
    ):
        """``judges``: name of a model → its judge. ``batch_size``: maximum number of questions that a model reads at once.
        ``bound``: the size limit of the media store; None: the store may grow without limit."""
        self.limits = ServerLimits()
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
        """Returns True while questions wait."""
        return any(self._waiting.values())

    def drain(self) -> None:
        """Refuses new questions from now on."""
        self._draining = True

    async def watch(self) -> None:
        """Judges the waiting questions, one model after another."""
        while True:
            await self._news.wait()
            self._news.clear()
            for name, waiting in self._waiting.items():
                while waiting:
                    batch = waiting[: self._batch_size]
                    await self._judge(name, batch)
                    del waiting[: len(batch)]  # only now, so that the server counts as busy until they are judged

    async def _judge(self, name: str, batch: Sequence[tuple[Question, asyncio.Future[Verdict]]]) -> None:
        pending = [pair for pair in batch if not pair[1].done()]  # others have disconnected
        try:
            verdicts = await asyncio.to_thread(self._judges[name], [question for question, _ in pending])
        except Exception as error:  # the request boundary: these questions fail, the server continues
            for _, future in pending:
                if not future.done():
                    future.set_exception(error)
            return
        self._judged[name] += len(pending)
        for (_, future), verdict in zip(pending, verdicts, strict=True):
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
            raise Refusal(400, f"choose one with `model`: {', '.join(self._judges)}", param="model")
        questions = await asyncio.to_thread(lambda: [_question(entry) for entry in body["questions"]])
        shown = [medium.number for question in questions for medium in media_of(question.messages)]
        with self._intake.using(shown):
            name, verdicts = await self._verdicts(model, questions)
        return {"model": name, "results": [_result(number, verdict) for number, verdict in enumerate(verdicts)]}

    async def _get_reward(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Serves OpenRLHF's layout. The layout has no field for a text that cannot be judged; one such text makes the whole
        request fail."""
        texts = body["query"]
        _, verdicts = await self._verdicts(None, [Question((), "", text) for text in texts])
        for number, verdict in enumerate(verdicts):
            result = _result(number, verdict)
            if "score" not in result:
                raise Refusal(422, f"query[{number}] cannot be judged: {result['reason']}: {result['message']}")
        return {"rewards": verdicts}

    async def _missing(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        numbers = body["numbers"]
        with self._intake.using(numbers):  # the client is about to use these media, so uploads of others must not evict them
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


def _question(fields: Mapping[str, Any]) -> Question:
    """Returns a question of `SCORE_BODY` with its media. Raises `Refusal` (422) for a medium that is not in the store."""

    def part(item: Mapping[str, Any]) -> dict[str, Any]:
        if "medium" not in item:
            return dict(item)
        medium = store.medium(item["medium"])
        return {"type": medium.kind, "medium": medium}

    try:
        messages = tuple(
            {**message, "content": content if isinstance(content := message["content"], str) else [*map(part, content)]}
            for message in fields.get("messages") or ()
        )
    except store.MediaMissing as error:
        LOG.warning("%s", error)
        raise Refusal(422, f"media_missing: {LACKING}", code="media_missing", param="questions") from error
    return Question(messages, fields.get("prompt", ""), fields["completion"], fields.get("answer"))


def _result(number: int, verdict: Verdict) -> dict[str, Any]:
    if isinstance(verdict, NotJudged):
        return {"question": number, "reason": verdict.reason, "message": verdict.message}
    if not math.isfinite(verdict):
        return {"question": number, "reason": "not_finite", "message": f"the model's score is {verdict}"}
    return {"question": number, "score": verdict}
