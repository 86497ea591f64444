"""The kinds of server, one line each in `KINDS`: how a run starts one, and how it attaches to one by its address."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.engines.inference.fleet.members import Server
from tandem.engines.inference.remote.foreign.server import ForeignServer
from tandem.engines.inference.remote.foreign.sglang import SGLangServer
from tandem.engines.inference.remote.foreign.vllm import VllmServer
from tandem.engines.inference.remote.kept import Keeping, Place
from tandem.engines.inference.remote.tandem_server import TandemServer
from tandem.engines.inference.remote.tandem_start import start_tandem_server

logger = logging.getLogger("tandem.fleet")


@dataclass(frozen=True)
class Terms:
    """What the servers of a run are made with."""

    rollout: RolloutConfig
    engine: EmbeddedEngineConfig
    """Settings of one server, its threads settled."""

    folder: Path
    """The model."""

    dtype: torch.dtype
    device: str
    deterministic: bool
    version: WeightVersion
    """What a server that the run starts holds at first; names the run that it belongs to. Without a run, servers are only
    asked, and stay their owners'."""

    run_folder: Path | None = None
    """Where servers write their logs."""

    weights_folder: Path | None = None
    """Below it lie the weights that servers read from a disk."""

    gconfig: GenerationConfig | None = None
    """What the run will sample by: a server that cannot is refused."""

    keeping: Keeping | None = None
    """Where servers that the run starts are kept beyond its process; None: they end with it."""

    def place(self, name: str) -> Place | None:
        return None if self.keeping is None else self.keeping.place(name)


class Kind(NamedTuple):
    """How to come by a server of a kind; None where that way does not exist."""

    start: Callable[[Terms, str], InferenceEngine] | None
    """Starts one; the name is unique in the run."""

    attach: Callable[[Terms, str], InferenceEngine] | None
    """Connects to the one at a URL."""


def _embedded(terms: Terms, name: str) -> InferenceEngine:
    return EmbeddedProcess.start(
        terms.folder,
        terms.engine,
        terms.dtype,
        terms.device,
        version=terms.version,
        threads=terms.engine.threads or 1,
        deterministic=terms.deterministic,
        timeout_s=terms.rollout.fleet.startup_timeout_s,
    )


def _start_tandem(terms: Terms, name: str) -> InferenceEngine:
    if terms.weights_folder is not None:
        terms.weights_folder.mkdir(parents=True, exist_ok=True)
    return start_tandem_server(
        terms.folder,
        terms.engine,
        terms.dtype,
        terms.device,
        run=terms.version.run,
        log_file=log_file(terms, name),
        weights_roots=() if terms.weights_folder is None else (terms.weights_folder,),
        startup_timeout_s=terms.rollout.fleet.startup_timeout_s,
        request_timeout_s=terms.rollout.fleet.request_timeout_s,
        progress=partial(logger.info, "%s"),
        place=terms.place(name),
    )


def _attach_tandem(terms: Terms, url: str) -> InferenceEngine:
    fleet = terms.rollout.fleet
    return TandemServer.attach(
        url,
        run=terms.version.run,
        dtype=terms.dtype,
        token=read_token(fleet.token_file, "token_file"),
        admin_token=read_token(fleet.admin_token_file, "admin_token_file"),
        request_timeout_s=fleet.request_timeout_s,
    )


def _start_foreign(server: type[ForeignServer], kind: str, terms: Terms, name: str) -> InferenceEngine:
    engine = server.start(
        terms.folder,
        python=python_of(terms.rollout, kind),
        log_file=log_file(terms, name),
        dtype=terms.dtype,
        version=terms.version,
        device=terms.device,
        settings=terms.engine,
        startup_timeout_s=terms.rollout.fleet.startup_timeout_s,
        request_timeout_s=terms.rollout.fleet.request_timeout_s,
        progress=partial(logger.info, "%s"),
        place=terms.place(name),
    )
    return _able(engine, terms)


def _attach_foreign(server: type[ForeignServer], terms: Terms, url: str) -> InferenceEngine:
    fleet = terms.rollout.fleet
    engine = server.attach(
        url,
        folder=terms.folder,
        dtype=terms.dtype,
        version=terms.version,
        token=read_token(fleet.token_file, "token_file"),
        admin_token=read_token(fleet.admin_token_file, "admin_token_file"),
        request_timeout_s=fleet.request_timeout_s,
        take=bool(terms.version.run),
    )
    return _able(engine, terms)


def _able(engine: ForeignServer, terms: Terms) -> ForeignServer:
    """The server, if it can sample what the run trains on; else it is closed. Raises `ConfigError`."""
    try:
        if terms.gconfig is not None and terms.version.run:
            engine.check_generation(terms.gconfig)
    except ConfigError:
        engine.close()
        raise
    return engine


KINDS: dict[str, Kind] = {
    "embedded": Kind(_embedded, None),
    "tandem": Kind(_start_tandem, _attach_tandem),
    "vllm": Kind(partial(_start_foreign, VllmServer, "vllm"), partial(_attach_foreign, VllmServer)),
    "sglang": Kind(partial(_start_foreign, SGLangServer, "sglang"), partial(_attach_foreign, SGLangServer)),
}


def started(terms: Terms, kind: str, number: int) -> Server:
    """A server that the run starts. Raises `ConfigError` where a run cannot start that kind."""
    name, start = f"{kind}-{number}", KINDS[kind].start if kind in KINDS else None
    if start is None:
        raise ConfigError(f"rollout.backend={terms.rollout.backend}: a run cannot start servers of kind {kind}")
    return Server(name, lambda: start(terms, name), owned=True, holds=terms.version.number)


def attached(terms: Terms, kind: str, url: str) -> Server:
    """A server that somebody else started. Raises `ConfigError` where a run cannot attach to that kind."""
    attach = KINDS[kind].attach if kind in KINDS else None
    if attach is None:
        raise ConfigError(f"{kind}={url}: a run cannot attach to servers of kind {kind}")
    return Server(f"{kind}={url}", lambda: attach(terms, url), owned=False)


def read_token(file: str | None, key: str) -> str | None:
    """The token in a file, without the white space around it.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if file is None:
        return None
    try:
        token = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"rollout.fleet.{key}={file} cannot be read: {error.strerror or error}") from error
    if not token:
        raise ConfigError(f"rollout.fleet.{key}={file} is empty; it must hold the token")
    return token


def log_file(terms: Terms, name: str) -> Path:
    """Where a server that the run starts writes what it says."""
    return (terms.run_folder or Path.cwd()) / "servers-logs" / f"{name}.log"


def python_of(rollout: RolloutConfig, kind: str) -> str:
    """The interpreter of the environment that has this kind of server."""
    fleet = rollout.fleet
    return {"vllm": fleet.vllm_python, "sglang": fleet.sglang_python}[kind] or sys.executable
