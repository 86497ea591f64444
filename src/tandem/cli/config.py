"""`tandem config` and `tandem convert-config`."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tandem.cli.arguments import TandemCommand, add_config_arguments
from tandem.cli.running import resolve
from tandem.config.convert import TRAINERS, convert, read_foreign, trainer_of
from tandem.config.errors import ConfigError
from tandem.config.load import COMMANDS, KINDS, describe, load_config


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, kinds=True)
    parser.add_argument("--json", action="store_true", help="one JSON object: config, and sources by key")


def _run(arguments: argparse.Namespace) -> int:
    resolved = resolve(arguments, KINDS[arguments.kind])
    if arguments.json:
        shown = {"config": asdict(resolved.config), "sources": dict(resolved.sources)}
        print(json.dumps(shown, ensure_ascii=False, default=str))
    else:
        print(describe(resolved))
    return 0


CONFIG = TandemCommand(
    """Show the resolved configuration: every key, its value, and where the value comes from. Nothing is started.

examples:
  tandem config examples/gsm8k_grpo.yaml seed=3
  tandem config --for preference loss=kto
""",
    _add_arguments,
    _run,
)


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="YAML or JSON, or a script (.sh) that starts the training")
    parser.add_argument("--from", dest="system", choices=("trl", "verl"), required=True, help="whose configuration it is")
    parser.add_argument("-o", "--output", metavar="OUT.yaml", type=Path, help="the file to write (default: print it)")
    parser.add_argument("--trainer", choices=[t for t in TRAINERS if t != "ppo"], help="TRL's trainer (default: guessed)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="with TRL: number of training devices (1)")


def _convert(arguments: argparse.Namespace) -> int:
    system = {"trl": "TRL", "verl": "verl"}[arguments.system]
    foreign = read_foreign(system, arguments.file)
    if arguments.processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {arguments.processes}")
    trainer = (arguments.trainer if system == "TRL" else None) or trainer_of(system, foreign)
    converted = convert(trainer, foreign, arguments.processes)
    text = converted.text()
    command = f"tandem {COMMANDS[converted.kind]} {arguments.output or 'FILE'}"
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
        print("\n".join([f"{len(converted.left)} keys are not translated:", *converted.listed()]))
    guessed = f"read as {trainer} (--trainer); " if system == "TRL" and arguments.trainer is None else ""
    next_step = f"fill in what is commented out, then: {command} --dry-run"
    print(f"{guessed}{len(converted.ours)} keys translated; {next_step}", file=sys.stderr)
    try:
        load_config(converted.kind, None, [*converted.overrides(), "train_dataset.path=addition"])
    except ConfigError as error:
        print(f"Tandem refuses it as it stands: {error}", file=sys.stderr)
    return 0


CONVERT_CONFIG = TandemCommand(
    """Translate a configuration of TRL or verl into Tandem's format, and list the keys that have no counterpart in Tandem.

examples:
  tandem convert-config --from trl grpo.yaml --processes 8 -o mine.yaml
  tandem convert-config --from verl run_qwen3_8b.sh > mine.yaml
""",
    _add_convert_arguments,
    _convert,
)
