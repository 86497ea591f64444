"""A reward that another server gives, over HTTP: ``remote(url=http://judge:8001)``."""

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from tandem.api.failures import DataFailure, RewardFailure, ServerFailed
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.protocol.client import HttpClient
from tandem.protocol.rewards import LAYOUTS, NotJudged, Question, Verdict
from tandem.rewards.registry import register

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""Between two tries of a request; each pause is twice the one before."""

_GATHER_S = 0.01
"""The first question of a request waits this long for others, unless the request is full before."""


class RewardServer:
    """Asks one server for verdicts. Questions that come close together share a request; a request that fails is repeated."""

    def __init__(
        self,
        url: str,
        *,
        layout: str,
        model: str | None,
        token: str | None,
        batch_size: int,
        request_timeout_s: float,
        patience_s: float,
    ):
        """``request_timeout_s``: of one request. ``patience_s``: of a question, all tries of its request together."""
        self._layout, self._model = LAYOUTS[layout], model
        parts = urlsplit(url)
        self._path = parts.path.rstrip("/") or self._layout.path
        self._client = HttpClient(url.removesuffix(parts.path) if parts.path else url, token=token)
        self._batch_size = batch_size if self._layout.at_once else 1
        self._request_timeout_s, self._patience_s = request_timeout_s, patience_s
        self._waiting: list[tuple[Question, asyncio.Future[Verdict]]] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def judge(self, question: Question) -> Verdict:
        """The verdict of one completion.

        Raises:
            RewardFailure: ``reward_server_failed``, when there was none in time; ``reward_refused``, when the server takes
                this question for wrong.
        """
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, verdict))
        if len(self._waiting) >= self._batch_size:
            self._send()
        elif len(self._waiting) == 1:
            asyncio.get_running_loop().call_later(_GATHER_S, self._send)
        return await verdict

    def _send(self) -> None:
        """Asks all that wait, in one request."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            task = asyncio.ensure_future(self._answer(waiting))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

    async def _answer(self, waiting: Sequence[tuple[Question, asyncio.Future[Verdict]]]) -> None:
        try:
            verdicts: Sequence[Verdict | Exception] = await self._ask([question for question, _ in waiting])
        except RewardFailure as failure:
            verdicts = [failure] * len(waiting)
        except DataFailure as failure:
            if len(waiting) > 1:  # one bad question must not cost the others their verdict
                await asyncio.gather(*(self._answer([one]) for one in waiting))
                return
            verdicts = [RewardFailure("reward_refused", str(failure))]
        except Exception as error:  # the reward boundary: whoever waits for the verdict raises it
            verdicts = [error] * len(waiting)
        for (_, future), verdict in zip(waiting, verdicts, strict=True):
            if future.done():
                continue  # whoever asked has left
            if isinstance(verdict, Exception):
                future.set_exception(verdict)
            else:
                future.set_result(verdict)

    async def _ask(self, questions: Sequence[Question]) -> list[Verdict]:
        """One request, repeated until it is answered or the patience ends."""
        body, until, pause_s, tries = self._layout.ask(questions, self._model), time.monotonic() + self._patience_s, 0.0, 0
        while True:
            tries += 1
            left_s = max(until - time.monotonic(), 1e-3)
            try:
                answer = await self._client.post(self._path, body, deadline_s=min(self._request_timeout_s, left_s))
                try:
                    return self._layout.read(answer, len(questions))
                except ValueError as error:
                    raise ServerFailed(f"{self._client.base_url}{self._path}: its answer cannot be read: {error}") from error
            except ServerFailed as error:
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                final = error.status is not None and 400 <= error.status < 500 and error.status not in (408, 429)
                if final or time.monotonic() + pause_s >= until:
                    after = f"after {tries} tries in {self._patience_s:g} s" if tries > 1 else "at once"
                    raise RewardFailure("reward_server_failed", f"{error} (given up {after})") from error
                await asyncio.sleep(pause_s)

    def close(self) -> None:
        """Drops all connections."""
        self._client.close()


@register("remote")
class RemoteReward(RewardFn):
    """The score of another server.

    ``url``: of the server, with the route if it has another than its layout's. ``layout``: the shape of requests, `tandem`
    (what `tandem serve-reward` serves), `openrlhf` or `slime`. ``model``: which of its models is asked. ``token_env``: the
    environment variable with its bearer token. ``batch_size``: most completions of one request. ``patience_s``: how long a
    completion waits for its score, all tries together. One try has `reward_timeout_s`. ``center`` is subtracted from scores,
    and ``scale`` divides them.
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
        token_env: str | None = None,
        batch_size: int = 32,
        patience_s: float = 120.0,
        center: float = 0.0,
        scale: float = 1.0,
    ):
        if layout not in LAYOUTS:
            raise ConfigError(f"reward {name!r}: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        numbers = {"patience_s": patience_s, "center": center, "scale": scale}
        for knob, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"reward {name!r}: {knob} must be a finite number, got {value!r}")
        if patience_s <= 0 or scale <= 0:
            raise ConfigError(f"reward {name!r}: patience_s and scale must be above 0, got {patience_s} and {scale}")
        token = None
        if token_env is not None and not (token := os.environ.get(str(token_env))):
            raise ConfigError(f"reward {name!r}: token_env={token_env}, and the environment has no variable {token_env}")
        self.name, self.center, self.scale = name, center, scale
        self._server = RewardServer(
            str(url),
            layout=layout,
            model=model,
            token=token,
            batch_size=batch_size,
            request_timeout_s=timeout_s,
            patience_s=patience_s,
        )

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
        """See `RewardFn`. What the server cannot judge fails under the reason that it gives."""
        answer = row.get("answer")
        question = Question(tuple(messages), prompt, completion, None if answer is None else str(answer))
        verdict = await self._server.judge(question)
        if isinstance(verdict, NotJudged):
            raise RewardFailure(verdict.reason, f"{self.name}: {verdict.message}")
        if not math.isfinite(verdict):
            raise RewardFailure("reward_not_finite", f"{self.name}: the server's score is {verdict}")
        return RewardResult((verdict - self.center) / self.scale)

    def close(self) -> None:
        """Drops all connections."""
        self._server.close()
