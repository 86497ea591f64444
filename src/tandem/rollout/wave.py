"""Deterministic runs of several turns: the requests of a turn reach the engine together."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied, InfrastructureFailure, WaitTimeout


class WaveEpisode(Protocol):
    """An episode of a wave."""

    @property
    def at_turn(self) -> bool:
        """True if it need not be waited for: each of its samples waits for its next turn, or has ended."""
        ...

    @property
    def at_rest(self) -> bool:
        """True if each of its samples waits for a turn of the engine or of a model beside it, or has ended."""
        ...


class Wave:
    """Episodes that began together. A request after the first one waits until every other sample has its next request too,
    or has ended; then the engine stands still while all of them are queued. So the order in which environments, tools and
    rewards answer does not decide which requests are computed together. For the loop's thread.

    The requests to a model `beside` the engine make turns of their own, each when nobody waits for anything else.
    """

    def __init__(self, engine: InferenceEngine, members: Sequence[WaveEpisode], before: "Wave | None" = None):
        """``before``: the wave of the same episodes whose turns come first; None: this is the engine's own."""
        self._engine, self._members, self._before = engine, members, before
        self._beside: dict[InferenceEngine, Wave] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._leaving: set[asyncio.Future[None]] = set()
        self._left = asyncio.Event()
        self._release: asyncio.Task[None] | None = None

    async def turn(self) -> None:
        """Waits for the next turn. The caller issues its request in the same step of the loop in which this returns."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._waiting.add(place)
        self.look()
        try:
            await place
        finally:
            self._waiting.discard(place)
            loop.call_soon(self._has_left, place)  # after this step of the loop: then the engine has the request

    def look(self) -> None:
        """Begins the next turn if nobody is to be waited for. Call it whenever a sample waits or ends."""
        if self._release is None and self._waiting and self._nobody_else:
            self._release = asyncio.get_running_loop().create_task(self._begin_turn())
        for wave in self._beside.values():
            wave.look()

    def beside(self, engine: InferenceEngine) -> "Wave":
        """The wave of another model that the same episodes ask."""
        if engine not in self._beside:
            self._beside[engine] = Wave(engine, self._members, before=self)
        return self._beside[engine]

    @property
    def _nobody_else(self) -> bool:
        """True if every sample waits, and none for a turn that comes first."""
        if self._before is None:
            return all(member.at_turn for member in self._members)
        return all(member.at_rest for member in self._members) and not self._before._nobody_else

    async def _begin_turn(self) -> None:
        try:
            await asyncio.to_thread(self._engine.pause)
        except (EngineDied, WaitTimeout, InfrastructureFailure):  # the requests will say it, or begin again elsewhere
            self._let_go()
            self._release = None
            return
        try:
            self._let_go()
            if self._leaving:
                await self._left.wait()
        finally:
            with contextlib.suppress(InfrastructureFailure):
                await asyncio.to_thread(self._engine.resume)
            self._release = None
        self.look()

    def _let_go(self) -> None:
        self._leaving, self._waiting = self._waiting, set()
        self._left.clear()
        for place in self._leaving:
            if not place.done():
                place.set_result(None)

    def _has_left(self, place: "asyncio.Future[None]") -> None:
        self._leaving.discard(place)
        if not self._leaving:
            self._left.set()
