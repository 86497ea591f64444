"""Go on with an interrupted run, or train a finished one longer, from its newest intact checkpoint.

The configuration is read from the run's folder; `key=value` changes it. Learning rate, lengths and counts may change only
with --override. Repeating the command that began the run does the same.

examples:
  tandem continue runs/addition/grpo
  tandem continue runs/addition/grpo total_train_steps=200 --override
"""

import argparse

from tandem.cli.arguments import run_folder
from tandem.cli.running import TRAINING, add_choices_of_a_run, command_of, left_in
from tandem.config.errors import ConfigError

FOLDER_KEYS = ("run.root", "experiment_name", "trial_name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run, such as addition/grpo")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="values to change from here on")
    add_choices_of_a_run(parser)


def interrupted(arguments: argparse.Namespace) -> str:
    return left_in(run_folder(arguments.run))


def run(arguments: argparse.Namespace) -> int:
    folder = run_folder(arguments.run).resolve()
    command = command_of(folder)
    wrong = [key for key in arguments.keys if "=" not in key or key.partition("=")[0] in FOLDER_KEYS]
    if wrong:
        raise ConfigError(f"{wrong[0]} cannot be changed here: give key=value, with any key except {', '.join(FOLDER_KEYS)}")
    own = (f"run.root={folder.parent.parent}", f"experiment_name={folder.parent.name}", f"trial_name={folder.name}")
    arguments.arguments = [str(folder / "config.yaml"), *arguments.keys, *own]
    return TRAINING[command].run(arguments)
