"""The engine as one episode sees it: requests get the episode's noise key, affinity and deadline."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.api.activity import GENERATING, did
from tandem.api.engines import InferenceEngine
from tandem.api.failures import DataFailure, WrongWorkflow
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey, RequestTiming, StopReason
from tandem.api.workflow import GeneratesTokens
from tandem.rollout.wave import Wave

BESIDE = 1 << 20
"""The first number of the noise of requests to a model beside the engine: an episode has fewer trajectories."""


class EpisodeEngine:
    """Fills in what a request leaves out; what a request says itself is kept.

    ``noise_key`` names the episode (its ``trajectory`` is counted here: a request that continues the last one's tokens
    belongs to the same trajectory, any other begins a new one, so that no noise is used twice). ``deadline_s`` counts
    from construction. ``on_issue`` is called on the event loop once the first request of each sample has been issued.
    ``needs_logprobs``: see `LLMRequest`; a request that says False itself keeps that. ``wave``: of a deterministic run;
    ``as_one``: samples are not told to `end`, so whichever issues a request speaks for all.
    """

    def __init__(
        self,
        engine: GeneratesTokens,
        noise_key: NoiseKey,
        *,
        deadline_s: float | None = None,
        affinity: str | None = None,
        on_issue: Callable[[], None] | None = None,
        needs_logprobs: bool = True,
        wave: Wave | None = None,
        as_one: bool = False,
    ):
        self._engine, self.noise_key, self._needs_logprobs = engine, noise_key, needs_logprobs
        self._expires = None if deadline_s is None else time.monotonic() + deadline_s
        self._affinity = affinity or f"{noise_key.epoch}/{noise_key.group}"
        self._on_issue = on_issue
        self._samples: list[EpisodeEngine] = []
        self._last: tuple[int, ...] | None = None
        self._trajectory = -1
        self._wave, self._as_one, self._whole = wave, as_one, as_one
        self._waiting = self._generating = self._asking = self._asked = 0
        self.issued = self._ended = False
        self._read: list[tuple[tuple[int, ...], Sequence[str]]] = []

    def for_sample(self, sample: int) -> "EpisodeEngine":
        """The engine of one sample of the group: other noise, same affinity and deadline."""
        one = EpisodeEngine(
            self._engine,
            self.noise_key._replace(sample=sample),
            affinity=self._affinity,
            on_issue=self._on_issue,
            needs_logprobs=self._needs_logprobs,
            wave=self._wave,
        )
        one._expires = self._expires
        if self._whole:
            one._read, one._whole = self._read, True
        self._samples.append(one)
        return one

    @property
    def settled(self) -> bool:
        """True if each sample has issued its first request, or ended without one."""
        return all(one.settled for one in self._samples) if self._samples else self.issued

    @property
    def at_turn(self) -> bool:
        """True if each sample waits for its next turn, or has ended; see `Wave`."""
        parts = [self, *self._samples] if self._as_one else self._samples or [self]
        if self._as_one:
            return any(one._waiting for one in parts) and not any(one._generating for one in parts)
        return all(one._ended or (one._waiting and not one._generating) for one in parts)

    @property
    def at_rest(self) -> bool:
        """True if each sample waits for a turn of the engine or of a model beside it, or has ended; see `Wave`."""
        parts = [self, *self._samples] if self._as_one else self._samples or [self]
        waits = [one._waiting + one._asking > 0 for one in parts]
        if any(one._generating for one in parts):
            return False
        return any(waits) if self._as_one else all(one._ended or waits[i] for i, one in enumerate(parts))

    def end(self) -> None:
        """This sample will issue nothing any more."""
        self._settle()
        self._ended = True
        if self._wave is not None:
            self._wave.look()

    def has_read(self, context: tuple[int, ...], missing: Sequence[str]) -> None:
        """Implements `tandem.api.workflow.EpisodeView.has_read`."""
        self._read.append((context, missing))

    def _refuse_going_on(self, request: LLMRequest) -> None:
        """Passes if no decision of the episode rests on a reward that lacked terms. In one of a whole group, samples may be
        judged one after another, so there only a request that continues what was judged is refused.

        Raises:
            WrongWorkflow: one does.
        """
        for context, missing in self._read:
            if not self._whole or (context and request.input_ids[: len(context)] == context):
                raise WrongWorkflow(
                    f"the workflow asked for the reward and generated again, and {', '.join(missing)} of the reward is "
                    "added only when the episode has ended, so it went on by a part of it. Use terms that are there at once "
                    "(models behind a server: judge(url=…), remote(url=…)), ask for the reward last, or say in the workflow "
                    'reads_reward = "partly" if the other terms are enough to go on by'
                )

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Generates, as `InferenceEngine.agenerate` says.

        Raises:
            DataFailure: ``deadline``, when the episode's time is spent.
            WrongWorkflow: the episode has read a reward that is not whole, and goes on.
        """
        self._refuse_going_on(request)
        if self._wave is not None and self.issued:
            await self._turn(self._wave)
        request, ours = self._complete(request)
        self._settle()
        began = time.monotonic()
        self._generating += 1
        try:
            response = await self._engine.agenerate(request)
        finally:
            self._generating -= 1
            if self._wave is not None and self._waiting:  # several requests of one sample: this was what the wave waited for
                self._wave.look()
        did(*GENERATING)
        if response.timing is None:  # a server that does not say when it began
            response = replace(response, timing=RequestTiming(math.nan, math.nan, time.monotonic() - began))
        if ours and response.stop_reason == StopReason.CANCELLED and self.remaining_s <= 0:
            raise DataFailure("deadline", "the episode's time (rollout.episode_timeout_s) was spent while it was generating")
        self._last = (*request.input_ids, *response.output_ids)
        return response

    async def ask_beside(self, other: InferenceEngine, request: LLMRequest) -> LLMResponse:
        """Asks another model within the episode's time, with noise of its own; nothing of it is trained.

        Raises:
            DataFailure: ``deadline``, when the episode's time is spent.
        """
        self._settle()  # a sample that asks here first is not waited for with its first request
        key = self.noise_key._replace(trajectory=BESIDE + self._asked)
        self._asked += 1
        if self._wave is not None:
            self._asking += 1
            try:
                await self._wave.beside(other).turn()
            finally:
                self._asking -= 1
        ours = request.deadline_s is None or request.deadline_s > self.remaining_s
        deadline_s = max(0.0, self.remaining_s) if ours else request.deadline_s
        deadline_s = None if deadline_s == math.inf else deadline_s
        self._generating += 1
        try:
            response = await other.agenerate(
                replace(request, noise_key=key, affinity=self._affinity, deadline_s=deadline_s, needs_logprobs=False)
            )
        finally:
            self._generating -= 1
            if self._wave is not None:
                self._wave.look()
        did(*GENERATING)
        if ours and response.stop_reason == StopReason.CANCELLED and self.remaining_s <= 0:
            raise DataFailure("deadline", "the episode's time (rollout.episode_timeout_s) was spent while a partner wrote")
        return response

    async def _turn(self, wave: Wave) -> None:
        self._waiting += 1
        try:
            await wave.turn()
        finally:
            self._waiting -= 1

    def _complete(self, request: LLMRequest) -> tuple[LLMRequest, bool]:
        """The request with all fields filled in; whether its deadline is the episode's."""
        changes: dict[str, object] = {}
        if request.noise_key is None:
            if self._last is None or request.input_ids[: len(self._last)] != self._last:
                self._trajectory += 1
            self._last = None  # taken: another request beside this one is another trajectory
            changes["noise_key"] = self.noise_key._replace(trajectory=self._trajectory)
        if request.affinity is None:
            changes["affinity"] = self._affinity
        if not self._needs_logprobs:
            changes["needs_logprobs"] = False
        ours = request.deadline_s is None and self._expires is not None
        if ours:
            changes["deadline_s"] = max(0.0, self.remaining_s)
        return replace(request, **changes), ours  # type: ignore[arg-type]

    @property
    def remaining_s(self) -> float:
        """Seconds that the episode has left."""
        return float("inf") if self._expires is None else self._expires - time.monotonic()

    def _settle(self) -> None:
        if not self.issued:
            self.issued = True
            if self._on_issue is not None:  # after this step of the loop: then the engine has the request
                asyncio.get_running_loop().call_soon(self._on_issue)
