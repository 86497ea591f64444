"""Show the resolved configuration: every key, its value, and where the value comes from. Nothing is started.

examples:
  tandem config examples/gsm8k_grpo.yaml seed=3
  tandem config --for preference loss=kto
"""

import argparse
import json
from dataclasses import asdict

from tandem.cli.arguments import add_config_arguments
from tandem.cli.running import resolve
from tandem.config.commands import KINDS
from tandem.config.load import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, kinds=True)
    parser.add_argument("--json", action="store_true", help="one JSON object: config, and sources by key")


def run(arguments: argparse.Namespace) -> int:
    resolved = resolve(arguments, KINDS[arguments.kind])
    if arguments.json:
        shown = {"config": asdict(resolved.config), "sources": dict(resolved.sources)}
        print(json.dumps(shown, ensure_ascii=False, default=str))
    else:
        print(describe(resolved))
    return 0
