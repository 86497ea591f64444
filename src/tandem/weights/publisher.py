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
from tandem.api.weights import FolderSource, WeightSource, WeightUpdate, WeightVersion, version_digest
from tandem.config.errors import ConfigError, TandemError
from tandem.weights.channel import Delivery, LocalChannel, LocalSource, NoChannel, WeightChannel
from tandem.weights.shared_memory import SharedMemoryChannel


class VersionArchive:
    """Keeps the weights of versions whose trajectories will be scored again, in the dtype of their delivery.

    A copy in memory is as large as the weights. A version that a disk channel has in a folder takes no memory.
    """

    def __init__(self, wanted: Callable[[int], bool], most: int):
        """``wanted``: returns True for a version that will be needed after a newer one is published. ``most``: the largest
        number of versions that an archived version may be behind the newest."""
        self._wanted, self._most = wanted, most
        self._kept: dict[int, WeightSource] = {}

    def wants(self, number: int) -> bool:
        """True if this version will be needed later and is not archived yet."""
        return number not in self._kept and self._wanted(number)

    def keep(self, number: int, source: WeightSource) -> None:
        """Archives a version: a folder as it is, anything else as a copy in memory."""
        if isinstance(source, FolderSource):
            self._kept[number] = source
        else:
            copies = tuple((name, tensor.detach().to("cpu", copy=True)) for name, tensor in source.tensors())
            self._kept[number] = LocalSource(copies)

    def forget(self, newest: int) -> None:
        """Drops the copies that are too old to be needed once version ``newest`` is published."""
        self._kept = {
            number: source
            for number, source in self._kept.items()
            if isinstance(source, FolderSource) or newest - number <= self._most
        }

    def get(self, number: int) -> WeightSource | None:
        """Returns the tensors of a version; None if it is not archived or its folder is gone."""
        source = self._kept.get(number)
        return None if isinstance(source, FolderSource) and not source.folder.is_dir() else source

    def state_dict(self) -> dict[str, Any]:
        """Returns the versions in memory. Folders are left out, because they are removed when this process ends."""
        in_memory = {number: source for number, source in self._kept.items() if isinstance(source, LocalSource)}
        return {str(number): dict(source.named_tensors) for number, source in in_memory.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds the versions of ``state`` to the archive."""
        for number, tensors in state.items():
            copies = tuple((name, tensor.clone()) for name, tensor in tensors.items())
            self._kept[int(number)] = LocalSource(copies)

    @property
    def versions(self) -> list[int]:
        """Numbers of the archived versions, oldest first."""
        return [number for number in sorted(self._kept) if self.get(number) is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies in memory."""
        in_memory = [source for source in self._kept.values() if isinstance(source, LocalSource)]
        tensors: list[torch.Tensor] = [tensor for source in in_memory for _, tensor in source.named_tensors]
        return sum(tensor.nbytes for tensor in tensors)


log = logging.getLogger(__name__)

KEY = 0x5DEECE66D
"""The key of keyed digests: the same for all runs, so that the same weights have the same digest in all records."""


class WeightPublisher:
    """Delivers versions of one model, one at a time.

    Every rank makes a publisher and calls `publish`, because the stream of weights is collective; ranks without an engine
    pass an empty sequence. A failure on one rank fails on all. New engines must have loaded the trainer's first weights; the
    constructor reads these once, for the digest of version 0.
    An engine that fails to switch after another one has switched is closed, because it must not serve old weights.
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
        """``channel``: None chooses one that the engines can read, see `channel_for`; ``disk`` makes the channel for engines
        that read from a folder. ``archive``: on the first rank, keeps versions that will be scored again.
        ``team``: the ranks that train the model; None: all.

        Raises:
            ConfigError: an engine reads from a folder, and ``disk`` is missing.
        """
        self._train_engine, self._team = train_engine, team or Team()
        engines = (inference_engine,) if isinstance(inference_engine, InferenceEngine) else inference_engine
        self._engines: tuple[InferenceEngine, ...] = tuple(engines)
        self._run, self._model, self._dtype = run, model, dtype
        no_channel = NoChannel(digests=self._team.main)
        self.channel = channel or (channel_for(self._engines, disk) if self._engines else no_channel)
        self._archive = archive
        self._key = KEY if self._team.share(lambda: self.channel.takes_key) else None
        if self.channel.takes_key:
            self.channel.key = self._key
        self._streams = self._team.share(lambda: self.channel.streams)  # if so, every rank reads the stream twice
        takes_adapters = self._team.share(self._takes_adapters)
        self._adapter = train_engine.adapter if takes_adapters else None  # if set, only the adapter is delivered
        if self._adapter is not None:
            self._dtype = torch.float32  # small; the engine rounds only after merging it
        served = self._engines[0].version if self._engines else WeightVersion(0, "", run, model)
        self._version = self._team.share(lambda: served)  # shared, so that either all ranks read the weights below, or none
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
        """Number → version with its digest, for the engines' first version and all versions published so far."""
        return dict(self._history)

    def publish(self) -> dict[str, float]:
        """Delivers the trainer's weights as the next version.

        Returns metrics: ``time/prepare_s`` (stream, digests, transfer, verification; generation goes on), ``time/pause_s``
        (generation stops), ``time/recompute_s`` (keys and values of running requests, under the new weights),
        ``time/update_weights_s`` (the whole update), and ``weights/delivered_mib``. With several engines the slowest counts.

        Raises:
            WeightUpdateFailed: no engine switched; all serve the version before, and the next `publish` may succeed.
            ConfigError: the channel's `put` did not return a `Delivery`.
        """
        began = time.perf_counter()
        number = self._version.number + 1
        delivery: Delivery | None = None
        try:
            # Phase 1 may fail on any rank or engine: each engine stages the tensors beside the weights that it serves and
            # verifies them; none switches.
            delivery = self._put()
            update = self._update(number, delivery)
            version = update.version
            if self._streams:
                self._send(update)
            else:
                with self._team.together():
                    self._each(lambda engine: engine.prepare_weights(update))
        except Exception as error:  # the worker boundary: after any error, no engine may keep half an update
            self._discard()
            if delivery is not None:
                self.channel.withdraw()
            if isinstance(error, ConfigError) or (isinstance(error, EngineDied) and len(self._engines) <= 1):
                raise
            cause = error if isinstance(error, TandemError) else described(error)  # with the line of a user's channel
            raise WeightUpdateFailed(f"version {number} was not published, {self._version.number} stays: {cause}") from error
        prepared = time.perf_counter()
        # Phase 2: the engines switch, each between two decode steps. Once one has switched, there is no way back: an engine
        # that then fails to switch is closed.
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
        """Delivers the served version once more, to engines of this process whose weights slept. Collective.

        Raises:
            WeightUpdateFailed: the trainer's weights have changed since, or an engine failed.
        """
        update = self._update(self._version.number, self._put())
        with self._team.together():
            if update.version != self._version:
                raise WeightUpdateFailed(
                    f"version {self._version.number} cannot be delivered again: the trainer's weights have changed"
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
        """Describes a delivery as version ``number``. The first rank's digests count. Collective."""
        version = self._team.share(lambda: WeightVersion(number, version_digest(delivery.digests), self._run, self._model))
        adapter = None if self._adapter is None else self._adapter.terms
        return WeightUpdate(version, delivery.source, delivery.digests, adapter, delivery.key)

    def state_dict(self) -> dict[str, Any]:
        """Returns the digests of all versions, the contents of the archive, and if only adapters are published."""
        digests = [[number, version.digest] for number, version in self._history.items()]
        archived = None if self._archive is None else self._archive.state_dict()
        state = {"number": self._version.number, "digests": digests, "key": self._key, "kept": archived}
        return state | {"adapter": self._adapter is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Delivers the trainer's weights, which must be loaded already, under the number that they had. Collective.

        Raises:
            ConfigError: the weights differ from those of the state, or are delivered in another dtype.
            WeightUpdateFailed: an engine failed.
        """
        number, served = int(state["number"]), self._version
        digests = {int(which): str(digest) for which, digest in state["digests"]}
        # else an adapter was delivered and now merged weights are, or the reverse: same version, but another digest
        same_kind = state.get("adapter", self._adapter is not None) == (self._adapter is not None)
        if (served.number, served.digest) != (number, digests[number]):  # a kept server may be ahead
            self._version = replace(served, number=number - 1)
            self.publish()
        key = state.get("key")
        now = self._version.digest if key == self._key or not same_kind else self._digest_now(key)
        if same_kind and now != digests[number]:
            raise ConfigError(
                f"the weights that were loaded are not version {number} as it was delivered (digest "
                f"{now[:12]}…, delivered {digests[number][:12]}…); resume with the rollout.dtype of the run"
            )
        digests[number] = self._version.digest
        self._history = {n: WeightVersion(n, digest, self._run, self._model) for n, digest in digests.items()}
        if self._archive is not None and state["kept"] is not None:
            self._archive.load_state_dict(state["kept"])

    def close(self) -> None:
        """Frees the channel's memory; idempotent. The engines are not closed."""
        self.channel.close()

    def _digest_now(self, key: int | None) -> str:
        """Returns the digest of the trainer's weights. Collective; the first rank computes it."""
        with self._team.together(), self._team.whole(self._weights()) as stream:
            digests = NoChannel(digests=self._team.main, key=key).put(stream, self._dtype).digests
        return self._team.share(lambda: version_digest(digests))

    def _takes_adapters(self) -> bool:
        """True if all engines take adapters, and the channel does."""
        supported = all("adapter" in engine.capabilities for engine in self._engines)
        return bool(self._engines) and supported and self.channel.for_adapters

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns the tensors to deliver, cast before ranks exchange them. Collective."""
        return self._train_engine.weights(self._dtype) if self._adapter is None else self._adapter.weights()

    def _keep(self, number: int, source: WeightSource | None) -> None:
        """Archives this version if it will be needed. Without ``source``, reads the trainer's weights. Collective."""
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
        """Sends the tensors while the engines prepare. A failure on either side ends the other. Collective."""
        team, threads = self._team, ThreadPoolExecutor(1, "weight-update")
        with team.together(), team.whole(self._weights()) as stream, threads as pool:
            prepared = pool.submit(self._each, lambda engine: engine.prepare_weights(update))
            try:
                self.channel.send(stream, self._dtype, lambda: prepared.done() and prepared.exception() is not None)
            except WeightUpdateFailed:
                if prepared.done():
                    prepared.result()  # the engine's own error says more
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
            except Exception as error:  # the worker boundary: handled below, by the other engines' outcomes
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
                log.info("an engine could not discard the prepared weights", exc_info=error)


def channel_for(engines: Sequence[InferenceEngine], disk: Callable[[], WeightChannel] | None = None) -> WeightChannel:
    """Returns a channel that all engines can read: a folder if an engine can read nothing else (all engines of this machine
    read folders); otherwise shared memory if an engine is in another process. ``engines`` must not be empty.

    Raises:
        ConfigError: a folder is needed, and ``disk``, which makes the channel, is missing.
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
