"""Show what a run would do: its models, the stages of a step, and the fields that flow between them. Nothing is started.

examples:
  tandem graph examples/gsm8k_grpo.yaml
  tandem graph examples/gsm8k_grpo.yaml algorithm=ppo --png ppo.png
  tandem graph examples/addition_preference.yaml --for preference --mermaid
  tandem graph examples/gsm8k_grpo.yaml --json | jq '.edges[] | select(.after == "publish")'
"""

import argparse
import json
from pathlib import Path

from tandem.cli.arguments import add_config_arguments
from tandem.cli.main import import_object
from tandem.cli.running import resolve
from tandem.config.errors import ConfigError
from tandem.config.load import KINDS
from tandem.config.preference import may_sleep
from tandem.flow.draw import data, mermaid, picture, text
from tandem.flow.plan import plan_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, kinds=True)
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--mermaid", action="store_true", help="print a Mermaid flowchart, for a Markdown page")
    formats.add_argument("--json", action="store_true", help="print models, stages and which stage waits for which, as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a picture into this file, always in PNG format")


def run(arguments: argparse.Namespace) -> int:
    config = resolve(arguments, KINDS[arguments.kind]).config
    plan = plan_run(config)
    slept = ""
    if may_sleep(config):
        sleep = import_object("tandem.flow.sleep_plan")  # imports torch
        sleeping = sleep.sleep_plan_here(config, plan)
        slept = "" if sleeping is None else sleep.describe_sleep(sleeping)
    print(json.dumps(data(plan), indent=2) if arguments.json else mermaid(plan) if arguments.mermaid else text(plan))
    if slept and not (arguments.mermaid or arguments.json):
        print(slept)
    if arguments.png is not None:
        try:
            picture(plan, arguments.png)
        except OSError as error:
            raise ConfigError(f"--png {arguments.png} cannot be written: {error}") from error
    return 0
