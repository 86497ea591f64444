"""An inference engine behind another maker's server: tokens in, tokens out, weights updated in place.

Each token carries the version that the server reports for it. When a server is attached, its routes and a test token show
what it cannot do, and whether its log-probabilities are those of the right distribution; if not, it is refused by name.
"""

import math
import os
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar
from urllib.parse import urlsplit

import torch

from tandem.api.engines import InferenceEngine, InferencePart
from tandem.api.failures import EngineDied, ServerFailed
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.weights import WeightUpdate, WeightVersion
from tandem.config.devices import Seat, visible
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.remote.foreign.completions import Completions, Counters, Labels
from tandem.engines.inference.remote.foreign.in_place import CLOSE_PATIENCE_S, InPlaceUpdates
from tandem.engines.inference.remote.foreign.in_server.tandem_key import KEY_VARIABLE
from tandem.engines.inference.remote.foreign.in_server.tandem_vllm_worker import own_address
from tandem.engines.inference.remote.foreign.protocol import Draw, Facts, GroupDelivery, ServerProtocol, Way
from tandem.engines.inference.remote.launch import CORES, CORES_WORD, ServerPlace, fingerprint, free_port, start_or_take_over
from tandem.models.foreign import read_hf_config
from tandem.models.media.families import family_class
from tandem.protocol.client import HttpClient
from tandem.workers.process import Child, inherited

PROBE_IDS = tuple(range(1, 9))

LEAST_SHIFT = 0.02
"""Smallest shift of a log-probability, in nats, that shows that the server renormalises. A smaller shift may be rounding."""


@dataclass(frozen=True)
class Whole:
    """Records whether log-probabilities stay those of softmax(logits / temperature) with two sampling options."""

    truncated: bool
    """True if top-p and top-k do not change log-probabilities."""

    suppressed: bool
    """True if suppressed stop tokens (for a minimum number of tokens) do not change log-probabilities."""

    def lacks(self, gconfig: GenerationConfig) -> str | None:
        """Returns, in words, why the server's log-probabilities are wrong with these settings; None if they are right."""
        if (gconfig.top_p < 1.0 or gconfig.top_k > 0) and not self.truncated:
            return (
                f"gives log-probabilities after top-p and top-k, not before (gconfig.top_p={gconfig.top_p}, "
                f"top_k={gconfig.top_k})"
            )
        if gconfig.min_new_tokens > 0 and not self.suppressed:
            return (
                "gives log-probabilities without the stop tokens that it suppresses "
                f"(gconfig.min_new_tokens={gconfig.min_new_tokens})"
            )
        return None


def ask(protocol: ServerProtocol, temperature: float, **changes: Any) -> Any:
    """Requests one token after a fixed prompt, and returns the answer. ``changes``: fields of `Draw`."""
    draw = Draw(temperature, False, 1.0, 0, 0, 1, (), ())._replace(**changes)
    body = protocol.body(uuid.uuid4().hex, PROBE_IDS, draw)
    return protocol.call(protocol.generate_path, body)


def try_logprobs(protocol: ServerProtocol, name: str) -> Whole:
    """Tests which log-probabilities a server gives.

    They must be those of softmax(logits / temperature): half the temperature doubles every difference. They should stay the
    same if the draw is restricted to some tokens; a server that renormalises adds -log(probability of these tokens) to all
    of them. If that cannot be measured, the server counts as one that renormalises.

    Raises:
        ConfigError: they ignore the temperature; the message has the remedy.
        ServerFailed: the most probable tokens differ from request to request.
    """
    plain, cold = (protocol.top(ask(protocol, t, top_logprobs=5)) for t in (1.0, 0.5))
    common = sorted(plain.keys() & cold.keys(), key=plain.__getitem__, reverse=True)
    url = protocol.http.base_url
    if len(common) < 2:
        raise ServerFailed(f"the most probable tokens of {url} differ from request to request", url=url)
    ratio = (cold[common[0]] - cold[common[-1]]) / max(plain[common[0]] - plain[common[-1]], 1e-6)
    if not 1.8 < ratio < 2.2:
        raise ConfigError(f"{name} at {url} gives log-probabilities that ignore the temperature; {protocol.remedy}")
    first, second = common[:2]
    truncated = protocol.top(ask(protocol, 1.0, top_logprobs=5, top_k=2))
    suppressed = protocol.top(ask(protocol, 0.5, top_logprobs=5, min_tokens=1, stop_ids=(first,)))
    return Whole(
        _keeps(truncated.get(first), plain[first], math.exp(plain[first]) + math.exp(plain[second])),
        _keeps(suppressed.get(second), cold[second], 1.0 - math.exp(cold[first])),
    )


def _keeps(logprob: float | None, whole: float, share: float) -> bool:
    """True if a log-probability is that of the whole distribution, not one renormalised over ``share`` of it."""
    shift = -math.log(min(1.0, max(share, 1e-9)))
    return logprob is not None and shift >= LEAST_SHIFT and abs(logprob - whole) < shift / 2


IN_SERVER = Path(__file__).with_name("in_server")
"""Folder of the only modules of Tandem that run in a server's environment."""

_KEY = "key"
"""Name of a kept server's key among the facts that are stored for it."""

S = TypeVar("S", bound="ForeignServer")


@dataclass(frozen=True)
class StartTerms:
    """Settings with which a server is started."""

    python: str
    folder: Path
    dtype: str
    device: str
    settings: EmbeddedEngineConfig
    """Engine settings, of which ``max_running``, ``kv_cache_gib`` and ``max_model_len`` apply to the server."""

    cpus: tuple[int, ...]
    seat: Seat | None = None
    """The server's GPUs; None on a CPU, or if it may use every GPU that it sees."""

    sleeps: bool = False
    """True if the server must be able to free its memory while others use its GPUs."""

    media: bool = False
    """True if the model takes images or sounds."""


class ForeignServer(InferenceEngine):
    """One server; made by `attach` or `start`. Subclasses define the protocol and the command."""

    protocol: ClassVar[type[ServerProtocol]]
    idle_patience_s = 10.0
    """Seconds that `sleep` waits for requests to end."""

    def __init__(
        self, protocol: ServerProtocol, facts: Facts, *, folder: Path, version: WeightVersion, request_timeout_s: float
    ):
        self._protocol, self._facts = protocol, facts
        self.process: Child | None = None
        """The process that this run started, and will end; None for an attached server."""

        self._closed, self._taken, self._whole = False, True, Whole(True, True)
        self._lacks_to_sleep = protocol.lacks_to_sleep()
        self._counters = Counters()
        labels = Labels(self.url)
        self._completions = Completions(
            protocol,
            facts,
            labels,
            self._counters,
            folder=folder,
            request_timeout_s=request_timeout_s,
            cannot=self._cannot,
        )
        dtype: torch.dtype = getattr(torch, facts.dtype)
        self.updates = InPlaceUpdates(protocol, labels, self._counters, version=version, dtype=dtype)

    # ------------------------------------------------------------------ starting and attaching

    @classmethod
    def attach(
        cls,
        url: str,
        *,
        folder: Path,
        dtype: torch.dtype,
        version: WeightVersion,
        token: str | None = None,
        admin_token: str | None = None,
        request_timeout_s: float = 600.0,
        take: bool = True,
    ) -> Self:
        """Attaches to a running server, and labels its present weights ``version``.

        ``folder``: folder of the model that the server serves, from which end tokens and tokenizer are read. Without
        ``take``, the server may belong to another client: this engine then only requests completions and changes nothing,
        and `version` is read from the owner's label.

        Raises:
            ConfigError: the server cannot do what training needs; the message has its version and the remedy.
            ServerFailed: the server does not answer.
        """
        http = HttpClient(url, token=token, admin_token=admin_token)
        try:
            protocol = cls.protocol(http)
            facts, wanted = protocol.facts(), str(dtype).removeprefix("torch.")
            if facts.dtype != wanted:
                raise ConfigError(
                    f"{facts.name} at {url} computes in {facts.dtype}, rollout.dtype is {wanted}; "
                    f"start it with --dtype {wanted}"
                )
            server = cls(protocol, facts, folder=folder, version=version, request_timeout_s=request_timeout_s)
            server._begin(take)
            return server
        except (KeyError, TypeError, ValueError, IndexError) as error:
            http.close()
            if isinstance(error, ConfigError):
                raise
            raise ServerFailed(f"{url} did not answer like {cls.protocol.maker}: {error!r}", url=url) from error
        except BaseException:
            http.close()
            raise

    @classmethod
    def start(
        cls: type[S],
        folder: Path,
        *,
        python: str,
        log_file: Path,
        dtype: torch.dtype,
        version: WeightVersion,
        device: str = "cpu",
        settings: EmbeddedEngineConfig | None = None,
        cpus: Sequence[int] | None = None,
        seat: Seat | None = None,
        options: Sequence[str] = (),
        startup_timeout_s: float = 600.0,
        request_timeout_s: float = 600.0,
        progress: Callable[[str], None] = lambda words: None,
        place: ServerPlace | None = None,
        sleeps: bool = False,
    ) -> S:
        """Starts a server and waits until it has generated a token. It ends with this object, or with this process.

        ``cpus``: the cores that it may use; None: ``settings.threads`` cores, which the next server does not use. ``seat``:
        the GPUs that it may use, see `map_devices`. ``options``: further arguments of its command, such as
        ``("--enforce-eager",)``. ``place``: place of a server that an earlier process may have left running, which is then
        taken over; a new server is left there for later processes. ``sleeps``: it must be able to sleep, which needs a GPU.

        Raises:
            ConfigError: as `attach`, or there is no such interpreter.
            EngineDied, WaitTimeout: the server did not start; the message has the end of its log.
        """
        settings, port, key = settings or EmbeddedEngineConfig(), free_port(), secrets.token_urlsafe(32)
        media = family_class(read_hf_config(folder)) is not None
        name = str(dtype).removeprefix("torch.")
        terms = StartTerms(python, folder.resolve(), name, device, settings, (), seat, sleeps, media)
        words, variables = cls.command(terms, 0)  # without what differs from one start to the next
        settings_mark, url = fingerprint([*words, *options], variables), f"http://127.0.0.1:{port}"

        attach = partial(cls.attach, folder=folder, dtype=dtype, version=version, request_timeout_s=request_timeout_s)
        cores: tuple[int, ...] = ()

        def begin(keep: tuple[int, Path] | None) -> Child:
            nonlocal cores
            cores = tuple(cpus) if cpus is not None else CORES.take(settings.threads, None if keep is None else keep[1])
            command, environment = cls.command(replace(terms, cpus=cores), port)
            if seat is not None:
                environment["CUDA_VISIBLE_DEVICES"] = visible(seat.devices, os.environ)
            environment[KEY_VARIABLE] = key  # not in its command, which every user of the machine can read
            command += options
            return Child.start(command, log_file=log_file, environment=inherited() | environment, cpus=cpus, keep=keep)

        def ask() -> S:
            server = attach(url, token=key)
            try:
                server._protocol.check_locked(server.name)
            except BaseException:
                server.let_go()
                raise
            return server

        return start_or_take_over(
            place,
            settings_mark,
            start=begin,
            attach=ask,
            take=lambda facts, process: cls.attach_kept(facts, process, attach),
            facts=lambda server: {"url": url, _KEY: key, CORES_WORD: cores},
            what=f"the {cls.protocol.maker} server",
            timeout_s=startup_timeout_s,
            progress=progress,
        )

    @classmethod
    def attach_kept(cls, facts: Mapping[str, Any], process: Child, attach: Callable[..., Self]) -> Self:
        """Attaches to a kept server by its address and key. First ends the requests that its former client left."""
        http = HttpClient(facts["url"], token=facts[_KEY])
        try:
            cls.protocol(http).abort_all()
        finally:
            http.close()
        server = attach(facts["url"], token=facts[_KEY])
        server.process = process
        return server

    @classmethod
    def command(cls, terms: StartTerms, port: int) -> tuple[list[str], dict[str, str]]:
        """Returns the command that starts the server at this port of the loopback interface, and its additional environment
        variables."""
        raise TypeError(f"{cls.__name__} defines no command")

    def _begin(self, take: bool) -> None:
        """Takes the server, or only reads its version, and makes the checks that need a token from it."""
        self._taken = take
        (self.updates.begin if take else self.updates.look)()
        if take:
            self._protocol.give_whole_logprobs()
        self._whole = try_logprobs(self._protocol, self.name)
        piece = self._completions.read(ask(self._protocol, 1.0))
        if not piece.tokens:
            raise ServerFailed(f"{self.url} generated no token", url=self.url)
        self._protocol.check_counting(self.name)

    # ------------------------------------------------------------------ properties and settings

    @property
    def url(self) -> str:
        return self._protocol.http.base_url

    @property
    def name(self) -> str:
        """Maker and version: ``vLLM 0.32.0``."""
        return self._facts.name

    @property
    def version(self) -> WeightVersion:
        return self.updates.version

    @property
    def capabilities(self) -> frozenset[str]:
        """The server's capabilities. Of the ways in which it can read weights, only the fastest is listed; it can always
        read folders."""
        memory = "ipc" if self._protocol.opens_handles else "shared_memory" if self._protocol.reads_memory else "disk"
        sleeps = {"sleep_weights", "sleep_kv_cache"} if self._lacks_to_sleep is None else set()
        return frozenset({"in_place", memory} | sleeps)

    def take_by_group(self, backend: str = "gloo", device: str = "cpu", host: str | None = None) -> Self:
        """Makes updates go from this machine's memory to the server through a process group, which stays up between updates.
        The server then needs no access to our folders. ``device``: the device that sends, for NCCL. ``host``: this machine's
        address as the server reaches it; None: determined here.

        Raises:
            ConfigError: the server cannot do it; the message has the remedy.
        """
        lacking = self._protocol.lacks_to_join()
        if lacking is None:
            reached = host or own_address(urlsplit(self.url).hostname or "127.0.0.1")
            self._protocol.by_group, self._protocol.reads_memory = GroupDelivery(Way(reached, backend, device)), True
            try:
                self._protocol.join_group()
            except ServerFailed as error:  # libraries of other versions, a firewall
                lacking = f"does not join the process group of the weights: {error}"
        if lacking is not None:
            raise ConfigError(f"{self.name} at {self.url} {lacking}. Or leave rollout.weights.channel out: by folders")
        return self

    def keep_kv(self) -> None:
        """Makes running requests keep keys and values over updates, if the server can. Requests then do not share cached
        prefixes."""
        self._protocol.keeps_kv = True

    def take_by_handles(self, device: str) -> Self:
        """Makes the server open updates in the memory of ``device``, the GPU that it shares with this process.

        Raises:
            ConfigError: the server cannot, or reports another GPU; the message has the remedy.
        """
        lacking = self._protocol.lacks_to_open()
        if lacking is None:
            own_gpu = "cpu" if device == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
            server_gpu = self._protocol.gpu()
            if server_gpu not in (None, own_gpu):
                lacking = f"computes on GPU {server_gpu}, and the weights lie on GPU {own_gpu}, which it does not open"
        if lacking is not None:
            raise ConfigError(f"{self.name} at {self.url} {lacking}. Or leave rollout.weights.channel out: by folders")
        self._protocol.opens_handles = True
        return self

    def check_sleep(self) -> None:
        """Raises `ConfigError` if this server cannot free its memory; the message has the remedy."""
        if self._lacks_to_sleep is not None:
            raise ConfigError(
                f"{self.name} at {self.url} {self._lacks_to_sleep}. Or leave memory_limit_gib out and set "
                "rollout.fleet.sleep=false: the server then keeps its part of the device (rollout.fleet.memory_share)"
            )

    def check_generation(self, gconfig: GenerationConfig) -> None:
        """Raises `ConfigError` if this server would return wrong log-probabilities with a setting; the message names it."""
        reason = self._cannot(gconfig)
        if reason is not None:
            raise ConfigError(f"{self.name} at {self.url} {reason}")

    def _cannot(self, gconfig: GenerationConfig) -> str | None:
        lacking = self._whole.lacks(gconfig)
        return None if lacking is None else f"{lacking}; {self._protocol.whole_remedy}"

    # ------------------------------------------------------------------ the engine

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Generates one completion. Raises `ServerFailed` if the server is at fault."""
        if self._closed:
            raise EngineDied(f"the client of {self.url} was closed")
        try:
            return await self._completions.complete(request)
        except ServerFailed as error:
            ended = self.process.how_it_ended() if self.process is not None else None
            if ended is not None:
                raise EngineDied(f"{self.name} at {self.url}: {ended}") from error
            raise

    def prepare_weights(self, update: WeightUpdate) -> None:
        """Verifies an update that the server will read; generation goes on."""
        self._check_taken()
        self.updates.prepare(update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """Switches in place. ``verify_s`` is the part of ``pause_s`` in which checksums were compared.

        ``recompute_s`` is 0: running requests recompute their keys and values when they go on, as part of generation.

        Raises:
            WeightUpdateFailed: this version was not prepared; the server keeps its weights.
            ServerFailed: the update failed midway. The server stays paused, because its weights are unknown.
        """
        self._check_taken()
        return self.updates.commit(version)

    def discard_weights(self) -> None:
        self.updates.discard()

    def pause(self) -> None:
        """Pauses the server. Requests that come meanwhile queue there."""
        self._check_taken()
        self.updates.pause()

    def resume(self) -> None:
        """Ends the pause. Raises `ServerFailed` after an update that failed midway."""
        self._check_taken()
        self.updates.resume()

    def _check_taken(self) -> None:
        if not self._taken:
            raise ServerFailed(f"{self.url} belongs to another client, so it is not changed here (take=False)", url=self.url)

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """Frees memory with the server's own routes. Raises `ConfigError` for a server that cannot, see `check_sleep`.

        Raises:
            RuntimeError: requests of this client are under way.
            ServerFailed: the server did not do it.
        """
        self._check_taken()
        self.check_sleep()
        until = time.monotonic() + self.idle_patience_s
        while running := self._counters.all()["running"]:  # the fleet may have probed the server
            if time.monotonic() > until:
                raise RuntimeError(f"sleep is refused while {running:g} requests are under way")
            time.sleep(0.01)
        self.updates.sleep(set(parts))

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """Allocates the memory of the cache again. The memory of the weights is allocated with their next delivery."""
        self._check_taken()
        self.updates.wake(set(parts))

    def statistics(self) -> dict[str, float]:
        """Returns counts of this client's requests. ``waiting`` is 0, because the server does not report it.

        ``server_tokens`` is the server's own counter, which grows while answers are still being made.
        """
        return self._counters.all() | {"server_tokens": self._protocol.tokens()}

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """Ends the server if this run started it. An attached server goes on as before: running, and not paused by us.

        ``patience_s``: seconds for a running update to end.
        """
        if self._closed:
            return
        self._closed = True
        if self.process is not None:  # first, because an update may hang in it
            self._protocol.http.close()
            self.process.close()
        self.updates.close(self.process is None, patience_s)
        self._protocol.leave_group(tell=self.process is None)
        self._protocol.http.close()

    def let_go(self) -> None:
        """Drops only the connection. The server is left as it is, even paused, to another client of this run."""
        self._closed = True
        self._protocol.leave_group(tell=False)
        self._protocol.http.close()
        self.updates.close(leave_running=False)
