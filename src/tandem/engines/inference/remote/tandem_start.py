"""A `tandem serve` of our own: started with tokens and a folder that nobody else can read, and ended with the run."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from tandem.api.failures import InfrastructureFailure, ServerFailed
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.remote.kept import CALM_S, Place, fingerprint, keep, take_over, until_calm
from tandem.engines.inference.remote.launch import ServerProcess, wait_ready
from tandem.engines.inference.remote.tandem_server import TandemServer

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
    startup_timeout_s: float = 600.0,
    request_timeout_s: float = 3600.0,
    progress: Callable[[str], None] = lambda words: None,
    place: Place | None = None,
) -> TandemServer:
    """Starts one on a free port of this machine and waits until it has generated a token; `close` ends it.

    ``weights_roots``: it takes weights from folders below these. ``place``: where it is taken from if it runs already, see
    `kept.py`, and left for others.

    Raises:
        EngineDied: it ended before; with the end of its log.
        WaitTimeout: it was not ready within ``startup_timeout_s``; with the end of its log.
    """
    threads = str(config.threads or 1)
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    settings = fingerprint(_command(folder, config, dtype, device, run, Path(), weights_roots), environment)
    if place is not None:
        found = take_over(place, settings, lambda facts, process: _attach_kept(facts, process, run, request_timeout_s))
        if found is not None:
            return found
    private = Path(tempfile.mkdtemp(prefix="tandem-server-"))
    process: ServerProcess | None = None

    def end() -> None:
        if process is not None:
            process.close()
        shutil.rmtree(private, ignore_errors=True)

    def ask() -> TandemServer:
        return _attach(private, run, request_timeout_s, end)

    try:
        command = _command(folder, config, dtype, device, run, private, weights_roots)
        told = None if place is None else (place.pipe, place.file)
        process = ServerProcess.start(command, log_file=log_file, environment=environment, cpus=cpus, keep=told)
        what = f"tandem serve {folder.name}"
        server = wait_ready(process, ask, what=what, timeout_s=startup_timeout_s, progress=progress)
        server.process = process
        if place is not None:
            keep(place, process, settings, {"url": server.url, **_tokens(private)})
        shutil.rmtree(private, ignore_errors=True)  # both sides have read it: nothing is left should this run be killed
        return server
    except BaseException:
        end()
        raise


def _command(
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
        "--device": device,
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


def _attach(private: Path, run: str, request_timeout_s: float, end: Callable[[], None]) -> TandemServer:
    """Raises `InfrastructureFailure` until the server answers and has generated a token."""
    try:
        url = json.loads((private / _ADDRESS).read_text())["url"]
        tokens = _tokens(private)
    except FileNotFoundError:
        raise InfrastructureFailure("server", "it has not loaded its model") from None
    server = TandemServer.attach(url, run=run, **tokens, request_timeout_s=request_timeout_s, give_back=False, on_close=end)
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


def _attach_kept(facts: Mapping[str, Any], process: ServerProcess, run: str, request_timeout_s: float) -> TandemServer:
    """Attaches to one that was kept, once it has ended the requests of the process that is gone.

    Raises:
        EpisodeFailure: it is another run's, does not answer, or generates nothing.
    """
    tokens = _Tokens(token=str(facts[_TOKEN]), admin_token=str(facts[_ADMIN]))
    server = TandemServer.attach(
        facts["url"],
        run=run,
        **tokens,
        request_timeout_s=request_timeout_s,
        give_back=False,
        on_close=process.close,
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
