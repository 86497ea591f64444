"""The server of `tandem serve`."""

import argparse
import asyncio
from contextlib import ExitStack
from pathlib import Path

from tandem.api.weights import WeightVersion
from tandem.cli.arguments import device_of, require
from tandem.cli.listening import Listening, access_of, check_address, media_bound
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError, TandemError
from tandem.config.rollout import EmbeddedEngineConfig, RolloutConfig
from tandem.engines.inference.build import device_map, engine_settings
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.engines.inference.serve.routes import ServedEngine
from tandem.engines.inference.serve.service import EngineService
from tandem.engines.inference.serve.text import Tokenizers
from tandem.media.parts import Allowed
from tandem.models.architecture import Architecture
from tandem.models.catalog import resolve
from tandem.models.foreign import read_hf_config
from tandem.models.hardware import resolve_dtype
from tandem.models.load import refuse_classifier
from tandem.models.media.families import family_class
from tandem.protocol.access import Access, ServiceLimits
from tandem.protocol.media_intake import MediaIntake
from tandem.state.resuming import named_model


def check(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` if the address is in use or a value is out of range."""
    check_address(arguments)
    at_least_1 = ("max-completions", "max-requests", "default-chat-tokens", "max-running", "prefill-chunk-tokens", "threads")
    given = {name.replace("_", "-"): value for name, value in vars(arguments).items() if value is not None}
    minimum = dict.fromkeys(at_least_1, 1) | {"max-model-len": 2, "shutdown-timeout": 0}
    require(
        (f"--{name}", given[name], given[name] >= least, f"at least {least}")
        for name, least in minimum.items()
        if name in given
    )
    above_0 = ("request-timeout", "kv-cache-gib")
    require((f"--{name}", given[name], 0 < given[name] < 1e9, "above 0") for name in above_0 if name in given)
    if arguments.run is not None and not 1 <= len(arguments.run) <= 256:
        raise ConfigError(f"--run must have 1 to 256 characters, got {len(arguments.run)}")
    for root in arguments.weights_root:
        if not root.is_dir():
            raise ConfigError(f"--weights-root must be a folder that exists, got {root}")


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    folder = resolve(named_model(arguments.model))
    with ExitStack() as stack:
        access, files = access_of(arguments, stack, control=True)
        service = _service(arguments, folder, stack)
        return asyncio.run(_serve(service, access, arguments, files))


async def _serve(service: EngineService, access: Access, arguments: argparse.Namespace, files: dict[str, Path]) -> int:
    listening = Listening(ServedEngine(service), access, arguments, files)
    service.on_death = listening.stop.set
    try:
        await listening.until_stopped(service.name, more=" (OpenAI clients: {url}/v1)", facts={"instance": service.instance})
    finally:
        await asyncio.to_thread(service.engine.close)  # in a thread: it joins the engine's, and the loop must go on
    if service.died is not None:
        raise TandemError(f"the engine process has died, so the server ended: {service.died}")
    return 0


def _service(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> EngineService:
    """Loads the model in its own process, which ends with ``stack``."""
    refuse_classifier(folder, read_hf_config(folder))
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
    rollout = RolloutConfig(dtype=arguments.dtype, engine=config)
    config = engine_settings(rollout, folder, device, device_map(rollout, "colocate", device, 0))
    architecture = Architecture.from_config(read_hf_config(folder))
    limits = ServiceLimits(
        max_tokens=arguments.max_model_len or architecture.max_position_embeddings,
        default_chat_tokens=arguments.default_chat_tokens,
        max_completions=arguments.max_completions,
        max_requests=arguments.max_requests,
        request_timeout_s=arguments.request_timeout,
        shutdown_s=arguments.shutdown_timeout,
    )
    bound = media_bound(arguments, stack, reads_media=family_class(read_hf_config(folder)) is not None)
    intake = MediaIntake(limits, Allowed(hosts=tuple(arguments.media_host)), bound)
    tokenizers = Tokenizers(folder, max_long=limits.max_long_prompts, intake=intake)
    stack.callback(tokenizers.close)
    version = WeightVersion(0, run=arguments.run or "")
    dtype = resolve_dtype(arguments.dtype, device)
    engine = EmbeddedProcess.start(folder, config, dtype, device, version=version, threads=threads)
    stack.callback(engine.close)
    return EngineService(
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
