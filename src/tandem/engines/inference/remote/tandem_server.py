"""A `tandem serve` process as an engine: tokens in, tokens out, each with the version that the server reports.

A server that a run starts gets access tokens and a folder that nobody else can read, and ends with the run.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from tandem.api.failures import DataFailure, EngineDied, InfrastructureFailure, ServerFailed, WeightUpdateFailed
from tandem.api.requests import LLMRequest, LLMResponse, StopReason
from tandem.api.weights import FolderSource, WeightUpdate, WeightVersion
from tandem.config.devices import Seat, visible
from tandem.config.errors import ConfigError
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig
from tandem.engines.inference.engine_calls import Controlled, refuse_unsupported
from tandem.engines.inference.remote.launch import (
    CALM_S,
    ServerPlace,
    fingerprint,
    own_environment,
    start_or_take_over,
    until_calm,
)
from tandem.media.parts import sent
from tandem.protocol.client import HttpClient
from tandem.workers.process import Child, inherited

PROTOCOL = 2
"""Version of the protocol of the token and control routes; a client refuses a server with another version."""

INSTANCE_HEADER = "Tandem-Instance"
"""A header of every answer that names the process that sent it. A restarted server is another process."""

CONTROL_TIMEOUT_S = 70.0
"""Seconds for pause, resume, sleep, wake and flush: the server's own 60 s, and the transfer."""

WEIGHTS_TIMEOUT_S = 660.0
"""Seconds for reading and verifying all weights, or for the switch with its recompute."""

ASK_TIMEOUT_S = 5.0
_SAMPLING = [field.name for field in fields(GenerationConfig) if field.name != "n_samples"]


class TandemServer(Controlled):
    """One server that this run has attached to; made by `attach`.

    Every request names the run, and the server refuses those of other runs. Every answer names the process, and all answers
    of another process are rejected: tokens, control answers, refusals. So if a server was restarted, or another run has
    taken its address, requests fail instead of being answered with other weights.
    """

    def __init__(
        self,
        client: HttpClient,
        run: str,
        identity: dict[str, Any],
        *,
        request_timeout_s: float,
        give_back: bool,
    ):
        self._client, self._run, self._request_timeout_s = client, run, request_timeout_s
        self._give_back, self._closed = give_back, False
        self.process: Child | None = None
        """The process that this run started, and will end; None for an attached server."""

        self._version = _version(identity)
        self._capabilities = frozenset(identity["capabilities"])
        self._identity = identity

    @classmethod
    def attach(
        cls,
        url: str,
        *,
        run: str,
        dtype: torch.dtype | None = None,
        token: str | None = None,
        admin_token: str | None = None,
        request_timeout_s: float = 3600.0,
        give_back: bool = True,
    ) -> "TandemServer":
        """Takes the server for ``run``. With ``give_back``, `close` releases the server, which then loads its first weights
        again.

        With an empty ``run``, the server may belong to anybody: it is only asked for completions, not taken or changed.

        Raises:
            ConfigError: not a `tandem serve` of this protocol, or one that computes in another precision than ``dtype``.
            ServerFailed: the server does not answer, belongs to another run (status 409), or refuses the token (401).
        """
        client = HttpClient(url, token=token, admin_token=admin_token)
        try:
            identity = client.call("/health", deadline_s=ASK_TIMEOUT_S)
            kind = identity.get("kind") if isinstance(identity, dict) else None
            if kind != "tandem" or identity.get("protocol") != PROTOCOL:
                raise ConfigError(f"{url} is no `tandem serve` of protocol {PROTOCOL}: it answers {str(identity)[:200]}")
            wanted = str(dtype).removeprefix("torch.")
            if dtype is not None and identity.get("dtype") != wanted:
                raise ConfigError(
                    f"{url} computes in {identity.get('dtype')}, rollout.dtype is {wanted}; start it with --dtype {wanted}"
                )
            client.expects = (INSTANCE_HEADER, str(identity["instance"]))
            if run:
                identity = client.call("/control/attach", {"run": run}, deadline_s=CONTROL_TIMEOUT_S, admin=True)
            give_back = give_back and bool(run)
            return cls(client, run, identity, request_timeout_s=request_timeout_s, give_back=give_back)
        except BaseException:
            client.close()
            raise

    @property
    def url(self) -> str:
        return self._client.base_url

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Generates one completion. Raises `ServerFailed` for anything but a valid answer of this run's server."""
        answer = await self._ask(request)
        try:
            return _response(request, answer, self._run)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFailed(f"{self.url}/generate gave an answer that is no completion: {error}", url=self.url) from error

    async def _ask(self, request: LLMRequest) -> Any:
        """Returns the answer. A server with another media store (on another machine) gets the media and a second request."""
        body, deadline_s = self._body(request), self._deadline_s(request)
        try:
            return await self._client.post("/generate", body, deadline_s=deadline_s)
        except DataFailure as failure:
            if failure.reason != "media_missing":
                raise
        for number in dict.fromkeys(filter(None, request.media)):
            medium = await asyncio.to_thread(sent, number)
            stored = await self._client.post("/media", medium, deadline_s=CONTROL_TIMEOUT_S)
            if stored["number"] != number:
                raise ServerFailed(
                    f"{self.url} computes another number for medium {number}; is it of another release?", url=self.url
                )
        return await self._client.post("/generate", body, deadline_s=deadline_s)

    def _body(self, request: LLMRequest) -> dict[str, Any]:
        refuse_unsupported(request, takes_media=bool(self._identity.get("media")))
        return {
            **({"media": list(request.media)} if request.media else {}),
            "input_ids": list(request.input_ids),
            "sampling": self._sampling(request),
            "noise_key": None if request.noise_key is None else list(request.noise_key),
            "deadline_s": request.deadline_s,
            "run": self._run or None,
        }

    def _sampling(self, request: LLMRequest) -> dict[str, Any]:
        """Returns the sampling settings. Lengths are cut to the model's context, as the embedded engine does; the server
        would refuse longer ones."""
        sampling = {name: getattr(request.gconfig, name) for name in _SAMPLING}
        for name in ("max_new_tokens", "min_new_tokens"):
            sampling[name] = min(sampling[name], int(self._identity["max_tokens"]))
        return sampling

    def _deadline_s(self, request: LLMRequest) -> float:
        """Returns how long to wait for the answer: the server ends a request at its deadline, and answers a little later."""
        limit = self._request_timeout_s
        return limit if request.deadline_s is None else min(limit, request.deadline_s + CONTROL_TIMEOUT_S)

    @property
    def version(self) -> WeightVersion:
        """The version that the server reported when it was attached, or that of the last commit."""
        return self._version

    @property
    def capabilities(self) -> frozenset[str]:
        return self._capabilities

    def prepare_weights(self, update: WeightUpdate) -> None:
        """Makes the server read and verify the folder, which it must see under the same path."""
        if not isinstance(update.source, FolderSource):
            raise WeightUpdateFailed(f"{self.url} reads weights from a folder only, got {type(update.source).__name__}")
        body = {"version": asdict(update.version), "folder": str(update.source.folder), "digests": dict(update.digests)}
        self._weights("prepare", body)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """Switches to the prepared weights. If the answer is lost, asks the server which version it serves now."""
        try:
            report = self._weights("commit", {"version": asdict(version)})
        except ServerFailed:
            if self._reported_version() != version:
                raise
            report = {"pause_s": 0.0, "recompute_s": 0.0}
        self._version = version
        return {name: float(report[name]) for name in ("pause_s", "recompute_s")}

    def _reported_version(self) -> WeightVersion | None:
        try:
            return _version(self._client.call("/health", deadline_s=ASK_TIMEOUT_S))
        except (InfrastructureFailure, DataFailure, KeyError, TypeError):
            return None

    def control(self, name: str, *arguments: Any) -> dict[str, float]:
        """Calls the control route of this name."""
        parts = {"parts": list(arguments[0])} if arguments else {}
        route, body = name.removesuffix("_weights"), {"run": self._run, **parts}
        self._check_taken()
        self._client.call(f"/control/{route}", body, deadline_s=CONTROL_TIMEOUT_S, admin=True)
        return {}

    def statistics(self) -> dict[str, float]:
        return dict(self._client.call("/control/statistics", deadline_s=CONTROL_TIMEOUT_S, admin=True))

    def ready(self, deadline_s: float = 15.0) -> bool:
        """True if the server reports that it has current weights and generated a token recently."""
        try:
            self._client.call("/ready", deadline_s=deadline_s)
        except InfrastructureFailure:
            return False
        return True

    def under_way(self) -> int:
        """Returns the number of requests that the server reports as running. Raises `ServerFailed` if it does not answer."""
        return int(self._client.call("/health", deadline_s=ASK_TIMEOUT_S)["under_way"])

    def close(self) -> None:
        """Ends the server if this run started it. An attached server goes on; if `attach` was called with ``give_back``, it
        loads its first weights again."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._give_back:
                with contextlib.suppress(InfrastructureFailure, DataFailure):  # the server is gone: nothing to give back
                    self._client.call("/health", deadline_s=ASK_TIMEOUT_S)  # does not wait long for a server that hangs
                    self._client.call("/control/release", {"run": self._run}, deadline_s=WEIGHTS_TIMEOUT_S, admin=True)
        finally:
            self._client.close()
            if self.process is not None:
                self.process.close()

    def let_go(self) -> None:
        """Drops only the connections. The server still belongs to this run."""
        self._closed = True
        self._client.close()

    def _check_taken(self) -> None:
        if self._closed:  # a late call must not take the server again while it is given back
            raise EngineDied(f"the client of {self.url} was closed")
        if not self._run:
            raise ServerFailed(f"{self.url} belongs to another client, so it is not changed here (no run)", url=self.url)

    def _weights(self, name: str, body: dict[str, Any]) -> Any:
        """Makes a control call about weights. A refusal becomes `WeightUpdateFailed`: the server keeps its weights."""
        self._check_taken()
        try:
            return self._client.call(f"/control/{name}", body, deadline_s=WEIGHTS_TIMEOUT_S, admin=True)
        except DataFailure as failure:
            raise WeightUpdateFailed(str(failure)) from failure
        except ServerFailed as failure:
            if failure.status in (401, 403, 404, 409):
                raise WeightUpdateFailed(str(failure)) from failure
            raise


def _version(identity: dict[str, Any]) -> WeightVersion:
    return WeightVersion(**identity["version"])


def _response(request: LLMRequest, answer: dict[str, Any], run: str) -> LLMResponse:
    """Reads and checks an answer, so that incomplete answers are not trained on.

    Raises:
        KeyError, TypeError, ValueError: the answer is not one of `/generate`, or belongs to another run.
    """
    if run and answer["run"] != run:
        raise ValueError(f"the answer belongs to run {answer['run']!r}")
    output_ids, versions = _all(answer["output_ids"], int), _all(answer["versions"], int)
    logprobs = tuple(float(x) for x in _all(answer["logprobs"], (int, float)))
    lengths = {len(output_ids), len(versions), len(logprobs)}
    if len(lengths) != 1:
        raise ValueError(f"lists of different lengths: {sorted(lengths)}")
    if len(output_ids) > request.gconfig.max_new_tokens or any(a > b for a, b in itertools.pairwise(versions)):
        raise ValueError("more tokens than requested, or versions that decrease")
    return LLMResponse(
        request.input_ids,
        output_ids,
        logprobs,
        versions,
        StopReason[answer["stop_reason"].upper()],
        request.gconfig.temperature,
        untrained_tokens=int(answer["untrained_tokens"]),
    )


def _all(values: Sequence[Any], kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    if not isinstance(values, list) or not all(isinstance(x, kind) and not isinstance(x, bool) for x in values):
        raise TypeError(f"a list has values that are not of type {kind}")
    return tuple(values)


_ADDRESS, _TOKEN, _ADMIN = "address.json", "token", "admin_token"


def start_tandem_server(
    folder: Path,
    config: EmbeddedEngineConfig,
    dtype: torch.dtype,
    device: str,
    *,
    run: str,
    log_file: Path,
    weights_roots: Sequence[Path] = (),
    cpus: Sequence[int] | None = None,
    seat: Seat | None = None,
    options: Sequence[str] = (),
    startup_timeout_s: float = 600.0,
    request_timeout_s: float = 3600.0,
    progress: Callable[[str], None] = lambda words: None,
    place: ServerPlace | None = None,
) -> TandemServer:
    """Starts a `tandem serve` on a free port of this machine and waits until it has generated a token; `close` ends it.

    ``weights_roots``: folders below which it may read weights. ``seat``: the GPU that it may use, see `map_devices`.
    ``options``: further arguments of its command. ``place``: place of a server that an earlier process may have left
    running, which is then taken over; a new server is left there for later processes.

    Raises:
        EngineDied: the server ended before that; the message has the end of its log.
        WaitTimeout: the server was not ready within ``startup_timeout_s``; the message has the end of its log.
    """
    environment = own_environment(config.threads or 1)
    if seat is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible(seat.devices, os.environ)
    whole, private = inherited() | environment, Path(tempfile.mkdtemp(prefix="tandem-server-"))

    def command(private: Path) -> list[str]:
        return [*server_command(folder, config, dtype, device, run, private, weights_roots), *options]

    try:
        return start_or_take_over(
            place,
            fingerprint(command(Path()), environment),
            start=partial(Child.start, command(private), log_file=log_file, environment=whole, cpus=cpus),
            attach=lambda: _attach(private, run, request_timeout_s),
            take=lambda facts, process: _attach_kept(facts, process, run, request_timeout_s),
            facts=lambda server: {"url": server.url, **_tokens(private)},
            what=f"tandem serve {folder.name}",
            timeout_s=startup_timeout_s,
            progress=progress,
        )
    finally:  # both sides have read it, so nothing is left behind if this run is killed later
        shutil.rmtree(private, ignore_errors=True)


def server_command(
    folder: Path,
    config: EmbeddedEngineConfig,
    dtype: torch.dtype,
    device: str,
    run: str,
    private: Path,
    weights_roots: Sequence[Path],
) -> list[str]:
    options = {
        "--port": 0,
        "--run": run,
        "--token-file": private / _TOKEN,
        "--admin-token-file": private / _ADMIN,
        "--address-file": private / _ADDRESS,
        "--dtype": str(dtype).removeprefix("torch."),
        "--device": device.partition(":")[0],  # the environment says which GPU it sees
        "--threads": config.threads,
        "--max-running": config.max_running,
        "--kv-cache-gib": config.kv_cache_gib,
        "--max-model-len": config.max_model_len,
        "--prefill-chunk-tokens": config.prefill_chunk_tokens,
    }
    words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    words += [str(word) for root in weights_roots for word in ("--weights-root", root)]
    keep = ["--keep-kv-on-update"] if config.keep_kv_on_update else []
    return [sys.executable, "-P", "-m", "tandem", "serve", str(folder), *words, *keep]


def _attach(private: Path, run: str, request_timeout_s: float) -> TandemServer:
    """Attaches to a server that this run has started. Raises `InfrastructureFailure` until the server answers and has
    generated a token."""
    try:
        url = json.loads((private / _ADDRESS).read_text())["url"]
        tokens = _tokens(private)
    except FileNotFoundError:
        raise InfrastructureFailure("server", "the server has not loaded its model") from None
    server = TandemServer.attach(url, run=run, **tokens, request_timeout_s=request_timeout_s, give_back=False)
    if not server.ready():
        server.let_go()
        raise ServerFailed(f"{url} has generated no token", url=url)
    return server


class _Tokens(TypedDict):
    token: str
    admin_token: str


def _tokens(private: Path) -> _Tokens:
    token, admin_token = ((private / name).read_text().strip() for name in (_TOKEN, _ADMIN))
    return _Tokens(token=token, admin_token=admin_token)


def _attach_kept(facts: Mapping[str, Any], process: Child, run: str, request_timeout_s: float) -> TandemServer:
    """Attaches to a kept server, once it has ended the requests of its former client.

    Raises:
        EpisodeFailure: the server belongs to another run, does not answer, or generates no token.
    """
    tokens = _Tokens(token=str(facts[_TOKEN]), admin_token=str(facts[_ADMIN]))
    server = TandemServer.attach(
        facts["url"],
        run=run,
        **tokens,
        request_timeout_s=request_timeout_s,
        give_back=False,
    )
    try:
        until_calm(server.under_way)
        if not server.ready(CALM_S):
            raise ServerFailed(f"{server.url} generated no token within {CALM_S:g} s", url=server.url)
    except BaseException:
        server.let_go()
        raise
    server.process = process
    return server
