"""The common part of the training commands: load the configuration, run, report the result."""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.cli.arguments import add_config_arguments, count, split_arguments
from tandem.cli.main import import_object
from tandem.cli.output import survive_lost_output
from tandem.config.arithmetic import folder_of, stalled_after_s, trainer_ranks
from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.load import Resolved, load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.launch.local import EXIT_CONFIG, EXIT_FAILED, is_rank, run_ranks
from tandem.launch.place import Place, check_interface
from tandem.launch.watch import LaunchEnd, Record
from tandem.state.existing import RunFolderInUse, existing_run, is_held, run_info
from tandem.state.resuming import may_go_on, pinned, pins
from tandem.state.run_folder import record_failure


@dataclass(frozen=True)
class Training:
    """A training command: its configuration class, loop and help text."""

    config: type[BaseConfig]
    loop: str
    """The module whose ``train`` is the loop; importing it loads torch."""

    description: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_config_arguments(parser)
        add_choices_of_a_run(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        return run_training(arguments, self.config, lambda: import_object(self.loop).train)

    def interrupted(self, arguments: argparse.Namespace) -> str:
        return where(arguments, self.config)


TRAIN = Training(
    TrainConfig,
    "tandem.trainers.loop",
    """Train a model with reinforcement learning. The configuration is a YAML file and `key=value` overrides.

examples:
  tandem train examples/addition_grpo.yaml
  tandem train examples/gsm8k_grpo.yaml trial_name=hot gconfig.temperature=1.2 --dry-run
  tandem train train_dataset.path=addition reward=my_reward.py:score total_train_steps=20
""",
)
SFT = Training(
    SFTConfig,
    "tandem.trainers.recipes",
    """Supervised fine-tuning on questions and answers. The configuration is a YAML file and `key=value` overrides.

example:
  tandem sft examples/gsm8k_sft.yaml actor.optimizer.lr=2e-5
""",
)
PREFERENCE = Training(
    PreferenceConfig,
    "tandem.trainers.recipes",
    """Learn from preferences (DPO, IPO, KTO, SimPO, ORPO). The configuration is a YAML file and `key=value` overrides.

example:
  tandem preference examples/addition_preference.yaml loss=simpo loss.beta=2
""",
)
REWARD = Training(
    RewardModelConfig,
    "tandem.trainers.recipes",
    """Train a reward model from ranked pairs or judged steps. The configuration is a YAML file and `key=value` overrides.

example:
  tandem reward examples/addition_reward.yaml actor.optimizer.lr=2e-5
""",
)
DISTILL = Training(
    DistillConfig,
    "tandem.trainers.distill",
    """Distillation: the student answers, and a teacher model judges each token of the answers. The configuration is
a YAML file and `key=value` overrides.

example:
  tandem distill examples/addition_distill.yaml teacher.path=FOLDER
""",
)

TRAINING = {"train": TRAIN, "sft": SFT, "preference": PREFERENCE, "reward": REWARD, "distill": DISTILL}


def command_of(run: Path) -> str:
    """Returns the command that started the run. Raises `ConfigError` if the folder holds no run, or its run.json names no
    command."""
    if existing_run(run) is None or not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not the folder of a run that a command of Tandem started; `tandem runs` lists the runs")
    command = run_info(run).get("command")
    if command not in TRAINING:
        raise ConfigError(
            f"{run} does not say which command started it: its run.json is lost or damaged, or a script started it. "
            f'Restore run.json, with {", ".join(TRAINING)} as its "command", or repeat the command that started the run'
        )
    return str(command)


SHOWN = ("reward/mean", "loss", "eval/accuracy", "completion_length/mean")


def add_choices_of_a_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that are not part of the configuration."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that the start checks, show the configuration and what a step would be, and start nothing",
    )
    parser.add_argument("--all", action="store_true", help="with --dry-run: show also the keys with default values")
    parser.add_argument(
        "--override", action="store_true", help="go on with a run although its learning rate, lengths or counts have changed"
    )
    parser.add_argument(
        "--until",
        type=count,
        metavar="STEP",
        help="stop after this step; repeat the command without it to go on",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as one JSON object; progress goes to stderr")


def resolve(arguments: argparse.Namespace, kind: type[BaseConfig]) -> Resolved:
    file, overrides = split_arguments(arguments.arguments)
    return pinned(load_config(kind, file, overrides))


def run_training(arguments: argparse.Namespace, kind: type[BaseConfig], load: Callable[[], Callable[..., Any]]) -> int:
    """Trains and returns the exit code. ``load`` imports the loop, and with it torch; it is called only after the
    configuration has been checked."""
    resolved = resolve(arguments, kind)
    config = resolved.config
    folder = folder_of(config)
    is_main = os.environ.get("RANK", "0") == "0"  # every rank runs this function; only rank 0 prints and writes
    ranks = trainer_ranks(config)
    starts_ranks = (ranks > 1 or config.recover.max_restarts > 0) and not is_rank() and not arguments.dry_run
    options: dict[str, Any] = {"override": True} if arguments.override else {}
    options |= {"until": arguments.until} if arguments.until else {}
    if is_main:
        resumed = may_go_on(config, override=arguments.override)(folder)
        if resumed is not None and not starts_ranks and not is_held(folder):  # a run in use is refused below
            print(resumed.describe(), file=sys.stderr)
    if not (arguments.dry_run or arguments.json):  # for these two, the printed output is the result
        survive_lost_output()
    if is_main and not (is_rank() or arguments.dry_run):
        data = getattr(config, "train_dataset").path or "several data sets"  # noqa: B009
        print(f"{folder}: {config.actor.path}, {data}. Loading torch …", file=sys.stderr, flush=True)
    if starts_ranks:
        return run_group([sys.executable, "-P", "-m", "tandem", *arguments.command_line, *pins(resolved)], config)
    train = load()
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        summary = train(resolved, dry_run="all" if arguments.dry_run and arguments.all else arguments.dry_run, **options)
    if not is_main:
        return 0
    if arguments.json:
        outcome = asdict(summary)
        for name in ("metrics", "evaluations"):  # what is not finite becomes null
            values = outcome[name].items()
            outcome[name] = {key: None if isinstance(value, float) and value - value else value for key, value in values}
        print(json.dumps(outcome, ensure_ascii=False, default=str))
    elif not arguments.dry_run:
        print(describe(summary))
    return 0


def run_group(
    command: Sequence[str], config: BaseConfig, place: Place | None = None, record: Record = lambda ended, restart: None
) -> int:
    """Runs the command once for each of the run's ranks on this machine, and returns the exit status.

    Args:
        command: the words of the command.
        config: the configuration of the run.
        place: the position of these ranks among those of all machines; then the launcher restarts them, not this function.
        record: called with each failure, after it is written into the run folder.
    """
    folder = folder_of(config)
    ranks = trainer_ranks(config)
    if ranks > 1 and place is None:
        check_interface()

    def write(ended: LaunchEnd, restart: int | None) -> None:
        write_failure(folder, ended, restart)
        record(ended, restart)

    code = run_ranks(
        command,
        place.count if place else ranks,
        stalled_after_s=stalled_after_s(config),
        max_restarts=0 if place else config.recover.max_restarts,
        grace_s=config.recover.grace_s,
        record=write,
        place=place,
    )
    return code or (_ended_silently(folder) if place is None or place.first == 0 else 0)


def _ended_silently(folder: Path) -> int:
    """Returns the exit status of a run whose ranks all ended with 0. It is a failure if the run never recorded its end."""
    run = existing_run(folder)
    if run is None or run.status != "running" or is_held(folder):
        return 0
    cause = f"the run ended with exit status 0 after {run.steps} steps, before it was done: something called os._exit"
    print(f"error: {cause}", file=sys.stderr)
    write_failure(folder, LaunchEnd(EXIT_FAILED, cause, has_folder=True), None)
    return EXIT_FAILED


def write_failure(folder: Path, ended: LaunchEnd, restart: int | None) -> None:
    """Writes into the run folder how its ranks failed, if they had opened the folder. If writing fails, a warning is
    printed."""
    if not ended.has_folder or (ended.rank == 0 and ended.code == EXIT_CONFIG):  # refused: the run's state is unchanged
        return
    then = None if restart is None else {"number": restart, "step": ended.step}
    try:
        path = record_failure(folder, ended.cause, keep=ended.rank == 0, stacks=ended.stacks, restart=then)
    except (OSError, RunFolderInUse) as error:
        print(f"warning: the failure could not be written to {folder}: {error}", file=sys.stderr)
        return
    if path is not None:
        print(f"{path} has the stack of every thread", file=sys.stderr)


def describe(summary: Any) -> str:
    """Describes the result of a run in a few lines."""
    lines = [f"Done: {summary.steps} step{'' if summary.steps == 1 else 's'}."]
    shown = [name for name in SHOWN if name != "loss" or SHOWN[0] not in summary.metrics]  # a policy's loss says nothing
    values = [f"{name} {summary.metrics[name]:.4g}" for name in shown if name in summary.metrics]
    lines += [f"Last step: {', '.join(values)}"] if values else []
    if summary.evaluations:
        accuracies = (f"step {step}: {accuracy:.1%}" for step, accuracy in summary.evaluations.items())
        lines.append(f"Accuracy on the validation rows: {', '.join(accuracies)}")
    lines += [f"Metrics and pictures: {summary.folder}"] if summary.folder else []
    lines += [f"Model: {summary.checkpoint}"] if summary.checkpoint else []
    if summary.checkpoint and not _is_classifier(summary.checkpoint):
        lines.append(f'Try it: tandem generate {summary.checkpoint} "…"')
    lines += [f"Look at it: tandem view {summary.folder}"] if summary.folder else []
    return "\n".join(lines)


def _is_classifier(checkpoint: Path) -> bool:
    """True if a checkpoint is a classifier, which scores texts and cannot generate."""
    file = checkpoint / "config.json"
    architectures = json.loads(file.read_text()).get("architectures") or [] if file.is_file() else []
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def where(arguments: argparse.Namespace, kind: type[BaseConfig]) -> str:
    """Returns the sentence printed after Ctrl-C: where the run's files are, and how to go on."""
    try:
        config = resolve(arguments, kind).config
    except TandemError:
        return "Nothing was started."
    return left_in(folder_of(config))


def left_in(folder: Path) -> str:
    """Describes the state of an interrupted run's folder, and how to go on."""
    run = existing_run(folder)
    if run is None:
        return "Nothing was written."
    then = f"Go on: tandem continue {shlex.quote(str(folder))}" if run.checkpoints else "The same command starts it anew."
    return f"{folder} has the run so far: {run.describe()}.\n{then}"
