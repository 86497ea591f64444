"""Translate a configuration of TRL or verl into one of Tandem's, and list the keys that have no meaning here.

examples:
  tandem convert-config --from trl grpo.yaml --processes 8 -o mine.yaml
  tandem convert-config --from verl run_qwen3_8b.sh > mine.yaml
"""

import argparse
import sys
from pathlib import Path

from tandem.config.commands import COMMANDS
from tandem.config.convert import TRAINERS, convert, read_foreign, trainer_of
from tandem.config.errors import ConfigError
from tandem.config.load import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="YAML or JSON, or a script (.sh) that starts the training")
    parser.add_argument("--from", dest="system", choices=("trl", "verl"), required=True, help="whose configuration it is")
    parser.add_argument("-o", "--output", metavar="OUT.yaml", type=Path, help="write it there; without, it is printed")
    parser.add_argument("--trainer", choices=[t for t in TRAINERS if t != "ppo"], help="of TRL, if the keys do not say it")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of TRL: the devices that it trained on (1)")


def run(arguments: argparse.Namespace) -> int:
    system = {"trl": "TRL", "verl": "verl"}[arguments.system]
    given = read_foreign(system, arguments.file)
    if arguments.processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {arguments.processes}")
    trainer = (arguments.trainer if system == "TRL" else None) or trainer_of(system, given)
    found = convert(trainer, given, arguments.processes)
    text = found.text()
    command = f"tandem {COMMANDS[found.kind]} {arguments.output or 'FILE'}"
    if arguments.output is None:
        print(text, end="")
    else:
        try:
            with arguments.output.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise ConfigError(f"{arguments.output} exists; give another name to -o, or remove it") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"-o {arguments.output} cannot be written: {error}") from error
        print("\n".join([f"{len(found.left)} keys are not translated:", *found.listed()]))
    guessed = f"read as {trainer} (--trainer); " if system == "TRL" and arguments.trainer is None else ""
    next_step = f"fill in what is commented out, then: {command} --dry-run"
    print(f"{guessed}{len(found.ours)} keys translated; {next_step}", file=sys.stderr)
    try:
        load_config(found.kind, None, [*found.overrides(), "train_dataset.path=addition"])
    except ConfigError as error:
        print(f"Tandem refuses it as it stands: {error}", file=sys.stderr)
    return 0
