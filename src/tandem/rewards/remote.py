"""A reward that another server gives, over HTTP: ``remote(url=http://judge:8001)``."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.api.failures import RewardFailure
from tandem.api.workflow import RewardFn, RewardResult
from tandem.config.errors import ConfigError
from tandem.protocol.rewards import LAYOUTS, NotJudged, Question, Verdict
from tandem.rewards.asking import ask_patiently, client_and_path, finite_knobs, token_of

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
        self._client, self._path = client_and_path(url, token, self._layout.path)
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
            if failure.reason == "reward_refused" and len(waiting) > 1:  # one bad question must not cost the others theirs
                await asyncio.gather(*(self._answer([one]) for one in waiting))
                return
            verdicts = [failure] * len(waiting)
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
        return await ask_patiently(
            self._client,
            self._path,
            self._layout.ask(questions, self._model),
            lambda answer: self._layout.read(answer, len(questions)),
            request_timeout_s=self._request_timeout_s,
            patience_s=self._patience_s,
        )

    def close(self) -> None:
        """Drops all connections."""
        self._client.close()


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
        finite_knobs(name, patience_s=patience_s, center=center, scale=scale)
        if patience_s <= 0 or scale <= 0:
            raise ConfigError(f"reward {name!r}: patience_s and scale must be above 0, got {patience_s} and {scale}")
        self.name, self.center, self.scale = name, center, scale
        self._server = RewardServer(
            str(url),
            layout=layout,
            model=model,
            token=token_of(name, token_env),
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
