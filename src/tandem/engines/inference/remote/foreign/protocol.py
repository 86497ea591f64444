"""The differences between inference servers of other makers: routes, field names, and what they can do.

`server.ForeignServer` is the engine; it is given one of these. All control calls block, in the thread that publishes.
"""

import contextlib
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tandem.api.engines import InferencePart
from tandem.api.failures import DataFailure, ServerFailed, TandemError
from tandem.config.errors import ConfigError
from tandem.engines.inference.remote.foreign.prompts import MediaFile
from tandem.engines.inference.remote.foreign.weight_group import GroupDelivery, WeightGroup
from tandem.protocol.client import HttpClient

CONTROL_TIMEOUT_S = 60.0
"""Pausing waits for one decode step; the others answer at once."""

RELOAD_TIMEOUT_S = 600.0
"""Reading a model from a slow disk."""


@dataclass(frozen=True)
class Facts:
    """A server's words about itself at the start."""

    name: str
    """Maker and version, for messages: ``vLLM 0.32.0``."""

    max_model_len: int
    dtype: str
    """The dtype as torch writes it, without ``torch.``."""


class Draw(NamedTuple):
    """The sampling of one piece of a completion."""

    temperature: float
    greedy: bool
    top_p: float
    top_k: int
    seed: int | None
    max_tokens: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    min_tokens: int = 0
    """Stop tokens are suppressed until so many tokens of this piece are there; at most ``max_tokens``."""

    top_logprobs: int = 0
    """Most probable tokens to report beside the drawn one; only the check at the start asks for some."""


class ServerReply(NamedTuple):
    """The answer to one request to the server: tokens with their log-probabilities, and the label of the weights of each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    labels: tuple[str, ...]


class ServerProtocol(ABC):
    """One maker's HTTP interface."""

    maker: ClassVar[str]
    generate_path: ClassVar[str]
    routes: ClassVar[frozenset[str]]
    remedy: ClassVar[str]
    """The way to start the server so that they are."""

    counters: ClassVar[tuple[str, ...]]
    """Counters of `/metrics` that grow with each token."""

    counting_remedy: ClassVar[str]
    """The way to start the server so that they are there."""

    reads_memory: bool = False
    """True if `reload` takes weights from shared memory of this machine, besides a folder."""

    opens_handles: bool = False
    """True if `reload` takes weights from memory of the GPU that it shares with the trainer."""

    by_group: GroupDelivery | None = None
    """Set where `reload` sends weights in this machine's memory by a process group, instead of a place in it."""

    keeps_kv: bool = False
    """True if running requests keep keys and values over an update. Of a maker that cannot they are computed anew."""

    ranks: int = 1
    """Processes of the server, each of which has a part of the model."""

    says_paused: bool = True
    whole_remedy: ClassVar[str]
    """The remedy where log-probabilities are those after top-p and top-k, or without suppressed stop tokens."""

    sleep_routes: ClassVar[frozenset[str]]
    sleep_remedy: ClassVar[str]
    """The way to start the server so that it can give its memory back."""

    group_routes: ClassVar[frozenset[str]] = frozenset()
    """Routes that a process group for weights needs besides `routes`."""

    handle_routes: ClassVar[frozenset[str]] = frozenset()
    """Routes that weights on a GPU need besides `routes`."""

    sleep_on: bool = False
    """True if it was started so, by its own word."""

    bytes_are_hashed: bool = True
    """True if `checksums` are SHA-256 of a tensor's bytes, as ours are (or their beginning)."""

    def __init__(self, http: HttpClient):
        self.http = http

    # ------------------------------------------------------------------ requests

    def seed(self, stream: int, position: int) -> int:
        """The seed of a piece that begins at this position, ``stream`` being that of the noise key; 63 bits.

        A server that draws one number after another from it must not get the same one for each turn of a chat.
        """
        return int.from_bytes(hashlib.sha256(f"{stream} {position}".encode()).digest()[:8], "big") >> 1

    @abstractmethod
    def body(self, number: str, ids: Sequence[int], draw: Draw, media: Sequence[MediaFile] = ()) -> dict[str, Any]:
        """The request; ``number`` is its name for `abort`. ``media``: in the order of their placeholders in ``ids``,
        one for each; then the answer says what the prompt became."""

    def prompt_ids(self, answer: Any) -> tuple[int, ...]:
        """The tokens of the prompt that the server computed, by its own word. Raises as `piece`."""
        return tuple(int(token) for token in answer["prompt_token_ids"])

    @abstractmethod
    def piece(self, answer: Any) -> ServerReply:
        """Reads an answer. Raises `KeyError`, `TypeError`, `ValueError` or `IndexError` where it has another shape."""

    @abstractmethod
    def top(self, answer: Any) -> dict[int, float]:
        """Token → log-probability of the most probable first tokens, from the answer to a request with ``top_logprobs``."""

    @abstractmethod
    async def abort(self, number: str) -> None:
        """Ends a request; its answer comes at once, with what it has."""

    @abstractmethod
    def abort_all(self) -> None:
        """Ends all requests, whoever's they are."""

    # ------------------------------------------------------------------ control

    @abstractmethod
    def facts(self) -> Facts:
        """Asks the server what it is."""

    @abstractmethod
    def is_paused(self) -> bool:
        """True if somebody paused it."""

    @abstractmethod
    def pause(self) -> None:
        """Returns when nothing is computed any more; running requests keep their state, new ones queue."""

    @abstractmethod
    def resume(self) -> None:
        """Go on."""

    @abstractmethod
    def reload(self, place: Mapping[str, Any], label: str) -> None:
        """Paused: reads the weights at a `WeightSource.place`, drops all keys and values, and takes the label."""

    @abstractmethod
    def set_label(self, label: str) -> None:
        """Says what the weights that it has are called."""

    @abstractmethod
    def label(self) -> str:
        """Its label of its weights."""

    @abstractmethod
    def checksums(self) -> dict[str, str]:
        """Name of each parameter that the server holds → its checksum."""

    @abstractmethod
    def sleep(self, parts: Set[InferencePart]) -> None:
        """Idle: gives the memory of these parts back, which are awake: the cache, or what is left with the weights. Weights
        are lost."""

    @abstractmethod
    def wake(self, part: InferencePart) -> None:
        """Takes the memory of a part that sleeps again; what is in it is worth nothing."""

    def lacks_to_sleep(self) -> str | None:
        """In words, what the server lacks to give its memory back, and the remedy; None where it can."""
        if not self.sleep_on:
            return f"was not started to give its memory back; {self.sleep_remedy}"
        missing = sorted(self.sleep_routes - self._listed())
        return f"has no route {', '.join(missing)}; {self.sleep_remedy}" if missing else None

    def give_whole_logprobs(self) -> None:
        """Asks a server that can for log-probabilities before top-p, top-k and suppressed stop tokens, from now on."""
        return

    def lacks_to_join(self) -> str | None:
        """In words, what the server lacks to take weights by a process group, and the remedy; None where it can."""
        missing = sorted(self.group_routes - self._listed())
        return f"has no route {', '.join(missing)}; {self.remedy}" if missing else None

    def lacks_to_open(self) -> str | None:
        """In words, what the server lacks to open memory of a GPU, and the remedy; None where it can."""
        missing = sorted(self.handle_routes - self._listed())
        return f"has no route {', '.join(missing)}; {self.remedy}" if missing else None

    def gpu(self) -> str | None:
        """The own name of the GPU that the server computes on, ``cpu`` without one; None if it does not say."""
        return None

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """A block in which weights go out by a group: what torch says of it is a fault of the server."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, TandemError):
                raise
            raise ServerFailed(f"the stream of weights to it broke off: {error}", url=self.http.base_url) from error

    def join_group(self) -> None:
        """Makes the group now: what keeps it from being made is known before the first step. Raises `ServerFailed`."""
        assert self.by_group is not None
        with self._failing():
            self.by_group.send(self._joined)

    def _joined(self) -> WeightGroup:
        """Both ends of a new group; only asked where `lacks_to_join` found nothing."""
        raise NotImplementedError(f"{self.maker} joins no group")

    def leave_group(self, *, tell: bool) -> None:
        """Closes this end of the group. ``tell``: the server lives on, and closes its end too."""
        if self.by_group is not None and self.by_group.group is not None:
            name = self.by_group.group.name
            self.by_group.close()
            if tell:
                with contextlib.suppress(ServerFailed):
                    self._tell_to_leave(name)

    def _tell_to_leave(self, name: str) -> None:
        """The server's end of the group; only asked where `lacks_to_join` found nothing."""
        raise NotImplementedError(f"{self.maker} joins no group")

    def call(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """A control call. Raises `ServerFailed` for whatever goes wrong, also a refusal: no request is at fault."""
        try:
            return self.http.call(path, body, deadline_s=timeout_s, admin=True)
        except DataFailure as error:
            raise ServerFailed(str(error), url=self.http.base_url + path) from error

    def tokens(self) -> float:
        """Tokens that the server has computed so far, for whomever; it grows while requests are under way.

        Raises:
            ServerFailed: it does not say.
        """
        pattern = rf"^(?:{'|'.join(self.counters)})(?:\{{.*\}})? (\S+)"
        return sum(float(value) for value in re.findall(pattern, self._metrics(), re.MULTILINE))

    def check_counting(self, name: str) -> None:
        """Raises `ConfigError` where the server does not count its tokens: a busy one could not be told from a dead one."""
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
        """All routes, by the server's own list."""
        return set((self.call("/openapi.json") or {}).get("paths", {}))

    def check_locked(self, name: str) -> None:
        """Raises `ConfigError` where a route answers without the key; with GET, which no route that acts is asked by."""
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
        """Raises `ConfigError` where a route that is needed is not there."""
        listed = self._listed()
        missing = sorted(self.routes - listed)
        if missing:
            raise ConfigError(f"{name} at {self.http.base_url} has no route {', '.join(missing)}; {self.remedy}")


def _is_locked(stranger: HttpClient, path: str) -> bool:
    """True if a route refuses a caller without the key. Raises `ServerFailed` if there is no answer at all."""
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
    """One label a token, from spans ``{"version", "start", "end"}``. Raises `ValueError` where they do not cover all."""
    labels: list[str] = []
    for span in spans:
        if span["start"] != len(labels) or span["end"] < span["start"]:
            raise ValueError(f"weight versions {spans} are not one after another")
        labels += [str(span["version"])] * (span["end"] - span["start"])
    if len(labels) != count:
        raise ValueError(f"weight versions {spans} speak of {len(labels)} tokens, there are {count}")
    return tuple(labels)
