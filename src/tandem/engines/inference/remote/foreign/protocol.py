"""The differences between inference servers of other makers: routes, field names, capabilities, and their weight groups.

`server.ForeignServer` is the engine; it uses one `ServerProtocol`. All control calls block, in the thread that publishes.

`ServerPrompts` converts prompts with images and sounds into files and one placeholder for each. The server's own processor
expands the placeholders again, so the prompt tokens that it reports are compared with those that are trained.

`WeightGroup` sends weights through a process group that stays up between updates; this process is its rank 0. gloo on CPUs;
NCCL on GPUs, which has never been run. A group serves one server, so that a server that dies does not disturb others. A
failure aborts the group, and with it what an NCCL call has left on the GPU; the next update makes a new group.
"""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from tandem.api.engines import InferencePart
from tandem.api.failures import DataFailure, ServerFailed
from tandem.api.media import MediaKind, Medium, reader_of
from tandem.config.errors import ConfigError, TandemError
from tandem.engines.inference.remote.foreign.in_server.tandem_vllm_worker import (
    compare_versions,
    joined,
    key_of,
)
from tandem.media import store
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.client import HttpClient

TIMEOUT_S = 300.0
POLL_S = 0.0005

_numbers = itertools.count()


class Way(NamedTuple):
    """Addresses and devices with which weights reach a server through a group."""

    host: str
    """This machine's address, as the server reaches it."""

    backend: str = "gloo"
    device: str = "cpu"
    """The device from which this process sends: a GPU if the backend is NCCL."""


class WeightGroup:
    """The trainer's end of a group. ``size``: number of all ranks, this one included."""

    def __init__(
        self,
        way: "Way",
        size: int,
        join: Callable[[str, int, str], Any],
        *,
        prefixes: bool = False,
        timeout_s: float = TIMEOUT_S,
    ):
        """``join(host, port, name)`` asks the server to join, and returns once it has. ``prefixes``: puts three prefixes
        before the keys of the store, for a server that makes its end with torch's own helper, which does the same."""
        host, backend, self.device = way
        self.timeout_s = timeout_s
        self.name = f"tandem-{next(_numbers)}"
        listening = socket.create_server((host, 0))  # torch's own socket would listen at all addresses of this machine
        port, wait = listening.getsockname()[1], timedelta(seconds=timeout_s)
        with ThreadPoolExecutor(1, "weight-group") as pool:
            joining = pool.submit(join, host, port, self.name)
            store: dist.Store = dist.TCPStore(
                host, port, size, True, wait, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            kind = "cuda" if backend == "nccl" else "cpu"
            for prefix in (self.name, f"{self.name}/", f"{kind}/") if prefixes else ():
                store = dist.PrefixStore(prefix, store)
            if not prefixes:
                keys = [key_of(rank) for rank in range(1, size)]
                while not (store.check(keys) or joining.done()):  # done: the server has died or refused
                    time.sleep(POLL_S)
                if not store.check(keys):
                    joining.result()
                compare_versions(store, 0, range(1, size), backend)
            self.group = joined(store, 0, size, backend, host, timeout_s)
            joining.result()

    def broadcast(self, tensor: torch.Tensor, receiving: "Future[Any]") -> None:
        """Sends a tensor to all ranks of the server. ``receiving``: the call that makes the server receive the tensor. If
        the call fails, raises its exception."""
        deadline = time.monotonic() + self.timeout_s
        work = self.group.broadcast([tensor.to(self.device)], dist.BroadcastOptions())
        try:
            while not work.is_completed():
                if receiving.done():
                    receiving.result()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no progress for {self.timeout_s:g} s")
                time.sleep(POLL_S)
            work.wait()
        except BaseException:
            self.close()  # at once, since the server may wait for this group
            raise
        finally:
            del work  # it holds the connections, and an exception holds this frame

    def close(self) -> None:
        """Closes this end of the group, and aborts its transfers; idempotent."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()


def group_backend(device: str, trainer: Sequence[int], server: Sequence[int]) -> str:
    """Returns the backend for the trainer's first rank and a server with these GPUs; NCCL allows one rank per GPU."""
    return "nccl" if device != "cpu" and trainer and server and not set(trainer) & set(server) else "gloo"


class GroupDelivery:
    """Holds a protocol's group: made at the start, and made again after a failure."""

    def __init__(self, way: Way):
        self.way = way
        self.group: WeightGroup | None = None

    def send(self, make: Callable[[], WeightGroup], send: Callable[[WeightGroup], None] = lambda group: None) -> None:
        """Makes the group if there is none, and sends. If either fails, closes this end and raises the exception."""
        try:
            self.group = self.group or make()
            send(self.group)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes this end of the group; idempotent."""
        if self.group is not None:
            self.group.close()
            self.group = None


class MediaFile(NamedTuple):
    """A medium as it is sent to a server."""

    kind: MediaKind
    url: str
    """A data URL with a PNG or WAV file."""


class ServerPrompts:
    """Converts prompts of one model into the form that servers take."""

    def __init__(self, folder: Path):
        self._tokenizer = load_tokenizer(folder)
        self.takes_media = reader_of(self._tokenizer) is not None
        self._written = lru_cache(1024)(self._write)

    async def pack(self, ids: Sequence[int], media: Sequence[int]) -> tuple[list[int], list[MediaFile]]:
        """Returns the tokens with one placeholder per medium, and the media in order.

        Args:
            ids: ``[S]`` tokens, with expanded placeholders.
            media: media numbers of the first tokens; the tokens after them are text.

        Raises:
            DataFailure: ``media_mismatch``: a medium is not expanded as by this model's processor. ``media_missing``: the
                media store does not have a medium. ``media_unreadable``: its file there is damaged.
        """
        try:
            collapsed, shown = self._collapsed(list(ids), media)
            return collapsed, [await asyncio.to_thread(_file, medium) for medium in shown]
        except store.MediaMissing as error:
            raise DataFailure(error.reason, str(error)) from error

    def _collapsed(self, ids: list[int], media: Sequence[int]) -> tuple[list[int], list[Medium]]:
        reader = reader_of(self._tokenizer)
        assert reader is not None
        collapsed: list[int] = []
        shown: list[Medium] = []
        done = 0
        for place, number in enumerate(media):
            if number and place >= done:
                medium = store.medium(number)
                token, written = reader.placeholder(medium.kind), self._written(medium)
                start = place - written.index(token)  # markers of tiles may stand before the first placeholder
                end = start + len(written)
                if start < done or ids[start:end] != written:
                    raise DataFailure(
                        "media_mismatch",
                        f"the tokens of medium {number} at token {place} are not the {len(written)} tokens that its "
                        "processor writes, so it cannot be sent to a server of another maker",
                    )
                collapsed += [*ids[done:start], token]
                shown.append(medium)
                done = end
        return [*collapsed, *ids[done:]], shown

    def _write(self, medium: Medium) -> list[int]:
        reader = reader_of(self._tokenizer)
        assert reader is not None
        return list(self._tokenizer(reader.expansion(medium), add_special_tokens=False)["input_ids"])


def compare_prompts(ours: Sequence[int], theirs: Sequence[int], name: str) -> None:
    """Raises `DataFailure` if a server computed other prompt tokens (``theirs``) than those that are trained (``ours``)."""
    if list(ours) == list(theirs):
        return
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    raise DataFailure(
        "media_mismatch",
        f"{name} made {len(theirs)} tokens of a prompt with images or sounds that has {len(ours)} here; they differ from "
        f"token {place} on: its processor has other settings than the model's folder, see docs/servers.md",
    )


def _file(medium: Medium) -> MediaFile:
    kind = "image/png" if medium.kind == "image" else "audio/wav"
    return MediaFile(medium.kind, f"data:{kind};base64,{base64.b64encode(store.packed(medium.number)).decode()}")


CONTROL_TIMEOUT_S = 60.0
"""Seconds for a control call: pausing waits for one decode step, all other calls are answered at once."""

RELOAD_TIMEOUT_S = 600.0
"""Seconds for loading weights, perhaps from a slow disk."""


@dataclass(frozen=True)
class Facts:
    """Facts that a server reports at the start."""

    name: str
    """Maker and version, for messages: ``vLLM 0.32.0``."""

    max_model_len: int
    dtype: str
    """The dtype as torch writes it, without ``torch.``."""


class Draw(NamedTuple):
    """Sampling settings of one piece of a completion."""

    temperature: float
    greedy: bool
    top_p: float
    top_k: int
    seed: int | None
    max_tokens: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    min_tokens: int = 0
    """Stop tokens are suppressed until the piece has this many tokens; at most ``max_tokens``."""

    top_logprobs: int = 0
    """Number of most probable tokens to report beside the drawn one; only the check at the start requests some."""


class ServerReply(NamedTuple):
    """The answer to one request: tokens, and for each its log-probability and the label of its weights."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    labels: tuple[str, ...]


class ServerProtocol(ABC):
    """One maker's HTTP interface."""

    maker: ClassVar[str]
    generate_path: ClassVar[str]
    routes: ClassVar[frozenset[str]]
    remedy: ClassVar[str]
    """Advice on starting the server so that it has `routes`, for error messages."""

    counters: ClassVar[tuple[str, ...]]
    """Counters of `/metrics` that grow with each token."""

    counting_remedy: ClassVar[str]
    """Advice on starting the server so that it has `counters`."""

    reads_memory: bool = False
    """True if `reload` takes weights from shared memory of this machine, besides a folder."""

    opens_handles: bool = False
    """True if `reload` takes weights from memory of the GPU that it shares with the trainer."""

    by_group: GroupDelivery | None = None
    """Set if `reload` sends weights through a process group, instead of naming their place in this machine's memory."""

    keeps_kv: bool = False
    """True if running requests shall keep keys and values over an update; a server that cannot keep them recomputes them."""

    ranks: int = 1
    """Number of the server's processes, each of which has a part of the model."""

    says_paused: bool = True
    whole_remedy: ClassVar[str]
    """Advice if the server's log-probabilities are those after top-p and top-k, or without suppressed stop tokens."""

    sleep_routes: ClassVar[frozenset[str]]
    sleep_remedy: ClassVar[str]
    """Advice on starting the server so that it can free its memory."""

    group_routes: ClassVar[frozenset[str]] = frozenset()
    """Routes that a process group for weights needs besides `routes`."""

    handle_routes: ClassVar[frozenset[str]] = frozenset()
    """Routes that weights on a GPU need besides `routes`."""

    sleep_on: bool = False
    """True if the server reports that it was started with the ability to sleep."""

    bytes_are_hashed: bool = True
    """True if `checksums` are SHA-256 of a tensor's bytes, or the beginning of it, like our digests."""

    def __init__(self, http: HttpClient):
        self.http = http

    # ------------------------------------------------------------------ requests

    def seed(self, stream: int, position: int) -> int:
        """Returns the 63-bit seed of a piece that begins at this position. ``stream``: the stream of the noise key.

        A server that draws successive numbers from a seed must not get the same seed for each turn of a chat.
        """
        return int.from_bytes(hashlib.sha256(f"{stream} {position}".encode()).digest()[:8], "big") >> 1

    @abstractmethod
    def body(self, number: str, ids: Sequence[int], draw: Draw, media: Sequence[MediaFile] = ()) -> dict[str, Any]:
        """Returns the body of a request. ``number``: name of the request for `abort`. ``media``: in the order of their
        placeholders in ``ids``, one each; with media, the answer shall contain the prompt tokens that the server
        computed."""

    def prompt_ids(self, answer: Any) -> tuple[int, ...]:
        """Reads the prompt tokens that the server reports. Raises like `piece`."""
        return tuple(int(token) for token in answer["prompt_token_ids"])

    @abstractmethod
    def piece(self, answer: Any) -> ServerReply:
        """Reads an answer. Raises `KeyError`, `TypeError`, `ValueError` or `IndexError` if it has another shape."""

    @abstractmethod
    def top(self, answer: Any) -> dict[int, float]:
        """Returns token → log-probability of the most probable first tokens, from the answer to a request with
        ``top_logprobs``."""

    @abstractmethod
    async def abort(self, number: str) -> None:
        """Ends a request. Its answer comes at once, with the tokens so far."""

    @abstractmethod
    def abort_all(self) -> None:
        """Ends all requests, those of other clients included."""

    # ------------------------------------------------------------------ control

    @abstractmethod
    def facts(self) -> Facts:
        """Reads the server's facts."""

    @abstractmethod
    def is_paused(self) -> bool:
        """True if the server is paused."""

    @abstractmethod
    def pause(self) -> None:
        """Pauses the server, and returns once it computes nothing. Running requests keep their state, new ones queue."""

    @abstractmethod
    def resume(self) -> None:
        """Ends the pause."""

    @abstractmethod
    def reload(self, place: Mapping[str, Any], label: str) -> None:
        """Loads the weights at a `WeightSource.place` into the paused server, drops keys and values, and sets the label."""

    @abstractmethod
    def set_label(self, label: str) -> None:
        """Sets the label of the server's present weights."""

    @abstractmethod
    def label(self) -> str:
        """Returns the label that the server reports for its weights."""

    @abstractmethod
    def checksums(self) -> dict[str, str]:
        """Returns the name of each parameter that the server holds → its checksum."""

    @abstractmethod
    def sleep(self, parts: Set[InferencePart]) -> None:
        """Frees the memory of these parts of an idle server: only the cache; or the weights, and the cache too if the cache
        is still awake. The weights are lost."""

    @abstractmethod
    def wake(self, part: InferencePart) -> None:
        """Allocates the memory of a sleeping part again. Its contents are undefined."""

    def lacks_to_sleep(self) -> str | None:
        """Returns, in words, what the server lacks to free its memory, and the remedy; None if it can."""
        if not self.sleep_on:
            return f"was not started so that it can free its memory; {self.sleep_remedy}"
        missing = sorted(self.sleep_routes - self._listed())
        return f"has no route {', '.join(missing)}; {self.sleep_remedy}" if missing else None

    def give_whole_logprobs(self) -> None:
        """Makes the server, if it can, report log-probabilities before top-p, top-k and suppressed stop tokens."""
        return

    def lacks_to_join(self) -> str | None:
        """Returns, in words, what the server lacks to receive weights through a process group, and the remedy; None if it
        can."""
        missing = sorted(self.group_routes - self._listed())
        return f"has no route {', '.join(missing)}; {self.remedy}" if missing else None

    def lacks_to_open(self) -> str | None:
        """Returns, in words, what the server lacks to open memory of a GPU, and the remedy; None if it can."""
        missing = sorted(self.handle_routes - self._listed())
        return f"has no route {', '.join(missing)}; {self.remedy}" if missing else None

    def gpu(self) -> str | None:
        """Returns the unique identifier of the server's GPU, ``cpu`` without a GPU; None if the server does not tell."""
        return None

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Returns a context for sending weights through a group, in which torch's errors become `ServerFailed`."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, TandemError):
                raise
            raise ServerFailed(f"the stream of weights to it broke off: {error}", url=self.http.base_url) from error

    def join_group(self) -> None:
        """Makes the group now, so that obstacles show before the first step. Raises `ServerFailed`."""
        assert self.by_group is not None
        with self._failing():
            self.by_group.send(self._joined)

    def _joined(self) -> WeightGroup:
        """Makes the process group for weights, in this process and in the server. Called only if `lacks_to_join` returned
        None."""
        raise NotImplementedError(f"{self.maker} joins no group")

    def leave_group(self, *, tell: bool) -> None:
        """Closes this end of the group. ``tell``: the server goes on, so it is asked to close its end too."""
        if self.by_group is not None and self.by_group.group is not None:
            name = self.by_group.group.name
            self.by_group.close()
            if tell:
                with contextlib.suppress(ServerFailed):
                    self._tell_to_leave(name)

    def _tell_to_leave(self, name: str) -> None:
        """Makes the server close its end of the group. Called only if `lacks_to_join` returned None."""
        raise NotImplementedError(f"{self.maker} joins no group")

    def call(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """Makes a control call. Raises `ServerFailed` for any error, refusals included, because no request is at fault."""
        try:
            return self.http.call(path, body, deadline_s=timeout_s, admin=True)
        except DataFailure as error:
            raise ServerFailed(str(error), url=self.http.base_url + path) from error

    def tokens(self) -> float:
        """Returns the number of tokens that the server has computed so far, for all clients; it grows while requests run.

        Raises:
            ServerFailed: the server does not report it.
        """
        pattern = rf"^(?:{'|'.join(self.counters)})(?:\{{.*\}})? (\S+)"
        return sum(float(value) for value in re.findall(pattern, self._metrics(), re.MULTILINE))

    def check_counting(self, name: str) -> None:
        """Raises `ConfigError` if the server does not count its tokens, because a busy server then looks like a dead one."""
        try:
            counts = f"\n{self.counters[0].partition(':')[0]}:" in self._metrics()
        except ServerFailed as error:
            if error.status != 404:
                raise
            counts = False
        if not counts:
            raise ConfigError(f"{name} at {self.http.base_url} counts no tokens under /metrics; {self.counting_remedy}")

    def _metrics(self) -> str:
        try:
            return self.http.call_text("/metrics", deadline_s=CONTROL_TIMEOUT_S)
        except DataFailure as error:
            raise ServerFailed(str(error), url=f"{self.http.base_url}/metrics") from error

    def _listed(self) -> set[str]:
        """Returns the routes that the server lists."""
        return set((self.call("/openapi.json") or {}).get("paths", {}))

    def check_locked(self, name: str) -> None:
        """Raises `ConfigError` if a route answers without the key. Uses GET, with which no route changes anything."""
        stranger = HttpClient(self.http.base_url)
        try:
            paths = {path for path in self._listed() if "{" not in path} | {"/metrics", "/openapi.json"}
            unlocked = [path for path in sorted(paths) if not _is_locked(stranger, path)]
        finally:
            stranger.close()
        if unlocked:
            raise ConfigError(
                f"{name} at {self.http.base_url} answers {', '.join(unlocked[:5])} without the key that it was started with."
                " Every user of this machine could change its weights. Use the version of docs/servers.md. Or start it"
                " yourself where nobody else can reach it, and attach to it with rollout.fleet.servers"
            )

    def check_routes(self, name: str) -> None:
        """Raises `ConfigError` if a required route is missing."""
        listed = self._listed()
        missing = sorted(self.routes - listed)
        if missing:
            raise ConfigError(f"{name} at {self.http.base_url} has no route {', '.join(missing)}; {self.remedy}")


def _is_locked(stranger: HttpClient, path: str) -> bool:
    """True if a route refuses a client without the key. Raises `ServerFailed` if there is no answer at all."""
    try:
        stranger.call(path, deadline_s=CONTROL_TIMEOUT_S)
    except DataFailure:
        return False
    except ServerFailed as error:
        if error.status is None:
            raise
        return error.status == 401
    return False


def labels_of(spans: Sequence[Any], count: int) -> tuple[str, ...]:
    """Returns one label per token, from spans ``{"version", "start", "end"}``. Raises `ValueError` unless the spans cover
    all tokens."""
    labels: list[str] = []
    for span in spans:
        if span["start"] != len(labels) or span["end"] < span["start"]:
            raise ValueError(f"weight versions {spans} are not one after another")
        labels += [str(span["version"])] * (span["end"] - span["start"])
    if len(labels) != count:
        raise ValueError(f"weight versions {spans} cover {len(labels)} tokens, but there are {count}")
    return tuple(labels)
