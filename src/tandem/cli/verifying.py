"""The check of `tandem verify-weights`."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from tandem.api.engines import InferenceEngine
from tandem.api.weights import WeightVersion
from tandem.cli.arguments import require
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError
from tandem.config.fleet import FleetConfig, parse_address
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import KINDS, ServerTerms, build_inference_engine
from tandem.models.hardware import resolve_dtype
from tandem.proof.verify_server import Model, find_model, verify_engine


def check(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` if a value is out of range."""
    require(
        (
            ("--questions", arguments.questions, arguments.questions >= 1, "at least 1"),
            ("--max-new-tokens", arguments.max_new_tokens, arguments.max_new_tokens >= 1, "at least 1"),
            ("--temperature", arguments.temperature, 0 < arguments.temperature < math.inf, "above 0"),
            ("--tolerance", arguments.tolerance, arguments.tolerance is None or arguments.tolerance > 0, "above 0"),
        )
    )


def connect(address: str | None, model: Model, rollout: RolloutConfig, device: str) -> InferenceEngine:
    """Connects to the server at the address without changing it, or builds an embedded engine if there is no address."""
    threads = usable_cores()
    if address is None:
        return build_inference_engine(
            rollout, folder=model.folder, placement="colocate", threads=threads, device=device, deterministic=False
        )
    kind, url = parse_address(address)
    attach = KINDS[kind].attach
    if attach is None:
        raise ConfigError(f"{address}: Tandem cannot attach to servers of kind {kind}")
    dtype = resolve_dtype(rollout.dtype, device)
    version = WeightVersion(model.number)
    return attach(ServerTerms(rollout, rollout.engine, model.folder, dtype, device, False, version, None), url)


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    for address in arguments.servers:
        parse_address(address)
    model = find_model(arguments.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(usable_cores())
    dtype: Any = str(resolve_dtype(arguments.dtype, device)).removeprefix("torch.")
    gconfig = GenerationConfig(max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature)
    engine_config = EmbeddedEngineConfig(max_running=min(arguments.questions, 128))
    fleet = FleetConfig(token_file=arguments.token_file, admin_token_file=arguments.admin_token_file)
    rollout = RolloutConfig(dtype=dtype, engine=engine_config, fleet=fleet)
    for address in arguments.servers or [None]:
        engine = connect(address, model, rollout, device)
        try:
            result = verify_engine(
                engine,
                model,
                gconfig,
                dtype=dtype,
                questions=arguments.questions,
                tolerance=arguments.tolerance,
                device=device,
            )
        finally:
            engine.close()
        server = address or "the embedded engine"
        print(json.dumps({"server": server, **result}) if arguments.json else describe(server, model.folder, result))
    return 0


def describe(server: str, folder: Path, result: dict[str, float]) -> str:
    return (
        f"{server} serves the weights of {folder}: {result['tokens']:.0f} tokens scored again, mean difference "
        f"{result['gap/numeric']:.2g} nats; it calls them version {result['version']:.0f}."
    )
