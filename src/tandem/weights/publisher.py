"""Publishing: the trainer's weights become the next version of every inference engine, or of none."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from tandem.api.engines import InferenceEngine, TrainEngine
from tandem.api.failures import EngineDied, WeightUpdateFailed, described
from tandem.api.team import Team
from tandem.api.weights import WeightSource, WeightUpdate, WeightVersion, version_digest
from tandem.config.errors import ConfigError, TandemError
from tandem.weights.archive import VersionArchive
from tandem.weights.channel import Delivery, LocalChannel, NoChannel, WeightChannel
from tandem.weights.shared_memory import SharedMemoryChannel

log = logging.getLogger(__name__)

KEY = 0x5DEECE66D
"""The key of keyed sums: one for all runs, so that the same weights have the same digest in the records of each."""


class WeightPublisher:
    """Delivers versions of one model, one at a time.

    Every rank makes one and calls `publish`, for the stream of weights is collective; ranks without an engine give an empty
    sequence. What fails on one rank fails on all. The weights that the trainer begins with are those that new engines
    have loaded: making a publisher reads them once, for the digest of version 0.
    An engine that fails to switch when another one has switched already is closed: it must not serve old weights.
    """

    def __init__(
        self,
        train_engine: TrainEngine,
        inference_engine: InferenceEngine | Sequence[InferenceEngine],
        *,
        run: str,
        model: str = "actor",
        dtype: torch.dtype,
        channel: WeightChannel | None = None,
        disk: Callable[[], WeightChannel] | None = None,
        archive: VersionArchive | None = None,
        team: Team | None = None,
    ):
        """``channel``: None takes what the engines read, see `channel_for`; ``disk`` makes the one for engines that read
        from a folder. ``archive``: keeps versions that somebody will score again; on the first rank.
        ``team``: the ranks that train the model; None: all.

        Raises:
            ConfigError: an engine reads from a folder, and there is no ``disk``.
        """
        self._train_engine, self._team = train_engine, team or Team()
        engines = (inference_engine,) if isinstance(inference_engine, InferenceEngine) else inference_engine
        self._engines: tuple[InferenceEngine, ...] = tuple(engines)
        self._run, self._model, self._dtype = run, model, dtype
        nobody = NoChannel(digests=self._team.main)
        self.channel = channel or (channel_for(self._engines, disk) if self._engines else nobody)
        self._archive = archive
        self._key = KEY if self._team.share(lambda: self.channel.takes_key) else None
        if self.channel.takes_key:
            self.channel.key = self._key
        self._streams = self._team.share(lambda: self.channel.streams)  # then every rank reads the stream twice
        takes_adapters = self._team.share(self._takes_adapters)
        self._adapter = train_engine.adapter if takes_adapters else None  # then it alone is delivered
        if self._adapter is not None:
            self._dtype = torch.float32  # little to send, and the engine adds it to the weights before it rounds them
        served = self._engines[0].version if self._engines else WeightVersion(0, "", run, model)
        self._version = self._team.share(lambda: served)  # one answer, so that all ranks read the weights below, or none
        if not self._version.digest:
            self._version = replace(self._version, digest=self._digest_now(self._key), run=run, model=model)
        self._history = {self._version.number: self._version}
        self._keep(self._version.number, None)

    @property
    def version(self) -> WeightVersion:
        """The version that the engines serve."""
        return self._version

    @property
    def history(self) -> dict[int, WeightVersion]:
        """All versions published so far, and the one that the engines began with, by number; each with its digest."""
        return dict(self._history)

    def publish(self) -> dict[str, float]:
        """Delivers the trainer's weights as the next version.

        Returns metrics: ``time/prepare_s`` (stream, digests, transfer, verification; generation goes on), ``time/pause_s``
        (nothing is generated), ``time/recompute_s`` (keys and values of running requests, under the new weights),
        ``time/update_weights_s`` (all of it), and ``weights/delivered_mib``. With several engines the slowest counts.

        Raises:
            WeightUpdateFailed: no engine took it; all serve the version before, and the next `publish` may succeed.
            ConfigError: the channel's `put` gave no `Delivery`.
        """
        began = time.perf_counter()
        number = self._version.number + 1
        delivery: Delivery | None = None
        try:
            # Phase 1 may fail on any rank or engine: each engine lays the tensors beside the weights that it serves and
            # verifies them; none switches.
            delivery = self._put()
            update = self._update(number, delivery)
            version = update.version
            if self._streams:
                self._send(update)
            else:
                with self._team.together():
                    self._each(lambda engine: engine.prepare_weights(update))
        except Exception as error:  # the worker boundary: whatever it was, no engine may keep half an update
            self._discard()
            if delivery is not None:
                self.channel.withdraw()
            if isinstance(error, ConfigError) or (isinstance(error, EngineDied) and len(self._engines) <= 1):
                raise
            said = error if isinstance(error, TandemError) else described(error)  # of a user's channel with its line
            raise WeightUpdateFailed(f"version {number} was not published, {self._version.number} stays: {said}") from error
        prepared = time.perf_counter()
        # Phase 2: the engines switch, each between two decode steps. Once one has, there is no way back: another that fails
        # to is closed.
        with self._team.together():
            report = self._commit(version)
        self._version = self._history[number] = version
        self._keep(number, None if self._streams else delivery.source)
        return {
            "time/prepare_s": prepared - began,
            **{f"time/{name}": seconds for name, seconds in report.items()},
            "time/update_weights_s": time.perf_counter() - began,
            "weights/delivered_mib": delivery.num_bytes / 2**20,
        }

    def deliver_again(self) -> None:
        """Delivers the version that is served once more, to engines of this process whose weights slept. Collective.

        Raises:
            WeightUpdateFailed: the trainer's weights are others by now, or an engine did not take them.
        """
        update = self._update(self._version.number, self._put())
        with self._team.together():
            if update.version != self._version:
                raise WeightUpdateFailed(
                    f"version {self._version.number} cannot be delivered again: the trainer has moved on"
                )
            self._each(lambda engine: engine.prepare_weights(update))
            self._commit(update.version)

    def _put(self) -> Delivery:
        """Puts the trainer's weights into the channel. Collective."""
        with self._team.together(), self._team.whole(self._weights()) as stream:
            delivery = self.channel.put(stream, self._dtype)
            if not isinstance(delivery, Delivery):
                raise ConfigError(
                    f"weight channel {type(self.channel).__name__}: put() returned a {type(delivery).__name__}, where a "
                    "tandem.Delivery is needed; return one, as docs/extending.md shows"
                )
            return delivery

    def _update(self, number: int, delivery: Delivery) -> WeightUpdate:
        """Describes what was put as version ``number``. The first rank's word counts. Collective."""
        version = self._team.share(lambda: WeightVersion(number, version_digest(delivery.digests), self._run, self._model))
        adapter = None if self._adapter is None else self._adapter.terms
        return WeightUpdate(version, delivery.source, delivery.digests, adapter, delivery.key)

    def state_dict(self) -> dict[str, Any]:
        """The state: the versions' digests, whether of adapters alone, and the contents of the archive."""
        digests = [[number, version.digest] for number, version in self._history.items()]
        archived = None if self._archive is None else self._archive.state_dict()
        state = {"number": self._version.number, "digests": digests, "key": self._key, "kept": archived}
        return state | {"adapter": self._adapter is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Delivers the trainer's weights, which were loaded before, under the number that they had. Collective.

        Raises:
            ConfigError: they are others, or delivered in another dtype.
            WeightUpdateFailed: an engine did not take them.
        """
        number, served = int(state["number"]), self._version
        digests = {int(which): str(digest) for which, digest in state["digests"]}
        # else an adapter was delivered and now merged weights are, or the reverse: the same version, of another digest
        alike = state.get("adapter", self._adapter is not None) == (self._adapter is not None)
        if (served.number, served.digest) != (number, digests[number]):  # a server that lived on may be ahead
            self._version = replace(served, number=number - 1)
            self.publish()
        key = state.get("key")
        now = self._version.digest if key == self._key or not alike else self._digest_now(key)
        if alike and now != digests[number]:
            raise ConfigError(
                f"the weights that were loaded are not version {number} as it was delivered (digest "
                f"{now[:12]}…, then {digests[number][:12]}…); resume with the rollout.dtype of the run"
            )
        digests[number] = self._version.digest
        self._history = {n: WeightVersion(n, digest, self._run, self._model) for n, digest in digests.items()}
        if self._archive is not None and state["kept"] is not None:
            self._archive.load_state_dict(state["kept"])

    def close(self) -> None:
        """Gives the channel's memory back; idempotent. The engines are not closed."""
        self.channel.close()

    def _digest_now(self, key: int | None) -> str:
        """The digest of the trainer's weights. Collective; the first rank computes it."""
        with self._team.together(), self._team.whole(self._weights()) as stream:
            digests = NoChannel(digests=self._team.main, key=key).put(stream, self._dtype).digests
        return self._team.share(lambda: version_digest(digests))

    def _takes_adapters(self) -> bool:
        """True if all engines take an adapter, over this channel."""
        taken = all("adapter" in engine.capabilities for engine in self._engines)
        return bool(self._engines) and taken and self.channel.for_adapters

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are delivered, cast before ranks exchange them. Collective."""
        return self._train_engine.weights(self._dtype) if self._adapter is None else self._adapter.weights()

    def _keep(self, number: int, source: WeightSource | None) -> None:
        """Archives this version if it will be needed. Without ``source`` the trainer is read. Collective."""
        archive = self._archive
        if archive is not None:
            archive.forget(number)
        if not self._team.share(lambda: archive is not None and archive.wants(number)):
            return
        if source is None:
            with self._team.whole(self._weights()) as stream:
                source = (NoChannel() if archive is None else LocalChannel()).put(stream, self._dtype).source
        with self._team.together():
            if archive is not None:
                archive.keep(number, source)

    def _send(self, update: WeightUpdate) -> None:
        """The tensors go out while the engines prepare. What fails on either side ends the other. Collective."""
        team, beside = self._team, ThreadPoolExecutor(1, "weight-update")
        with team.together(), team.whole(self._weights()) as stream, beside as pool:
            prepared = pool.submit(self._each, lambda engine: engine.prepare_weights(update))
            try:
                self.channel.send(stream, self._dtype, lambda: prepared.done() and prepared.exception() is not None)
            except WeightUpdateFailed:
                if prepared.done():
                    prepared.result()  # the engine's own reason says more
                raise
            prepared.result()

    def _each(self, action: Callable[[InferenceEngine], None]) -> None:
        """Calls ``action`` with all engines at once; raises the first failure after all have ended."""
        if len(self._engines) < 2:  # in this thread, which has warm thread pools
            for engine in self._engines:
                action(engine)
            return
        with ThreadPoolExecutor(len(self._engines), "weight-update") as pool:
            for future in [pool.submit(action, engine) for engine in self._engines]:
                future.result()

    def _commit(self, version: WeightVersion) -> dict[str, float]:
        reports: list[dict[str, float]] = []
        failures: list[tuple[InferenceEngine, Exception]] = []
        for engine in self._engines:
            try:
                reports.append(engine.commit_weights(version))
            except Exception as error:  # the worker boundary: the other engines decide what becomes of it
                failures.append((engine, error))
                if not isinstance(error, WeightUpdateFailed):  # it may have switched, or may do so later
                    engine.close()
        if failures and not reports:
            self._discard()
            self.channel.withdraw()
            cause = failures[0][1]
            raise WeightUpdateFailed(
                f"version {version.number} was not published, {self._version.number} stays: {cause}"
            ) from cause
        for engine, _ in failures:
            engine.close()
        self._engines = tuple(engine for engine in self._engines if engine not in [failed for failed, _ in failures])
        return {key: max((report[key] for report in reports), default=0.0) for key in ("pause_s", "recompute_s")}

    def _discard(self) -> None:
        for engine in self._engines:
            try:
                engine.discard_weights()
            except Exception as error:  # the worker boundary: a dead engine has nothing to discard
                log.info("an engine could not discard what was prepared", exc_info=error)


def channel_for(engines: Sequence[InferenceEngine], disk: Callable[[], WeightChannel] | None = None) -> WeightChannel:
    """The channel that all engines can read: a folder as soon as one of them reads nothing else, for those of this machine
    read it too; else shared memory if one lives in another process. There is an engine.

    Raises:
        ConfigError: a folder is needed and there is no ``disk``, which makes it.
    """
    reads = [engine.capabilities & {"disk", "shared_memory"} for engine in engines]
    if {"disk"} in reads:
        if disk is None:
            raise ConfigError(
                "an inference engine here reads weights from a folder, and none was given; make the publisher with "
                "WeightPublisher(…, channel=DiskChannel(folder, base=model_folder))"
            )
        return disk()
    return SharedMemoryChannel() if any("shared_memory" in capabilities for capabilities in reads) else LocalChannel()
