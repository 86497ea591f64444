"""Arguments that several commands have: a configuration file and `key=value` overrides, a run, and the options of commands
that sample from a model."""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.api.lazy_torch import torch
from tandem.config.errors import ConfigError
from tandem.config.load import KINDS
from tandem.config.rollout import GenerationConfig
from tandem.state.resuming import NamedRun, named_run, no_run

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\-]*=")


class TandemCommand(NamedTuple):
    """A command for `tandem.cli.main`, in a file with others. A module that has these names is a command too."""

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None = None
    """Runs the command; None if that is in a file of its own, which imports torch."""

    interrupted: Callable[[argparse.Namespace], str] | None = None
    """Returns the text to print after Ctrl-C."""


def add_config_arguments(parser: argparse.ArgumentParser, *, kinds: bool = False) -> None:
    """Adds `[FILE] [key=value …]`, in any order. With ``kinds`` also adds `--for`, the command whose configuration it is."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="[FILE] [key=value …]",
        help="a YAML file, and keys that replace its values, such as actor.optimizer.lr=1e-5 (docs/configuration.md)",
    )
    if kinds:
        parser.add_argument(
            "--for", dest="kind", choices=KINDS, default="train", help="the command whose configuration it is"
        )


def count(text: str) -> int:
    """Parses an integer of at least 1. A type for `argparse`, which turns the error into a usage message."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run_at(text: str) -> NamedRun:
    """Returns the run that RUN or RUN@STEP names, and the step. Raises `ConfigError`, which lists the runs, if there is no
    such run."""
    run = named_run(text)
    if run is None:
        raise ConfigError(no_run(text))
    return run


def run_folder(text: str) -> Path:
    """Returns the folder of the run with this name. Raises `ConfigError` if there is no such run, or if ``text`` names a
    step (RUN@STEP)."""
    run = run_at(text)
    if run.step is not None:
        raise ConfigError(f"this command takes a whole run: leave @{run.step} out")
    return run.folder


def configured_run(text: str) -> Path:
    """Returns the folder of the run with this name. Raises `ConfigError` as `run_folder`, and if it has no configuration."""
    folder = run_folder(text)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
    return folder


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits arguments into the configuration file (or `None`) and the ``key=value`` overrides.

    Raises:
        ConfigError: there is more than one file.
    """
    overrides = [text for text in arguments if _OVERRIDE.match(text)]
    files = [text for text in arguments if not _OVERRIDE.match(text)]
    if len(files) > 1:
        raise ConfigError(
            f"one configuration file at most, got {', '.join(files)}; values are given as key=value without spaces"
        )
    return (files[0] if files else None), overrides


Rule = tuple[str, Any, bool, str]
"""(argument, value, whether the value is valid, the rule in words)."""


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: float) -> None:
    """Adds the options of sampling. ``max_new_tokens`` and ``temperature``: the defaults of the options of these names."""
    default = f"default: {max_new_tokens}"
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"longest answer in tokens ({default})")
    scale = f"1 is the model's own distribution, lower is sharper (default: {temperature:g})"
    parser.add_argument("--temperature", type=float, default=temperature, help=scale)
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1, off)")
    parser.add_argument("--greedy", action="store_true", help="always the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers (default: 0)")


def add_device_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the options of device and precision."""
    choices: dict[str, Any] = {"choices": ("auto", "bfloat16", "float32"), "default": "auto"}
    parser.add_argument("--dtype", **choices, help="default: what is fast here")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    choices = {"choices": ("auto", "cpu", "cuda"), "default": "auto"}
    parser.add_argument("--device", **choices, help="default: a GPU where there is one")


def require(rules: Iterable[Rule]) -> None:
    """Raises `ConfigError` for the first invalid value."""
    for name, value, right, rule in rules:
        if not right:
            raise ConfigError(f"{name} must be {rule}, got {value}")


def sampling_of(arguments: argparse.Namespace, *, n_samples: int = 1, top_k: int = 0) -> GenerationConfig:
    """Builds the sampling configuration from the arguments. Raises `ConfigError` if a value is out of range."""
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
    """Returns ``cuda`` or ``cpu``. Raises `ConfigError` if `--device cuda` is given and there is no GPU."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU here; use --device cpu, or install a CUDA build of torch")
    return "cuda" if arguments.device != "cpu" and torch.cuda.is_available() else "cpu"
