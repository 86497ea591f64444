"""Arguments that several commands have: a config file and `key=value` overrides."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from tandem.config.errors import ConfigError

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\-]*=")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """`[FILE] [key=value …]`, in any order."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="[FILE] [key=value …]",
        help="a YAML file, and keys that replace its values, such as actor.optimizer.lr=1e-5 (docs/configuration.md)",
    )


def run_folder(text: str) -> Path:
    """The folder of a run, by its path or, as `tandem runs` lists it, by its name below `runs`."""
    named = Path("runs", text)
    return named if named.exists() and not Path(text).exists() else Path(text).expanduser()


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
