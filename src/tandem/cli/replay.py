"""Run one step of a deterministic run again, from the newest whole checkpoint before it (or from the beginning), and say
whether it comes out the same: the weights (a digest of each tensor), the metrics, the samples. The run's folder is not
touched.

`key=value` runs it with another value, to see what that changes. A checkpoint far before the step makes it long: all steps
in between are run again.

examples:
  tandem replay runs/addition/grpo --step 10
  tandem replay runs/addition/grpo --step 10 actor.optimizer.lr=1e-5

exit codes: 0 the same, 1 different (or failed), 2 it cannot be run again; says why
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tandem.cli.arguments import run_folder
from tandem.cli.training import TRAINING, command_of
from tandem.config.commands import KINDS
from tandem.config.errors import ConfigError
from tandem.config.load import load_config, plain_data

NOT_ITS_OWN = ("run", "experiment_name", "trial_name", "deterministic", "checkpoint", "recover", "tracking")
"""Keys that a replay sets by itself, and all that lie below them."""

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=run_folder, help="the run's folder, such as runs/addition/grpo")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="values to change in the replay")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to run again; the first is 1")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object")


def interrupted(arguments: argparse.Namespace) -> str:
    return f"{arguments.run} is as it was."


def run(arguments: argparse.Namespace) -> int:
    from tandem.state import replaying  # noqa: PLC0415 — imports torch

    folder, step = arguments.run.resolve(), arguments.step
    command = command_of(arguments.run)
    wrong = [key for key in arguments.keys if "=" not in key or _path(key)[0] in NOT_ITS_OWN]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} cannot be changed in a replay: give key=value, with any key except those of "
            f"{', '.join(NOT_ITS_OWN)}"
        )
    config = load_config(KINDS[command], folder / "config.yaml", arguments.keys).config
    if not config.deterministic:
        raise ConfigError(
            f"{arguments.run} was not deterministic: order and timing decided what each step saw, so none can be run again. "
            "Begin another run with deterministic=true"
            + (" and without async_training=true" if getattr(config, "async_training", False) else "")
        )
    given = [_path(key) for key in arguments.keys]
    replaying.refuse_replay(folder, step, given)
    start = replaying.start_of(folder, step)
    for text in start.skipped:
        print(f"{text}; it is skipped", file=sys.stderr)
    steps = f"step {step}" if start.step == step - 1 else f"steps {start.step + 1} to {step}"
    print(f"Running {steps} again, from {start.name}.", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="tandem-replay-") as root:
        replayed = Path(root).resolve() / "replay" / f"step-{step}"  # whatever the run's folder is called by now
        replaying.prepare_replay(folder, replayed, start)
        for leg in replaying.legs(folder, start, step, plain_data(config), given):
            status = train(command, replaying.write_leg(replayed, leg, is_last=leg.last == step), leg.last)
            if status:
                print("error: the step could not be run again; see the message above", file=sys.stderr)
                return status
        outcome = replaying.compare_replay(folder, replayed, start, step)
    print(json.dumps(asdict(outcome), ensure_ascii=False) if arguments.json else outcome.describe())
    return DIFFERENT if outcome.differences else 0


def train(command: str, config: Path, last: int) -> int:
    """Calls a command that trains up to that step, as if nobody had asked for its outcome; returns its exit code."""
    words = [command, str(config), "--until", str(last), "--json"]
    parser = argparse.ArgumentParser()
    TRAINING[command].add_arguments(parser)
    arguments = parser.parse_args(words[1:])
    arguments.command_line = words  # of the ranks that it starts
    with _nothing_told():
        return TRAINING[command].run(arguments)


@contextlib.contextmanager
def _nothing_told() -> Iterator[None]:
    """A block whose standard output is thrown away, also that of processes that it starts."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _path(key: str) -> Sequence[str]:
    return key.partition("=")[0].strip().split(".")
