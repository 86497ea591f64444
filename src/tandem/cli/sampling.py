"""Arguments of the commands that sample from a model: how it is sampled, and where it computes."""

import argparse
import math
from collections.abc import Iterable
from typing import Any

from tandem.api.lazy_torch import torch
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig

Rule = tuple[str, Any, bool, str]
"""An argument, its value, whether that can be, and the rule in words."""


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: float) -> None:
    """The options of sampling; the values given here are the defaults."""
    default = f"default: {max_new_tokens}"
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"longest answer in tokens ({default})")
    scale = f"1 is the model itself, lower is surer (default: {temperature:g})"
    parser.add_argument("--temperature", type=float, default=temperature, help=scale)
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1, off)")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers (default: 0)")


def add_device_arguments(parser: argparse._ActionsContainer) -> None:
    """The options of device and precision."""
    choices: dict[str, Any] = {"choices": ("auto", "bfloat16", "float32"), "default": "auto"}
    parser.add_argument("--dtype", **choices, help="default: what is fast here")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    choices = {"choices": ("auto", "cpu", "cuda"), "default": "auto"}
    parser.add_argument("--device", **choices, help="default: a GPU where there is one")


def require(rules: Iterable[Rule]) -> None:
    """Raises `ConfigError` for the first value that cannot be."""
    for name, value, right, rule in rules:
        if not right:
            raise ConfigError(f"{name} must be {rule}, got {value}")


def sampling_of(arguments: argparse.Namespace, *, n_samples: int = 1, top_k: int = 0) -> GenerationConfig:
    """The configuration of these arguments. Raises `ConfigError` for values that cannot be."""
    tokens, temperature, top_p, threads = (
        getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_p", "threads")
    )
    require(
        (
            ("--max-new-tokens", tokens, tokens >= 1, "at least 1"),
            ("--temperature", temperature, 0 < temperature < math.inf, "above 0 (0 is written --greedy)"),
            ("--top-p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
            ("--threads", threads, threads is None or threads >= 1, "at least 1"),
        )
    )
    return GenerationConfig(
        n_samples=n_samples,
        max_new_tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        greedy=arguments.greedy,
    )


def device_of(arguments: argparse.Namespace) -> str:
    """``cuda`` or ``cpu``. Raises `ConfigError` if a GPU is asked for and none is there."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU here; use --device cpu, or install a CUDA build of torch")
    return "cuda" if arguments.device != "cpu" and torch.cuda.is_available() else "cpu"
