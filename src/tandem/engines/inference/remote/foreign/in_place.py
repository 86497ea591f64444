"""Updates a server that holds one version at a time: pause, load, drop keys and values, label, compare, resume."""

import hashlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from tandem.api.engines import InferencePart
from tandem.api.failures import EngineDied, ServerFailed, WeightUpdateFailed
from tandem.api.weights import WeightUpdate, WeightVersion, version_digest
from tandem.engines.inference.driver import HASH_THREADS, verified
from tandem.engines.inference.remote.foreign.completions import Counters, Labels
from tandem.engines.inference.remote.foreign.protocol import ServerProtocol

CLOSE_PATIENCE_S = 5.0


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Name in the server → names of its parts in Hugging Face's files, concatenated along the first dimension."""

VOCABULARY, MULTIPLE = ("embed_tokens.weight", "lm_head.weight"), 64
"""Matrices with one row per token of the vocabulary, and the multiple up to which the server pads their rows with zeros."""

_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}


class HeldDigests:
    """Computes the SHA-256 of each tensor as the server holds it, while the tensors of an update pass by.

    Only for a server on one device, because the digests of parts of a tensor are unknown. ``dtype``: that of the server;
    tensors in another precision (a model's own files, say) are converted first, as the server does.
    """

    def __init__(self, names: Collection[str], dtype: torch.dtype):
        self._names, self._dtype = frozenset(names), dtype
        self._parts: dict[str, dict[str, bytes]] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor, digest: str | None) -> None:
        """Adds a tensor. ``digest``: its SHA-256; None if it is unknown. Parts of a fused tensor are kept until the last
        part has come."""
        if name in self._names:
            stored = self._as_held(tensor)
            missing = -stored.shape[0] % MULTIPLE if name.endswith(VOCABULARY) else 0
            if missing:
                stored = torch.cat([stored, stored.new_zeros(missing, *stored.shape[1:])])
            known_digest = digest if stored is tensor else None
            self._digests[name] = known_digest or hashlib.sha256(tensor_bytes(stored)).hexdigest()
            return
        before, _, end = name.rpartition(".")
        before, _, part = before.rpartition(".")
        fused = _FUSED_OF.get(part)
        whole = f"{before}.{fused}.{end}"
        if fused is None or whole not in self._names:
            return
        parts = self._parts.setdefault(whole, {})
        parts[part] = tensor_bytes(self._as_held(tensor))
        if len(parts) == len(FUSED[fused]):
            together = hashlib.sha256()
            for name_of_part in FUSED[fused]:
                together.update(parts[name_of_part])
            self._digests[whole] = together.hexdigest()
            del self._parts[whole]

    def _as_held(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    @property
    def digests(self) -> dict[str, str]:
        """Name in the server → SHA-256, for the tensors that the update contains."""
        return dict(self._digests)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def compare(reported: Mapping[str, str], expected: Mapping[str, str], url: str) -> int:
    """Compares the digests that a server reports with the expected ones. Returns the number of tensors that agree.

    ``reported`` may have only the beginning of each digest.

    Raises:
        ServerFailed: a tensor differs (the message names it), or none could be compared.
    """
    agreed = 0
    for name, digest in sorted(expected.items()):
        if name in reported:
            if not digest.startswith(reported[name]):
                raise ServerFailed(
                    f"after the update it holds {name!r} with checksum {reported[name][:12]}…, sent was {digest[:12]}…",
                    url=url,
                )
            agreed += 1
    if not agreed:
        raise ServerFailed("after the update none of its tensors could be compared with what was sent", url=url)
    return agreed


def changed(before: Mapping[str, str], after: Mapping[str, str], url: str) -> int:
    """Returns the number of tensors whose checksums changed, for a server whose checksums we cannot compute ourselves.
    Raises `ServerFailed` if no checksum changed."""
    count = sum(after.get(name) != digest for name, digest in before.items())
    if not count:
        raise ServerFailed("after the update all its weights are the same as before", url=url)
    return count


@dataclass(frozen=True)
class _Prepared:
    version: WeightVersion
    place: Mapping[str, Any]
    expected: dict[str, str]


class InPlaceUpdates:
    """The weights of one server, and whether it computes. Methods may be called from any thread; one runs at a time."""

    verify_budget_s, verify_every = 1.0, 20
    """If reading the server's checksums takes at most `verify_budget_s` seconds, they are compared at every update;
    otherwise at the first and at every `verify_every`-th."""

    def __init__(
        self,
        protocol: ServerProtocol,
        labels: Labels,
        counters: Counters,
        *,
        version: WeightVersion,
        dtype: torch.dtype,
    ):
        self._protocol, self._labels, self._counters = protocol, labels, counters
        self.version, self._dtype = version, dtype
        self._lock = threading.RLock()
        self._paused = self._broken = False
        self._asleep: set[InferencePart] = set()
        self._released: set[InferencePart] = set()
        """Parts whose memory the server has freed: those in `_asleep`, and if the weights sleep, the cache too."""
        self._prepared: _Prepared | None = None
        self._checksums: dict[str, str] = {}
        self._verify_s = 0.0
        self._updates = 0

    def begin(self) -> None:
        """Labels the server's present weights, and reads their checksums."""
        if self._protocol.is_paused():  # by a run that ended in the middle of an update
            self._protocol.resume()
        self._protocol.set_label(self._labels.of(self.version))
        self._checksums = self._protocol.checksums()

    def look(self) -> None:
        """Reads the version from the label of the server's weights, and changes nothing at the server.

        Raises:
            ServerFailed: the server is paused.
        """
        if self._protocol.says_paused and self._protocol.is_paused():
            url = self._protocol.http.base_url
            raise ServerFailed(
                f"{url} is paused: its weights are being changed; try again when the update has ended", url=url
            )
        self.version = replace(self.version, number=self._labels.adopt(self._protocol.label(), self.version.number))

    # ------------------------------------------------------------------ an update

    def prepare(self, update: WeightUpdate) -> None:
        """Verifies the tensors. Raises `WeightUpdateFailed` if a digest differs, or if the server cannot read weights from
        their source."""
        self.discard()
        number = update.version.number
        if version_digest(update.digests) != update.version.digest:
            raise WeightUpdateFailed(f"version {number}: the digests of its tensors do not give the version's digest")
        compared = self._protocol.bytes_are_hashed and self._due(self._updates + 1)
        digests = HeldDigests(self._checksums if compared else (), self._dtype)  # hashing reads every tensor on the CPU
        try:
            place = update.source.place()
            if place is None or not self._reads(place):
                raise WeightUpdateFailed(
                    f"{self._protocol.http.base_url} reads weights from a folder, got {type(update.source).__name__}; "
                    "deliver them with DiskChannel(folder, base=model_folder)"
                )
            for _ in _passing(update, digests):
                pass
        except (ValueError, KeyError, RuntimeError, OSError) as error:
            if isinstance(error, WeightUpdateFailed):
                raise
            raise WeightUpdateFailed(f"version {number} cannot be prepared: {error}") from error
        with self._lock:
            self._prepared = _Prepared(update.version, place, digests.digests)

    def _reads(self, place: Mapping[str, Any]) -> bool:
        """True if the server can read weights at this place."""
        protocol = self._protocol
        return (
            "folder" in place
            or ("memory" in place and protocol.reads_memory)
            or ("handles" in place and protocol.opens_handles)
        )

    def commit(self, version: WeightVersion) -> dict[str, float]:
        """Switches to the prepared weights, see `InferenceEngine.commit_weights`.

        Raises:
            WeightUpdateFailed: this version was not prepared; the server keeps its weights.
            ServerFailed: the update failed midway. The server stays paused, because its weights are unknown.
        """
        with self._lock:
            prepared = self._prepared
            if prepared is None or prepared.version != version:
                staged = "nothing" if prepared is None else f"version {prepared.version.number}"
                raise WeightUpdateFailed(f"version {version.number} cannot be committed: {staged} is prepared")
            label = self._labels.of(version)
            began = time.perf_counter()
            self._broken = True  # until the end: a failure below leaves the server with unknown weights
            self._protocol.pause()
            if "weights" in self._released:
                self._take("weights")
            self._protocol.reload(prepared.place, label)
            loaded = time.perf_counter()
            self._verify(prepared, label)
            verify_s = time.perf_counter() - loaded
            self._asleep.discard("weights")
            if "kv_cache" in self._released - self._asleep:
                self._take("kv_cache")
            if not self._paused and not self._released:
                self._protocol.resume()
            self._broken, self._prepared, self.version = False, None, version
            ended = time.perf_counter()
        return {"pause_s": ended - began, "recompute_s": 0.0, "verify_s": verify_s}

    def _verify(self, prepared: _Prepared, label: str) -> None:
        url = self._protocol.http.base_url
        self._updates += 1
        if self._protocol.label() != label:
            raise ServerFailed(f"{url} does not report the label that the run gave its weights", url=url)
        if not self._due(self._updates):
            self._counters.set("verified_tensors", 0)
            return
        began = time.perf_counter()
        checksums = self._protocol.checksums()
        count = 0
        if prepared.expected:
            count = compare(checksums, prepared.expected, url)
        elif self.version.digest not in ("", prepared.version.digest):  # "": it may have had these weights all along
            count = changed(self._checksums, checksums, url)
        self._checksums, self._verify_s = checksums, time.perf_counter() - began
        self._counters.set("verified_tensors", count)

    def _due(self, update: int) -> bool:
        """True if the server's checksums are compared at this update, counted from 1."""
        return self._verify_s <= self.verify_budget_s or update % self.verify_every == 0

    def discard(self) -> None:
        with self._lock:
            self._prepared = None

    # ------------------------------------------------------------------ control

    def pause(self) -> None:
        with self._lock:
            self._protocol.pause()
            self._paused = True

    def resume(self) -> None:
        """Lets the server go on. Raises `ServerFailed` after an update that failed midway."""
        with self._lock:
            if self._broken:
                url = self._protocol.http.base_url
                raise ServerFailed(f"{url} has unknown weights, after a failed update; deliver weights again", url=url)
            self._paused = False
            if not self._released:
                self._protocol.resume()

    def sleep(self, parts: Set[InferencePart]) -> None:
        """Frees the memory of these parts of an idle server. The server computes nothing until all parts are awake again.

        Raises:
            ServerFailed: the server did not do it. It stays paused, because it is unknown what it still holds.
        """
        with self._lock:
            asleep = {*self._asleep, *parts}
            if "weights" in parts:
                asleep.add("kv_cache")
            if missing := asleep - self._released:
                self._broken = True
                self._protocol.sleep(missing)
                self._released |= missing
                self._broken = False
            self._asleep |= parts

    def wake(self, parts: Set[InferencePart]) -> None:
        """Allocates the memory of the cache again. The memory of the weights is allocated with their next delivery."""
        with self._lock:
            self._asleep -= parts - {"weights"}
            if self._released - self._asleep and "weights" not in self._asleep:
                self._take("kv_cache")
                if not self._paused and not self._broken:
                    self._protocol.resume()

    def _take(self, part: InferencePart) -> None:
        self._protocol.wake(part)
        self._released.discard(part)

    def close(self, leave_running: bool, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """Ends this client's work. ``leave_running``: a server that this client paused is resumed, unless it hangs in an
        update. ``patience_s``: seconds for a running update to end."""
        # a commit that hangs in the server holds the lock; without a limit the end of the run would hang with it
        free = self._lock.acquire(timeout=patience_s)
        if not free:
            self._protocol.http.close()  # ends the call in which the commit hangs
            free, leave_running = self._lock.acquire(timeout=patience_s), False
        try:
            if leave_running and (self._paused or self._broken or self._released):
                with suppress(ServerFailed, EngineDied):
                    self._protocol.call("/openapi.json", timeout_s=patience_s)  # does not wait long for a server that hangs
                    for part in sorted(self._released, reverse=True):
                        self._take(part)
                    self._protocol.resume()
        finally:
            if free:
                self._lock.release()


def _passing(update: WeightUpdate, digests: HeldDigests) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the update's tensors, each verified against its digest and added to ``digests``."""
    with ThreadPoolExecutor(HASH_THREADS, "weight-digest") as pool:
        for name, tensor in verified(update, pool):
            digests.add(name, tensor, update.digests[name] if update.key is None else None)
            yield name, tensor
