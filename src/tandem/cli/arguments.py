"""Arguments that several commands have: a config file and `key=value` overrides."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from tandem.config.commands import KINDS
from tandem.config.errors import ConfigError
from tandem.state.named import NamedRun, named_run, no_run

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\-]*=")


def add_config_arguments(parser: argparse.ArgumentParser, *, kinds: bool = False) -> None:
    """`[FILE] [key=value …]`, in any order. ``kinds``: and `--for`, the command whose configuration it is."""
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
    """The number that is written; for `argparse`, which refuses one below 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def run_at(text: str) -> NamedRun:
    """The run that is named, with its step. Raises `ConfigError`: there is none; says which there are."""
    found = named_run(text)
    if found is None:
        raise ConfigError(no_run(text))
    return found


def run_folder(text: str) -> Path:
    """The folder of the run that is named. Raises `ConfigError`: there is none, or a step is written behind it."""
    found = run_at(text)
    if found.step is not None:
        raise ConfigError(f"the whole run is meant: leave @{found.step} out")
    return found.folder


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """(file, overrides).

    Raises:
        ConfigError: more than one file.
    """
    overrides = [text for text in arguments if _OVERRIDE.match(text)]
    files = [text for text in arguments if not _OVERRIDE.match(text)]
    if len(files) > 1:
        raise ConfigError(
            f"one configuration file at most, got {', '.join(files)}; values are given as key=value without spaces"
        )
    return (files[0] if files else None), overrides
