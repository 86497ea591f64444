"""Go on with an interrupted run, or train a finished one longer, from its newest intact checkpoint.

The configuration is read from the run's folder; `key=value` changes it. Learning rate, lengths and counts may change only
with --override. Repeating the command that began the run does the same.

examples:
  tandem continue runs/addition/first
  tandem continue runs/addition/first total_train_steps=200 --override
"""

import argparse
import importlib
from pathlib import Path

from tandem.cli.config import KINDS
from tandem.cli.running import add_choices_of_a_run, run_training
from tandem.config.errors import ConfigError
from tandem.state.existing import existing_run, run_info

FOLDER_KEYS = ("run.root", "experiment_name", "trial_name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, such as runs/addition/first")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="values to change from here on")
    add_choices_of_a_run(parser)


def interrupted(arguments: argparse.Namespace) -> str:
    found = existing_run(arguments.run.expanduser())
    return f"{found.folder} has what was done: {found.describe()}." if found else "Nothing was written."


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.run.expanduser().resolve()
    if existing_run(folder) is None or not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{arguments.run} is not the folder of a run: it has no config.yaml; `tandem runs` lists those there are"
        )
    command = run_info(folder).get("command")
    if command not in KINDS:
        raise ConfigError(
            f"{arguments.run} does not say which command began it (an older version, or a script did); repeat that command"
        )
    wrong = [key for key in arguments.keys if "=" not in key or key.partition("=")[0] in FOLDER_KEYS]
    if wrong:
        raise ConfigError(f"{wrong[0]} cannot be changed here: give key=value, with any key except {', '.join(FOLDER_KEYS)}")
    own = (f"run.root={folder.parent.parent}", f"experiment_name={folder.parent.name}", f"trial_name={folder.name}")
    arguments.arguments = [str(folder / "config.yaml"), *arguments.keys, *own]
    module = importlib.import_module(f"tandem.cli.{command}")
    return run_training(arguments, KINDS[command], module.load)
