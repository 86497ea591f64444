"""A rollout worker in its own process: see `tandem.rollout.workers`, which is its other half."""

import copy
import itertools
import pickle
import queue
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from tandem.api.failures import WaitTimeout
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.api.workflow import RolloutWorkflow
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.callers import Callers
from tandem.engines.inference.controlled import Controlled
from tandem.rollout.episodes import EpisodeRunner
from tandem.rollout.event_loop import BackgroundLoop
from tandem.rollout.ranks import Helper, portable


class AskedEngine(Controlled):
    """An engine that another process has: whatever is asked of it, that does."""

    def __init__(
        self,
        put: Callable[[str, int, Any], None],
        capabilities: frozenset[str],
        version: WeightVersion,
        patience_s: float,
    ):
        """``put``: sends what is asked, ``ask`` (None takes it back) or ``control``, under a number; `answer` gets what
        comes of it. ``patience_s``: for the answer to a control call."""
        self._put, self._capabilities, self._version, self._patience_s = put, capabilities, version, patience_s
        self._callers, self._calls, self._numbers = Callers(), dict[int, Future[Any]](), itertools.count(-1, -1)

    def saying(self, put: Callable[[str, int, Any], None]) -> "AskedEngine":
        """The same engine, asked by another way; numbers and answers are shared."""
        one = copy.copy(self)
        one._put = put
        return one

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        return await self._callers.wait(request, partial(self._put, "ask"), lambda number: self._put("ask", number, None))

    def control(self, name: str, *arguments: Any) -> dict[str, float]:
        number, call = next(self._numbers), Future[Any]()
        self._calls[number] = call
        self._put("control", number, (name, *arguments))
        try:
            answer = call.result(self._patience_s)
        except TimeoutError:
            raise WaitTimeout(
                f"the controller's engine has not answered {name} within {self._patience_s:g} s (rollout.wait_timeout_s)"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return dict(answer or {})

    def answer(self, number: int, answer: Any) -> None:
        """Settles what was asked under this number; those of control calls are below 0."""
        if number < 0:
            if call := self._calls.pop(number, None):
                call.set_result(answer)
        else:
            self._callers.resolve([(number, answer)])

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def capabilities(self) -> frozenset[str]:
        return self._capabilities

    def prepare_weights(self, update: WeightUpdate) -> None:
        self.control("prepare_weights", update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        report = self.control("commit_weights", version)
        self._version = version
        return report

    def close(self) -> None:
        self.control("close")


class _Outbox:
    """The way to the collector, in one term."""

    def __init__(self, said: "queue.SimpleQueue[bytes]", term: int):
        self._said, self._term = said, term

    def put(self, message: tuple[int, Any]) -> None:
        self._said.put(pickle.dumps((self._term, "outcome", *message)))


class EpisodeWorker:
    """One worker, in its own process. `take` is for one thread, `answer` and `said` for others."""

    def __init__(self, config: RolloutConfig, capabilities: frozenset[str], version: WeightVersion, **how: Any):
        """``how``: see `EpisodeRunner`."""
        self._config, self._how, self._term = config, how, 0
        self.said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """Messages for `RolloutWorkers.heard`."""

        self.engine = AskedEngine(lambda *what: self._put(self._term, *what), capabilities, version, config.wait_timeout_s)
        self.loop = BackgroundLoop(on_blocked=lambda error: self._put(self._term, "blocked", 0, error))
        self._helper: Helper | None = None

    def _put(self, term: int, what: str, number: int, said: Any) -> None:
        self.said.put(pickle.dumps((term, what, number, said)))

    def take(self, message: tuple[int, Any], workflow: RolloutWorkflow) -> None:
        """Does what `RolloutWorkers` orders."""
        term, order = message
        if order is None:
            self._term = term  # first: an error of this order belongs to the new term
            if self._helper is not None:
                self._helper.stop()
            runner = EpisodeRunner(self.engine.saying(partial(self._put, term)), self._config, self.loop, **self._how)
            outbox = _Outbox(self.said, term)
            self._helper = Helper(outbox, self.loop, runner, self._config.wait_timeout_s, "a rollout worker")
        elif term == self._term and self._helper is not None:
            self._helper.take(order, workflow)

    def fail(self, error: Exception) -> None:
        """Ends the run with an error that belongs to no episode."""
        self._put(self._term, "blocked", 0, portable(error, "a rollout worker"))

    def close(self) -> None:
        """Cancels what runs."""
        self.loop.close()
