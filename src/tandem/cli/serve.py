"""Serve a model over HTTP: OpenAI's protocol, and tokens with versions for training runs.

examples:
  tandem serve smollm2-135m
  tandem serve runs/addition/grpo/checkpoints/step_18 --port 8001 --name addition
  tandem serve smollm2-135m --weights-root runs          a training run may deliver weights from folders below runs/
  tandem serve smollm2-135m --host 0.0.0.0 --token-file ~/.tandem/token --allow-host gpu7.example.org

It listens on this machine only unless --host says otherwise, and then everyone needs the token. The control routes always
need the admin token. See docs/serve.md.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tandem.api.weights import WeightVersion
from tandem.cli.sampling import add_device_arguments, device_of
from tandem.config.errors import ConfigError, TandemError
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.engines.inference.serve.access import Access, is_loopback
from tandem.engines.inference.serve.app import Server
from tandem.engines.inference.serve.limits import Limits
from tandem.engines.inference.serve.service import Service
from tandem.engines.inference.serve.text import Tokenizers
from tandem.engines.inference.serve.token_files import token_from
from tandem.models.architecture import Architecture
from tandem.models.catalog import resolve
from tandem.models.foreign import read_hf_config
from tandem.models.precision import resolve_dtype
from tandem.state.machine import usable_cores

DEFAULTS = Limits(max_tokens=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder (a checkpoint), a hub name, or smollm2-135m")
    parser.add_argument("--name", help="the model's name in requests (default: the last part of MODEL)")
    address = parser.add_argument_group("address and access")
    address.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    address.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: 8000)")
    address.add_argument("--token-file", type=Path, metavar="FILE", help="token of the data routes; made if missing")
    address.add_argument(
        "--admin-token-file", type=Path, metavar="FILE", help="token of the control routes; made if missing"
    )
    address.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="a further name of this server")
    address.add_argument("--address-file", type=Path, metavar="FILE", help="written once it answers: url, pid, instance")
    weights = parser.add_argument_group("weights")
    weights.add_argument(
        "--weights-root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="new weights may be read from folders below it",
    )
    weights.add_argument("--run", help="the training run that it belongs to (default: the first that attaches)")
    _add_engine_arguments(parser.add_argument_group("engine"))
    bounds = parser.add_argument_group("bounds")
    for name, what in (
        ("max-completions", "n times prompts of one request"),
        ("max-requests", "completions under way, then 503"),
        ("default-chat-tokens", "length of a chat answer that does not say"),
    ):
        default = getattr(DEFAULTS, name.replace("-", "_"))
        bounds.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    bounds.add_argument(
        "--request-timeout", type=float, default=DEFAULTS.request_timeout_s, metavar="S", help="default: 3600"
    )
    bounds.add_argument("--shutdown-timeout", type=float, default=DEFAULTS.shutdown_s, metavar="S", help="default: 30")


def _add_engine_arguments(engine: Any) -> None:
    own = EmbeddedEngineConfig()
    add_device_arguments(engine)
    engine.add_argument("--max-running", type=int, default=own.max_running, help=f"default: {own.max_running}")
    engine.add_argument("--kv-cache-gib", type=float, default=own.kv_cache_gib, help=f"default: {own.kv_cache_gib:g}")
    chunk = own.prefill_chunk_tokens
    engine.add_argument("--prefill-chunk-tokens", type=int, default=chunk, help=f"prompt tokens a step (default: {chunk})")
    engine.add_argument("--max-model-len", type=int, help="most tokens of prompt and answer (default: the model's context)")
    engine.add_argument("--keep-kv-on-update", action="store_true", help="keep the cache of running requests over an update")


def check(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for values that cannot be."""
    at_least_1 = ("max_completions", "max_requests", "default_chat_tokens", "max_running", "prefill_chunk_tokens")
    rules = [
        *((f"--{name.replace('_', '-')}", getattr(arguments, name), 1, None) for name in at_least_1),
        ("--port", arguments.port, 0, 65535),
        ("--threads", arguments.threads, 1, None),
        ("--max-model-len", arguments.max_model_len, 2, None),
        ("--shutdown-timeout", arguments.shutdown_timeout, 0, None),
    ]
    for name, value, least, most in rules:
        if value is not None and (value < least or (most is not None and value > most)):
            raise ConfigError(f"{name} must be at least {least}{f' and at most {most}' if most else ''}, got {value}")
    for name, value in (("--request-timeout", arguments.request_timeout), ("--kv-cache-gib", arguments.kv_cache_gib)):
        if not 0 < value < 1e9:
            raise ConfigError(f"{name} must be above 0, got {value}")
    if arguments.run is not None and not 1 <= len(arguments.run) <= 256:
        raise ConfigError(f"--run must have 1 to 256 characters, got {len(arguments.run)}")
    device_of(arguments)
    if arguments.address_file is not None and not arguments.address_file.absolute().parent.is_dir():
        raise ConfigError(f"--address-file must be in a folder that exists, got {arguments.address_file}")
    for root in arguments.weights_root:
        if not root.is_dir():
            raise ConfigError(f"--weights-root must be a folder that exists, got {root}")


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    folder = resolve(arguments.model)
    with ExitStack() as stack:
        access, files = _access(arguments, stack)
        service = _service(arguments, folder, stack)
        return asyncio.run(_until_told(service, access, arguments, files))


def _access(arguments: argparse.Namespace, stack: ExitStack) -> tuple[Access, dict[str, Path]]:
    """The rules, and where the tokens are; those that were made for this process go with it."""
    files = {"admin token": arguments.admin_token_file, "token": arguments.token_file}
    needed = ["admin token"] + (["token"] if arguments.token_file or not is_loopback(arguments.host) else [])
    if not all(files[name] for name in needed):
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-serve-")))
        files = {name: file or made / name.replace(" ", "_") for name, file in files.items()}
    tokens = {name: token_from(files[name].expanduser()) for name in needed}
    if tokens["admin token"] == tokens.get("token"):
        raise ConfigError("the token and the admin token must differ: whoever may ask for text may not change the weights")
    access = Access.of(
        arguments.host, token=tokens.get("token"), admin_token=tokens["admin token"], allowed_hosts=arguments.allow_host
    )
    return access, {name: files[name] for name in needed}


def _service(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> Service:
    """Loads the model in a process of its own, which ends with the stack."""
    device = device_of(arguments)
    threads = arguments.threads or usable_cores()
    config = EmbeddedEngineConfig(
        max_running=arguments.max_running,
        kv_cache_gib=arguments.kv_cache_gib,
        prefill_chunk_tokens=arguments.prefill_chunk_tokens,
        max_model_len=arguments.max_model_len,
        keep_kv_on_update=arguments.keep_kv_on_update,
        threads=threads,
    )
    architecture = Architecture.from_config(read_hf_config(folder))
    limits = Limits(
        max_tokens=arguments.max_model_len or architecture.max_position_embeddings,
        default_chat_tokens=arguments.default_chat_tokens,
        max_completions=arguments.max_completions,
        max_requests=arguments.max_requests,
        request_timeout_s=arguments.request_timeout,
        shutdown_s=arguments.shutdown_timeout,
    )
    tokenizers = Tokenizers(folder, max_long=limits.max_long_prompts)
    stack.callback(tokenizers.close)
    version = WeightVersion(0, run=arguments.run or "")
    dtype = resolve_dtype(arguments.dtype, device)
    engine = EmbeddedProcess.start(folder, config, dtype, device, version=version, threads=threads)
    stack.callback(engine.close)
    return Service(
        engine,
        tokenizers,
        arguments.name or Path(arguments.model).name,
        folder,
        architecture.vocab_size,
        limits,
        initial=version,
        dtype=str(dtype).removeprefix("torch."),
        run=arguments.run,
        weights_roots=tuple(root.resolve(strict=True) for root in arguments.weights_root),
    )


async def _until_told(service: Service, access: Access, arguments: argparse.Namespace, files: dict[str, Path]) -> int:
    """Serves until SIGTERM or Ctrl-C; a second one does not wait for running requests."""
    stop, loop, task = asyncio.Event(), asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    service.on_death = stop.set

    def told() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    try:
        async with Server(service, access).listening(arguments.host, arguments.port) as port:
            url = f"http://{_shown(arguments.host)}:{port}"
            with _address_file(arguments.address_file, {"url": url, "pid": os.getpid(), "instance": service.instance}):
                print(f"serving {service.name} at {url} (OpenAI clients: {url}/v1)", flush=True)
                for name, file in files.items():
                    print(f"{name}: {file}", flush=True)
                await stop.wait()
                if service.died is None:
                    print(f"ending: {service.under_way} completions have {service.limits.shutdown_s:g} s", file=sys.stderr)
    except asyncio.CancelledError:
        print("ended at once, as told a second time", file=sys.stderr)
    finally:
        await asyncio.to_thread(service.engine.close)  # whoever still waits for it must not keep the loop
    if service.died is not None:
        raise TandemError(f"the engine is gone, so the server ended: {service.died}")
    return 0


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextmanager
def _address_file(file: Path | None, facts: dict[str, Any]):
    """Written whole or not at all; gone with the server."""
    if file is None:
        yield
        return
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(json.dumps(facts) + "\n")
    os.replace(beside, file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
