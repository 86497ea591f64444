"""Show the resolved configuration: every key, its value, and where the value comes from. Nothing is started.

examples:
  tandem config examples/gsm8k_grpo.yaml seed=3
  tandem config --for preference loss=kto
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from tandem.cli.arguments import add_config_arguments
from tandem.cli.running import resolve
from tandem.cli.training import KINDS
from tandem.config.errors import ConfigError
from tandem.config.load import Resolved, describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--for", dest="kind", choices=KINDS, default="train", help="the command whose configuration it is")
    parser.add_argument("--sft", action="store_const", const="sft", dest="kind", help="the same as --for sft")
    parser.add_argument("--json", action="store_true", help="one JSON object: config, and sources by key")


def resolve_kind(arguments: argparse.Namespace) -> Resolved[Any]:
    """The configuration of these arguments, for the command that ``--for`` names.

    Raises:
        ConfigError: anything about the configuration; where another command has all of its keys, it names that.
    """
    try:
        return resolve(arguments, KINDS[arguments.kind])
    except ConfigError as error:
        others = [kind for kind in KINDS if "unknown key" in str(error) and not _has_unknown_key(arguments, kind)]
        if not others:
            raise
        fit = " or ".join(f"--for {kind}" for kind in others)
        raise ConfigError(f"this is a configuration for {fit}; for --for {arguments.kind}: {error}") from error


def _has_unknown_key(arguments: argparse.Namespace, kind: str) -> bool:
    """True if these arguments have a key that the configuration of this command does not have."""
    try:
        resolve(arguments, KINDS[kind])
    except ConfigError as error:
        return "unknown key" in str(error)
    return False


def run(arguments: argparse.Namespace) -> int:
    resolved = resolve_kind(arguments)
    if arguments.json:
        shown = {"config": asdict(resolved.config), "sources": dict(resolved.sources)}
        print(json.dumps(shown, ensure_ascii=False, default=str))
    else:
        print(describe(resolved))
    return 0
