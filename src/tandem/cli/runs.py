"""Commands about runs that exist: `tandem runs`, `tandem continue`, `tandem control` and `tandem export`."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.api.shared_files import aligned
from tandem.cli.arguments import TandemCommand, configured_run, run_at, run_folder
from tandem.cli.running import TRAINING, add_choices_of_a_run, command_of, left_in
from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import RunConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.recipes import ACTIONS, Change, sums_of
from tandem.config.terms import read_terms
from tandem.state.control import ask, changes, requests, take_answer
from tandem.state.existing import (
    SHOWN,
    ExistingRun,
    begun_elsewhere,
    existing_run,
    is_held,
    run_folders,
    run_info,
    status_now,
    step_of,
)
from tandem.state.machine import GIB


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    root = RunConfig().root
    parser.add_argument("root", nargs="?", type=Path, default=Path(root), help=f"where they are (default: {root})")
    parser.add_argument("--json", action="store_true", help="one JSON object a run")


def _list(arguments: argparse.Namespace) -> int:
    root = arguments.root.expanduser()
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}; give the run.root of the runs")
    runs = list(entries(root.absolute()))
    if arguments.json:
        for row in runs:
            print(json.dumps(row, ensure_ascii=False))
    else:
        print(table(runs) if runs else f"No run in {root}.")
    return 0


def entries(root: Path) -> Iterator[dict[str, Any]]:
    """Yields an entry for each run in ``root``: a folder of experiments, one experiment, or one run. A run that cannot be
    read gives a warning."""
    for folder in run_folders(root):
        try:
            run = existing_run(folder)
            if run is not None:
                yield entry(run)
        except OSError as error:
            print(f"warning: {folder} cannot be read: {error.strerror or error}", file=sys.stderr)


def entry(run: ExistingRun) -> dict[str, Any]:
    """Returns the facts about a run that the command shows; sizes in bytes."""
    return {
        "run": f"{run.folder.parent.name}/{run.folder.name}",
        **status_now(run),
        "steps": run.steps,
        "metrics": {
            name: value for name in SHOWN if isinstance(value := run.metrics.get(name), int | float) and value - value == 0
        },
        "checkpoints": list(run.checkpoints),
        "bytes": sum(_size(Path(place, name)) for place, _, names in os.walk(run.folder) for name in names),
        "when": run.when,
    }


def _size(path: Path) -> int:
    """Returns the size in bytes; 0 if the path is not a file, or was removed meanwhile by a run that saves."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _ago(seconds: float) -> str:
    """Writes a duration in its largest unit that fits at least twice, such as `5 min`."""
    units = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
    return next((f"{seconds / size:.0f} {unit}" for unit, size in units if seconds >= 2 * size), f"{seconds:.0f} s")


def table(runs: list[dict[str, Any]]) -> str:
    lines = [("RUN", "STATUS", "STEPS", "CHECKPOINTS", "SIZE", "WHEN", "LAST METRICS")]
    for row in runs:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in row["metrics"].items())
        newest = f"{len(row['checkpoints'])}, to {row['checkpoints'][-1]}" if row["checkpoints"] else "none"
        size = f"{row['bytes'] / GIB:.2f} GiB"
        status = row["status"] if "host" not in row else f"on {row['host']}, silent {_ago(row['silent_s'])}"
        lines.append((row["run"], status, str(row["steps"]), newest, size, row["when"], metrics))
    return "\n".join(aligned(lines))


RUNS = TandemCommand(
    """\
List the runs below a folder: status, last metrics, checkpoints and size. The folder is a run.root, an experiment's folder
in it, or a run's folder.

examples:
  tandem runs
  tandem runs other/root --json
""",
    _add_arguments,
    _list,
)


FOLDER_KEYS = ("run.root", "experiment_name", "trial_name")


def _add_continue_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run, such as addition/grpo")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="values to change from here on")
    add_choices_of_a_run(parser)


def _interrupted(arguments: argparse.Namespace) -> str:
    return left_in(run_folder(arguments.run))


def _continue(arguments: argparse.Namespace) -> int:
    folder = run_folder(arguments.run).resolve()
    command = command_of(folder)
    wrong = [key for key in arguments.keys if "=" not in key or key.partition("=")[0] in FOLDER_KEYS]
    if wrong:
        raise ConfigError(f"{wrong[0]} cannot be changed here: give key=value, with any key except {', '.join(FOLDER_KEYS)}")
    folder_keys = (f"run.root={folder.parent.parent}", f"experiment_name={folder.parent.name}", f"trial_name={folder.name}")
    arguments.arguments = [str(folder / "config.yaml"), *arguments.keys, *folder_keys]
    return TRAINING[command].run(arguments)


CONTINUE = TandemCommand(
    """Go on with an interrupted run, or train a finished one longer, from its newest intact checkpoint.

The configuration is read from the run's folder; `key=value` changes it. Learning rate, lengths and counts may change only
with --override. Repeating the command that started the run does the same as `tandem continue`.

examples:
  tandem continue runs/addition/grpo
  tandem continue runs/addition/grpo total_train_steps=200 --override
""",
    _add_continue_arguments,
    _continue,
    interrupted=_interrupted,
)


class NoAnswer(TandemError):
    """The run has not answered a request to change its reward, or has refused the change."""


def _add_control_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run, such as addition/grpo")
    parser.add_argument("action", nargs="?", help=f"{', '.join(ACTIONS)}; without it, the changes so far are shown")
    parser.add_argument("value", nargs="?", help="NAME=NUMBER, a term, or a name")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="longest wait for the answer; steps may be long (default: 600)"
    )


def _control(arguments: argparse.Namespace) -> int:
    folder = configured_run(arguments.run)
    if run_info(folder).get("command", "train") != "train":
        raise ConfigError(f"{folder} is a run of `tandem {run_info(folder)['command']}`; only `tandem train` has a reward")
    if arguments.action is None:
        print(current_reward(folder))
        return 0
    change = Change(arguments.action, str(arguments.value or "").strip())
    if not change.value:
        raise ConfigError(f"write: tandem control {arguments.run} {change.action} {ACTIONS[change.action]}")
    refuse_ended(folder)
    if load_config(TrainConfig, folder / "config.yaml").config.runner == "ray":
        raise ConfigError(
            f"{folder} has runner=ray, which cannot change the reward during training; stop the run, then type: "
            f"tandem continue {folder} reward=… --override"
        )
    name = ask(folder, change)
    answer = take_answer(folder, name, arguments.timeout_s)
    if answer is None:
        ended = "" if is_held(folder) else ", and the run has ended"
        raise NoAnswer(
            f"no answer within {arguments.timeout_s:g} s{ended}; the change waits, and is made before the run's next step "
            f"(to cancel it, delete {folder / 'control' / name}.request)"
        )
    if "refused" in answer:
        raise ConfigError(str(answer["refused"]))
    print(f"From step {answer['step']} on: reward={answer['reward']}")
    return 0


def refuse_ended(folder: Path) -> None:
    """Checks that the run is training now, on this machine.

    Raises:
        ConfigError: the run has ended or is on another machine; the message says what to do.
    """
    if is_held(folder):
        return
    host = begun_elsewhere(folder)
    where = "is not training now" if host is None else f"was started on {host}, where this command must be run"
    raise ConfigError(f"{folder} {where}; `tandem continue {folder}` goes on with it")


def current_reward(folder: Path) -> str:
    """Describes the current reward, the changes made to it, the changes that wait, and how to change it, as text."""
    reward = load_config(TrainConfig, folder / "config.yaml").config.reward
    done = changes(folder, str(run_info(folder).get("id") or "") or None, reward)
    reward = str(done[-1]["reward"]) if done else reward
    all_terms = (term for total in sums_of(reward) for term in read_terms(total))
    terms = [f"  {term.label:<20} {term.weight:>8g}  {term.spelling}" for term in all_terms]
    lines = [f"reward={reward}", *terms]
    lines += [f"step {row['step']}: {row['action']} {row['value']}" for row in done] or ["Nothing was changed so far."]
    lines += [f"waiting: {request.change or request.id}" for request in requests(folder)]
    usage = [f"  tandem control {folder} {action} {value}" for action, value in ACTIONS.items()]
    return "\n".join([*lines, "To change it:", *usage])


CONTROL = TandemCommand(
    """Change the reward of a run while it trains, or show the changes so far. A change takes effect at the next step.

tandem control RUN                              show the current reward, its changes, and changes that wait
tandem control RUN reward.weight format=0.3     give the term `format` another weight
tandem control RUN reward.add '0.2*format'      add a term that needs no model
tandem control RUN reward.remove format         remove a term

RUN is the run's folder. It must be training now, on this machine. The command waits for the run's answer, which comes
between two steps.
""",
    _add_control_arguments,
    _control,
)


DTYPES = ("float32", "bfloat16", "float16")


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN[@STEP]", help="the run, and optionally a checkpoint: RUN@120 or RUN@best")
    parser.add_argument("target", metavar="DIR", type=Path, help="folder to create; it must not exist")
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the weights (default: as saved)")
    parser.add_argument(
        "--merge",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="for a run with LoRA: write the whole model (default), or only the adapter",
    )


def _export(arguments: argparse.Namespace) -> int:
    from tandem.models.lora import MergedWeights  # noqa: PLC0415 — imports torch
    from tandem.state.export import ADAPTER, checkpoint_of, export  # noqa: PLC0415 — imports torch

    place = Path(arguments.run).expanduser()
    checkpoint = checkpoint_of(place) if step_of(place) >= 0 else run_at(arguments.run).checkpoint
    adapts = (checkpoint / ADAPTER).is_dir()
    if arguments.merge is not None and not adapts:
        raise ConfigError(f"{checkpoint} has no adapter, so there is nothing to merge: leave --merge and --no-merge out")
    alone = arguments.merge is False
    if alone and arguments.dtype:
        raise ConfigError("--dtype needs a whole model: an adapter alone stays in float32; leave --dtype or --no-merge out")
    masters = (lambda folder: MergedWeights(folder / ADAPTER)) if adapts else None
    target = arguments.target.expanduser()
    export(checkpoint, target, arguments.dtype, part=ADAPTER if alone else ".", masters=masters)
    print(f"{arguments.target} has the {'adapter' if alone else 'model'} of {checkpoint}.")
    return 0


EXPORT = TandemCommand(
    """Copy the model of a run into a Hugging Face folder that does not depend on Tandem.

RUN exports the run's newest intact checkpoint, RUN@120 the checkpoint of step 120, and RUN@best the checkpoint with the
best value of `checkpoint.keep_best`. With --dtype the weights are rounded once, from the float32 master weights.

For a run with LoRA, the adapter is merged into the model; --no-merge writes only the adapter, in peft's format.

examples:
  tandem export runs/addition/grpo models/adder
  tandem export runs/addition/grpo@10 models/adder --dtype float32
  tandem export runs/addition/lora adapters/adder --no-merge
""",
    _add_export_arguments,
    _export,
)
