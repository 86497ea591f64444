"""Run one step of a deterministic run again, from the newest whole checkpoint before it, and say whether it comes out the
same: the weights (a digest of each tensor), the metrics, the samples. The run's folder is not touched.

`key=value` runs it with another value, to see what that changes. A checkpoint far before the step makes it long: all steps
in between are run again.

examples:
  tandem replay runs/addition/first --step 40
  tandem replay runs/addition/first --step 40 actor.optimizer.lr=1e-5

exit codes: 0 the same, 1 different (or failed), 2 it cannot be run again; says why
"""

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tandem.cli.config import KINDS
from tandem.config.errors import ConfigError
from tandem.config.load import load_config, plain_data
from tandem.state.existing import existing_run, run_info

FOLDER_KEYS = ("run.root", "experiment_name", "trial_name", "deterministic")
DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, such as runs/addition/first")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="what shall be otherwise in the replay")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to run again; the first is 1")
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """`tandem replay`."""
    from tandem.cli.main import main  # noqa: PLC0415 — which imports this module by name
    from tandem.state import replaying  # noqa: PLC0415 — imports torch

    folder, step = arguments.run.expanduser().resolve(), arguments.step
    command = run_info(folder).get("command")
    if existing_run(folder) is None or not (folder / "config.yaml").is_file() or command not in KINDS:
        raise ConfigError(
            f"{arguments.run} is not the folder of a run that a command of Tandem made; `tandem runs` lists those there are"
        )
    wrong = [key for key in arguments.keys if "=" not in key or key.partition("=")[0] in FOLDER_KEYS]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} is nothing that a replay can change: give key=value, other than {', '.join(FOLDER_KEYS)}"
        )
    config = load_config(KINDS[command], folder / "config.yaml", arguments.keys).config
    if not config.deterministic:
        raise ConfigError(
            f"{arguments.run} was not deterministic: order and timing decided what each step saw, so none can be run again. "
            "Begin another run with deterministic=true"
            + (" and without async_training=true" if getattr(config, "async_training", False) else "")
        )
    given = {key.partition("=")[0]: key for key in arguments.keys}
    replaying.refuse_replay(folder, step, given)
    with tempfile.TemporaryDirectory(prefix="tandem-replay-") as root:
        replayed = Path(root).resolve() / folder.parent.name / folder.name
        begun = replaying.prepare_replay(folder, replayed, step)
        print(f"Running up to step {step} again, from {begun}.", file=sys.stderr)
        for leg in replaying.legs(folder, step, plain_data(config), given):
            replaying.write_leg(replayed, leg, is_last=leg.last == step)
            with contextlib.redirect_stdout(sys.stderr):
                status = main(["continue", str(replayed), "--until", str(leg.last)])
            if status:
                print("error: the step could not be run again; see the message above", file=sys.stderr)
                return status
        outcome = replaying.compare_replay(folder, replayed, step)
    print(json.dumps(asdict(outcome), ensure_ascii=False) if arguments.json else outcome.describe())
    return DIFFERENT if outcome.differences else 0
