"""The control routes: the server's owner, its weights, and pauses of generation. Each needs the admin token.

A server belongs to one training run at a time: from `attach` to `release`, which restores its first state. A request of
another run is refused with status 409, so that a late request changes nothing. A run that was killed never releases: after
`ServiceLimits.owner_silent_s` of silence, the next run that attaches gets the server.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from tandem.api.failures import EngineDied, WaitTimeout, WeightUpdateFailed
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion, tensor_digest, version_digest
from tandem.engines.inference.serve.service import EngineService
from tandem.protocol.bodies import Refusal, Schema, array, optional, record, text

LOG = logging.getLogger("tandem.serve")
T = TypeVar("T")


class ServiceControl:
    """Runs one change at a time. Engine calls block worker threads; a client that disconnects does not interrupt them."""

    def __init__(self, service: EngineService):
        self._service = service
        self.turn = asyncio.Lock()
        self._prepared: WeightVersion | None = None
        self._preparing: object | None = None
        self._initial_digests: dict[str, str] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------------ ownership

    async def attach(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Gives the server, awake and generating, to a run. The run that owns the server may call it again."""
        service, run = self._service, body["run"]

        async def act() -> dict[str, Any]:
            if service.abandoned():
                LOG.warning("run %r is silent, so run %r gets the server", service.run, run)
                await self._discard()
                service.run = None
            self._check_run(run, free=True)
            service.run = run
            await self._rouse()
            return service.identity()

        return await self._in_turn(act)

    async def release(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Takes the server back from its run. Afterwards the server has its first weights and no owner, is awake and
        generates."""

        async def act() -> dict[str, Any]:
            service = self._service
            await self._discard()
            await self._restore()
            await self._engine(service.engine.resume)
            service.paused, service.run = False, None
            return service.identity()

        return await self._alone(body.get("run"), act, free=True)

    def _check_run(self, run: str | None, *, free: bool = False) -> None:
        """Raises `Refusal` (409) unless the server belongs to ``run``, or has no owner and ``free`` is set. Checked again
        when a change begins."""
        owner = self._service.run
        if run == owner:
            self._service.heard()
        elif not (free and owner is None):
            sender, holder = ("no run" if name is None else f"run {name!r}" for name in (run, owner))
            remedy = "attach to it first" if owner is None else "that run gives it back with /control/release"
            message = f"this server belongs to {holder}, the request to {sender}; {remedy}"
            raise Refusal(409, message, code="other_run", param="run")

    async def _rouse(self) -> None:
        """Wakes and resumes a server that a former owner left asleep or paused."""
        service = self._service
        if service.weights_missing or "weights" in service.asleep:
            await self._restore()
        elif service.asleep:
            parts = tuple(service.asleep)
            await self._engine(lambda: service.engine.wake(parts))
            service.asleep = frozenset()
        if service.paused:
            await self._engine(service.engine.resume)
            service.paused = False

    async def _digests(self) -> dict[str, str]:
        """Returns the digests of the server's first weights, in the dtype of their files."""
        if self._initial_digests is None:
            source = FolderSource(self._service.folder)
            self._initial_digests = await self._engine(lambda: {n: tensor_digest(t) for n, t in source.tensors()})
        return self._initial_digests

    async def _restore(self) -> None:
        """Wakes the server and loads its first weights again, unless it has them."""
        service, engine = self._service, self._service.engine
        if engine.version == service.initial and not service.asleep and not service.weights_missing:
            return
        await self._engine(lambda: engine.wake(("weights", "kv_cache")))
        digests = await self._digests()
        version = WeightVersion(service.initial.number, version_digest(digests), service.initial.run, service.initial.model)
        await self._engine(lambda: engine.prepare_weights(WeightUpdate(version, FolderSource(service.folder), digests)))
        await self._engine(lambda: engine.commit_weights(version))
        service.initial, service.asleep, service.weights_missing = version, frozenset(), False

    # ------------------------------------------------------------------ weights

    async def prepare(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Stages new weights beside the old ones and verifies every digest; generation goes on."""
        version = WeightVersion(**body["version"])
        run = version.run or None
        self._check_run(run)  # before a path is looked at
        folder = await asyncio.to_thread(self._allowed, body["folder"])
        update = WeightUpdate(version, FolderSource(folder), body["digests"])

        async def act() -> dict[str, Any]:
            await self._discard()
            attempt = self._preparing = object()
            try:
                await self._engine(lambda: self._service.engine.prepare_weights(update))
            finally:
                if self._preparing is not attempt:  # `discard` was called meanwhile
                    await self._engine(self._service.engine.discard_weights)
            if self._preparing is not attempt:
                raise Refusal(409, f"version {version.number} was discarded while it was prepared", code="not_prepared")
            self._prepared = version
            return {"prepared": version.number}

        return await self._alone(run, act)

    async def commit(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Switches to the staged weights between two steps. Repeating it for the version that is served does no harm."""
        version = WeightVersion(**body["version"])

        async def act() -> dict[str, Any]:
            service = self._service
            if service.engine.version == version and not service.weights_missing:
                if self._prepared is not None:  # by a client that missed the answer to its first commit
                    await self._discard()
                return {"pause_s": 0.0, "recompute_s": 0.0, "version": asdict(version)}
            if self._prepared != version:
                prepared = "nothing" if self._prepared is None else f"version {self._prepared.number}"
                message = f"version {version.number} cannot be committed: {prepared} is prepared"
                raise Refusal(409, message, code="not_prepared")
            self._prepared = self._preparing = None
            report = await self._engine(lambda: service.engine.commit_weights(version))
            service.asleep, service.weights_missing = service.asleep - {"weights"}, False
            return {**report, "version": asdict(version)}

        return await self._alone(version.run or None, act)

    async def discard(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Discards staged weights, even while they are being staged. Does nothing if there are none."""
        self._check_run(body.get("run"))
        await self._shielded(self._discard())
        return {}

    async def _discard(self) -> None:
        self._prepared = self._preparing = None
        await self._engine(self._service.engine.discard_weights)

    def _allowed(self, name: str) -> Path:
        """Returns the folder, if it and all its weight files are inside folders that the operator allowed."""
        roots = (*self._service.weights_roots, self._service.folder.resolve())
        rule = ", ".join(map(str, roots))
        refusal = Refusal(
            403,
            f"weights are read below the allowed folders only ({rule}; --weights-root adds one), got {name[:200]!r}",
            code="folder",
            param="folder",
        )
        if "\0" in name or not Path(name).is_absolute():
            raise refusal
        try:
            folder = Path(name).resolve(strict=True)
            files = [file.resolve(strict=True) for file in folder.glob("*.safetensors")]
        except (OSError, RuntimeError):
            raise refusal from None  # the same message, so that nobody learns whether a path exists
        if not folder.is_dir() or not all(any(p.is_relative_to(root) for root in roots) for p in (folder, *files)):
            raise refusal
        return folder

    # ------------------------------------------------------------------ pauses and memory

    async def pause(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Pauses generation between two steps; requests keep their tokens."""
        return await self._toggle(body, self._service.engine.pause, True)

    async def resume(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        return await self._toggle(body, self._service.engine.resume, False)

    async def _toggle(self, body: dict[str, Any], function: Callable[[], None], paused: bool) -> dict[str, Any]:
        run = body.get("run")

        async def act() -> dict[str, Any]:
            self._check_run(run)
            await self._engine(function)
            self._service.paused = paused
            return {}

        return await self._shielded(act())  # not in turn: a pause must not wait for weights that are being prepared

    async def sleep(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Frees the memory of weights or cache; refused while requests are under way."""
        parts = frozenset(body["parts"])

        async def act() -> dict[str, Any]:
            service = self._service
            if service.under_way:
                message = f"sleep is refused while {service.under_way} completions are under way"
                raise Refusal(409, message, code="busy")
            before, service.asleep = service.asleep, service.asleep | parts
            try:
                await self._engine(lambda: service.engine.sleep(tuple(parts)))
            except Refusal:
                service.asleep = before
                raise
            service.weights_missing = service.weights_missing or "weights" in parts
            return {"asleep": sorted(service.asleep)}

        return await self._alone(body.get("run"), act)

    async def wake(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Allocates memory again. Weights that slept must be delivered again."""
        parts = frozenset(body["parts"])

        async def act() -> dict[str, Any]:
            service = self._service
            await self._engine(lambda: service.engine.wake(tuple(parts)))
            service.asleep -= parts
            return {"asleep": sorted(service.asleep), "weights_missing": service.weights_missing}

        return await self._alone(body.get("run"), act)

    async def flush(self, body: dict[str, Any], request: web.Request) -> dict[str, Any]:
        """Drops the cached prompts, so that later requests do not reuse them."""
        self._check_run(body.get("run"))

        async def act() -> dict[str, Any]:
            await self._engine(self._service.engine.flush)
            return {}

        return await self._shielded(act())

    async def statistics(self, body: dict[str, Any], request: web.Request) -> Mapping[str, float]:
        return await self._engine(self._service.engine.statistics)

    # ------------------------------------------------------------------ order of changes, and failures

    async def _alone(self, run: str | None, act: Callable[[], Awaitable[T]], *, free: bool = False) -> T:
        """Runs a change for ``run`` once all earlier changes have ended. Checks the owner at the call and again when the
        change begins; see `_check_run`."""
        self._check_run(run, free=free)

        async def checked() -> T:
            self._check_run(run, free=free)
            return await act()

        return await self._in_turn(checked)

    async def _in_turn(self, act: Callable[[], Awaitable[T]]) -> T:
        """Runs changes one after another."""
        limit = self._service.limits.control_timeout_s

        async def change() -> T:
            try:
                async with asyncio.timeout(limit):
                    await self.turn.acquire()
            except TimeoutError:
                message = f"the control request before this one did not end within {limit:g} s"
                raise Refusal(409, message, code="busy") from None
            try:
                return await act()
            finally:
                self.turn.release()

        return await self._shielded(change())

    async def _shielded(self, coroutine: Any) -> Any:
        """Finishes a change even if the client disconnects, because half a change would be worse than an unread answer."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, even if the client has disconnected

    async def _engine(self, function: Callable[[], T]) -> T:
        """Calls the engine in a thread; its failures become refusals."""
        try:
            return await asyncio.to_thread(function)
        except EngineDied as error:
            raise self._service.dead(error) from error
        except WeightUpdateFailed as error:
            raise Refusal(422, str(error), code="weights") from error
        except WaitTimeout as error:
            raise Refusal(504, str(error), code="deadline") from error
        except (RuntimeError, OSError) as error:  # the engine refuses, for example sleep while requests are under way
            raise Refusal(409, str(error), code="refused") from error

    async def close(self) -> None:
        """Waits at most `shutdown_s` for running changes; slower ones fail when the engine ends."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._service.limits.shutdown_s)


RUN = text(256, 1, "The training run that sends the request; a server that belongs to another run refuses.")


def of_run(properties: Mapping[str, Schema] | None = None, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the schema of a body with the requesting run and further ``properties``."""
    return record({"run": optional(RUN), **(properties or {})}, required)


PARTS_SCHEMA = array({"enum": ["weights", "kv_cache"]}, 1, 2)
DIGESTS = {"type": "object", "additionalProperties": text(128, 1), "description": "Tensor → SHA-256 of its bytes."}
