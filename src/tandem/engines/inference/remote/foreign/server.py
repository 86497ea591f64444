"""An inference engine behind another maker's server: tokens in, tokens out, weights updated in place.

Each token carries the version that made it by the server's own word. What a server cannot do is found out when it is
attached, by looking at its routes and by asking for a token, and refused by name.
"""

import os
import secrets
import time
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
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.remote.foreign.completions import Completions, Counters, Labels
from tandem.engines.inference.remote.foreign.in_place import CLOSE_PATIENCE_S, InPlaceUpdates
from tandem.engines.inference.remote.foreign.in_server.tandem_key import KEY_VARIABLE
from tandem.engines.inference.remote.foreign.in_server.tandem_vllm_worker import own_address
from tandem.engines.inference.remote.foreign.protocol import Facts, ServerProtocol
from tandem.engines.inference.remote.foreign.trials import Whole, ask, try_logprobs
from tandem.engines.inference.remote.foreign.weight_group import GroupDelivery, Way
from tandem.engines.inference.remote.keeping import ServerPlace, fingerprint, start_or_take_over
from tandem.engines.inference.remote.launch import CORES, CORES_WORD, ServerProcess, free_port
from tandem.models.foreign import read_hf_config
from tandem.models.media.families import family_class
from tandem.protocol.client import HttpClient

IN_SERVER = Path(__file__).with_name("in_server")
"""All of Tandem that the environment of a server gets to see."""

_KEY = "key"
"""A kept server's key stands under this name among its facts, beside its address."""

S = TypeVar("S", bound="ForeignServer")


@dataclass(frozen=True)
class StartTerms:
    """The terms on which a server is started."""

    python: str
    folder: Path
    dtype: str
    device: str
    settings: EmbeddedEngineConfig
    """``max_running``, ``kv_cache_gib`` and ``max_model_len`` are the server's too."""

    cpus: tuple[int, ...]
    seat: Seat | None = None
    """Its devices; None on a CPU, or where it may take every one that it sees."""

    sleeps: bool = False
    """It must be able to give its memory back while others use its devices."""

    media: bool = False
    """Its model takes images or sounds."""


class ForeignServer(InferenceEngine):
    """One server; made by `attach` or `start`. Subclasses name the protocol and the command."""

    protocol: ClassVar[type[ServerProtocol]]
    idle_patience_s = 10.0
    """Longest time for requests to end before `sleep`."""

    def __init__(
        self, protocol: ServerProtocol, facts: Facts, *, folder: Path, version: WeightVersion, request_timeout_s: float
    ):
        self._protocol, self._facts = protocol, facts
        self.process: ServerProcess | None = None
        """The process; None if the server was attached, for then it is not ours to end."""

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

    # ------------------------------------------------------------------ how it comes about

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
        """Attaches to a server that runs; it is told ``version`` as the name of the weights that it has.

        ``folder``: the model that it serves, for its end tokens and its tokenizer. Without ``take`` it is only asked for
        completions, whoever's it is: nothing of it is changed, and `version` is what its owner called its weights.

        Raises:
            ConfigError: it cannot do what training needs; names it, its version and the remedy.
            ServerFailed: it does not answer.
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
            raise ServerFailed(f"{url} answered as no {cls.protocol.maker} does: {error!r}", url=url) from error
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
        """Starts a server and waits until it has generated a token; it ends with this object, or with this process.

        ``cpus``: the cores that it may use; None lets it compute on ``settings.threads`` of them, the next server on others.
        ``seat``: the GPUs that it may use, see `map_devices`. ``options``: more words of its command, such as
        ``("--enforce-eager",)``. ``place``: where it is taken from if it runs already, and left for others (`keeping.py`).
        ``sleeps``: it must be able to sleep, which needs a GPU.

        Raises:
            ConfigError: as `attach`, or there is no such interpreter.
            EngineDied, WaitTimeout: it did not start; with the end of its log.
        """
        settings, port, key = settings or EmbeddedEngineConfig(), free_port(), secrets.token_urlsafe(32)
        media = family_class(read_hf_config(folder)) is not None
        name = str(dtype).removeprefix("torch.")
        terms = StartTerms(python, folder.resolve(), name, device, settings, (), seat, sleeps, media)
        words, others = cls.command(terms, 0)  # without what differs from one start to the next
        same, url = fingerprint([*words, *options], others), f"http://127.0.0.1:{port}"

        attach = partial(cls.attach, folder=folder, dtype=dtype, version=version, request_timeout_s=request_timeout_s)
        cores: tuple[int, ...] = ()

        def begin(keep: tuple[int, Path] | None) -> ServerProcess:
            nonlocal cores
            cores = tuple(cpus) if cpus is not None else CORES.take(settings.threads, None if keep is None else keep[1])
            command, environment = cls.command(replace(terms, cpus=cores), port)
            if seat is not None:
                environment["CUDA_VISIBLE_DEVICES"] = visible(seat.devices, os.environ)
            environment[KEY_VARIABLE] = key  # not among its words, which every user of the machine can read
            command += options
            return ServerProcess.start(command, log_file=log_file, environment=environment, cpus=cpus, keep=keep)

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
            same,
            start=begin,
            attach=ask,
            take=lambda facts, process: cls.attach_kept(facts, process, attach),
            facts=lambda server: {"url": url, _KEY: key, CORES_WORD: cores},
            what=f"the {cls.protocol.maker} server",
            timeout_s=startup_timeout_s,
            progress=progress,
        )

    @classmethod
    def attach_kept(cls, facts: Mapping[str, Any], process: ServerProcess, attach: Callable[..., Self]) -> Self:
        """Attaches to one that was kept, by its address and key. What it has of the process that is gone is ended first."""
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
        """The words that start the server at this port of the loopback interface, and what they add to the environment."""
        raise TypeError(f"{cls.__name__} names no command")

    def _begin(self, take: bool) -> None:
        """Makes the checks that need a token from the server."""
        self._taken = take
        (self.updates.begin if take else self.updates.look)()
        if take:
            self._protocol.give_whole_logprobs()
        self._whole = try_logprobs(self._protocol, self.name)
        piece = self._completions.read(ask(self._protocol, 1.0))
        if not piece.tokens:
            raise ServerFailed(f"{self.url} generated no token", url=self.url)
        self._protocol.check_counting(self.name)

    # ------------------------------------------------------------------ what it is

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
        """Folders are read in any case, and asked for where there is nothing better."""
        memory = "ipc" if self._protocol.opens_handles else "shared_memory" if self._protocol.reads_memory else "disk"
        sleeps = {"sleep_weights", "sleep_kv_cache"} if self._lacks_to_sleep is None else set()
        return frozenset({"in_place", memory} | sleeps)

    def take_by_group(self, backend: str = "gloo", device: str = "cpu", host: str | None = None) -> Self:
        """From now on updates that lie in this machine's memory go to it by a process group, which stays up between them; it
        needs to see no folder of ours. ``device``: what sends, for NCCL. ``host``: this machine's address as the server
        reaches it; None finds it out.

        Raises:
            ConfigError: it cannot; with the remedy.
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
        """From now on running requests keep keys and values over an update, where the server can; no request finds those of
        another then."""
        self._protocol.keeps_kv = True

    def take_by_handles(self, device: str) -> Self:
        """From now on updates that lie on ``device``, the GPU that it shares with this process, are opened there by it.

        Raises:
            ConfigError: it cannot, or says that it computes on another GPU; with the remedy.
        """
        lacking = self._protocol.lacks_to_open()
        if lacking is None:
            ours = "cpu" if device == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
            theirs = self._protocol.gpu()
            if theirs not in (None, ours):
                lacking = f"computes on GPU {theirs}, and the weights lie on GPU {ours}, which it does not open"
        if lacking is not None:
            raise ConfigError(f"{self.name} at {self.url} {lacking}. Or leave rollout.weights.channel out: by folders")
        self._protocol.opens_handles = True
        return self

    def check_sleep(self) -> None:
        """Raises `ConfigError` where this server cannot give its memory back, with the remedy."""
        if self._lacks_to_sleep is not None:
            raise ConfigError(
                f"{self.name} at {self.url} {self._lacks_to_sleep}. Or leave memory_limit_gib out and set "
                "rollout.fleet.sleep=false: the server then keeps its part of the device (rollout.fleet.memory_share)"
            )

    def check_generation(self, gconfig: GenerationConfig) -> None:
        """Raises `ConfigError` for what this server cannot sample for training, by name."""
        reason = self._cannot(gconfig)
        if reason is not None:
            raise ConfigError(f"{self.name} at {self.url} {reason}")

    def _cannot(self, gconfig: GenerationConfig) -> str | None:
        lacking = self._whole.lacks(gconfig)
        return None if lacking is None else f"{lacking}; {self._protocol.whole_remedy}"

    # ------------------------------------------------------------------ the engine

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Raises `ServerFailed` where the server is at fault."""
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
        """Prepares a folder that the server will read, verified; generation goes on."""
        self._check_taken()
        self.updates.prepare(update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """In place. ``verify_s`` is the part of ``pause_s`` in which checksums were compared.

        ``recompute_s`` is 0: running requests compute their keys and values anew when they go on, as part of generation.

        Raises:
            WeightUpdateFailed: this version was not prepared; the server serves what it served.
            ServerFailed: anything on the way. The server stays paused, for nobody knows its weights.
        """
        self._check_taken()
        return self.updates.commit(version)

    def discard_weights(self) -> None:
        self.updates.discard()

    def pause(self) -> None:
        """Requests that come meanwhile queue in the server."""
        self._check_taken()
        self.updates.pause()

    def resume(self) -> None:
        """Raises `ServerFailed` after an update that failed on the way."""
        self._check_taken()
        self.updates.resume()

    def _check_taken(self) -> None:
        if not self._taken:
            raise ServerFailed(f"{self.url} is another's to change: this client only asks (take=False)", url=self.url)

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """By the server's own routes; a server that cannot is refused with `ConfigError`, see `check_sleep`.

        Raises:
            RuntimeError: requests of this client are under way.
            ServerFailed: it did not do it.
        """
        self._check_taken()
        self.check_sleep()
        until = time.monotonic() + self.idle_patience_s
        while running := self._counters.all()["running"]:  # the fleet may have asked for a token, as a test
            if time.monotonic() > until:
                raise RuntimeError(f"sleep is refused while {running:g} requests are under way")
            time.sleep(0.01)
        self.updates.sleep(set(parts))

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """The cache takes its memory again. The weights do with the delivery that brings them."""
        self._check_taken()
        self.updates.wake(set(parts))

    def statistics(self) -> dict[str, float]:
        """Counted here, so of this client's requests. ``waiting`` is 0: the server does not say.

        ``server_tokens`` is the server's own counter, which grows while answers are still being made.
        """
        return self._counters.all() | {"server_tokens": self._protocol.tokens()}

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """A server that was attached goes on as it was found: running, and not paused by us.

        ``patience_s``: the time that an update under way has to end.
        """
        if self._closed:
            return
        self._closed = True
        if self.process is not None:  # first, for an update may hang in it
            self._protocol.http.close()
            self.process.close()
        self.updates.close(self.process is None, patience_s)
        self._protocol.leave_group(tell=self.process is None)
        self._protocol.http.close()

    def let_go(self) -> None:
        """Drops the connection and nothing else: the server is what it is, paused too, for another client of this run."""
        self._closed = True
        self._protocol.leave_group(tell=False)
        self._protocol.http.close()
        self.updates.close(leave_running=False)
