"""Check a reward before it trains anything: its speed, whether it says the same twice, what makes it hang, what forges it,
and how often a reference answer fails. Works for every reward that judges inside episodes.

examples:
  tandem check-reward math data/gsm8k/test.jsonl --rows 50
  tandem check-reward "code(credit=share)" data/mbpp/mbpp.jsonl
  tandem check-reward my_reward.py:reward my/data.jsonl answer_column=label

Ctrl-C ends it early, and tells what was seen until then. The exit code is 0 if no problem was seen, and 1 otherwise.
"""

import argparse
import contextlib
import json
import sys

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError

READ = ("split", "prompt_column", "answer_column", "prompt_suffix")
"""Keys of the data set that the command line takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="the reward, as reward=SPEC spells it")
    parser.add_argument("data", metavar="DATA", help="folder, file, hub name, addition, or reasoning_gym:NAME")
    parser.add_argument("columns", nargs="*", metavar="key=value", help=f"how to read the data: {', '.join(READ)}")
    parser.add_argument("--rows", type=int, default=20, help="only the first rows (default: 20)")
    parser.add_argument("--timeout", type=float, default=15.0, help="deadline of a call in seconds (reward_timeout_s)")
    parser.add_argument("--json", action="store_true", help="print all that was seen as one JSON object")


def data_config(arguments: argparse.Namespace) -> DatasetConfig:
    """Reads the data set's configuration from the command line.

    Raises:
        ConfigError: a key is unknown, or a number is out of range.
    """
    if arguments.rows < 1 or not arguments.timeout > 0:
        raise ConfigError(f"--rows must be at least 1 and --timeout above 0, got {arguments.rows} and {arguments.timeout:g}")
    given = dict(text.partition("=")[::2] for text in arguments.columns)
    for key in given:
        if key not in READ:
            raise ConfigError(f"unknown key {key!r}; the keys are {', '.join(READ)}, as in answer_column=label")
    return DatasetConfig(path=arguments.data, max_rows=arguments.rows, size=arguments.rows, **given)


def run(arguments: argparse.Namespace) -> int:
    """`tandem check-reward`."""
    config = data_config(arguments)
    from tandem.data.dataset import load_dataset  # noqa: PLC0415 — the rest imports torch
    from tandem.evaluation.reward_check import check_reward, report  # noqa: PLC0415
    from tandem.rewards.build import build_reward  # noqa: PLC0415

    rows = load_dataset(config).rows
    reward = build_reward(arguments.spec, timeout_s=arguments.timeout)
    with contextlib.closing(reward), contextlib.redirect_stdout(sys.stderr):
        result = check_reward(reward, rows, arguments.timeout)
    print(json.dumps(result.as_json(), ensure_ascii=True) if arguments.json else report(result))
    return 1 if result.problems else 0
