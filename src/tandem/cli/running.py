"""The common part of the training commands: load the configuration, run, report the result."""

import argparse
import contextlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.cli.arguments import add_config_arguments, count, split_arguments
from tandem.cli.output import survive_lost_output
from tandem.config.arithmetic import stalled_after_s, trainer_ranks
from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.load import Resolved, load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.launch.local import EXIT_CONFIG, EXIT_FAILED, check_interface, is_rank, run_ranks
from tandem.launch.place import Place
from tandem.launch.watch import LaunchEnd, Record
from tandem.state.existing import existing_run, is_held, run_info
from tandem.state.named import pinned, pins
from tandem.state.resuming import may_go_on
from tandem.state.run_folder import RunFolderInUse, record_failure, run_path


@dataclass(frozen=True)
class Training:
    """A command that trains."""

    config: type[BaseConfig]
    loop: str
    """The module whose ``train`` is the loop; importing it loads torch."""

    description: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        return run_training(arguments, self.config, lambda: importlib.import_module(self.loop).train)

    def interrupted(self, arguments: argparse.Namespace) -> str:
        return where(arguments, self.config)


TRAIN = Training(
    TrainConfig,
    "tandem.trainers.rl",
    """Train a model with reinforcement learning. The configuration is a YAML file and `key=value` overrides.

examples:
  tandem train examples/addition_grpo.yaml
  tandem train examples/gsm8k_grpo.yaml trial_name=hot gconfig.temperature=1.2 --dry-run
  tandem train train_dataset.path=addition reward=my_reward.py:score total_train_steps=20
""",
)
SFT = Training(
    SFTConfig,
    "tandem.trainers.sft",
    """Supervised fine-tuning on questions and answers. The configuration is a YAML file and `key=value` overrides.

example:
  tandem sft examples/gsm8k_sft.yaml actor.optimizer.lr=2e-5
""",
)
PREFERENCE = Training(
    PreferenceConfig,
    "tandem.trainers.preference",
    """Learn from preferences (DPO, IPO, KTO, SimPO, ORPO). The configuration is a YAML file and `key=value` overrides.

example:
  tandem preference examples/addition_preference.yaml loss=simpo loss.beta=2
""",
)
REWARD = Training(
    RewardModelConfig,
    "tandem.trainers.reward",
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
    """The command that began the run. Raises `ConfigError` where the folder holds no run, or does not say."""
    if existing_run(run) is None or not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{run} is not the folder of a run that a command of Tandem made; `tandem runs` lists those there are"
        )
    command = run_info(run).get("command")
    if command not in TRAINING:
        raise ConfigError(
            f"{run} does not say which command began it: its run.json is lost or damaged, or a script made it. "
            f'Restore run.json, with {", ".join(TRAINING)} as its "command", or repeat the command that began the run'
        )
    return str(command)


SHOWN = ("reward/mean", "loss", "eval/accuracy", "completion_length/mean")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_choices_of_a_run(parser)


def add_choices_of_a_run(parser: argparse.ArgumentParser) -> None:
    """Arguments that are not part of the configuration."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that the start checks, show the configuration and what a step would be, and start nothing",
    )
    parser.add_argument("--all", action="store_true", help="with --dry-run: show also the values that are as by default")
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
    """Trains. ``load`` imports the loop, and torch with it, only once the configuration is known to be right."""
    resolved = resolve(arguments, kind)
    config = resolved.config
    folder = run_path(config.run.root, config.experiment_name, config.trial_name)
    is_main = os.environ.get("RANK", "0") == "0"  # this is started once a rank; the first one speaks and writes
    ranks = trainer_ranks(config)
    starts_ranks = (ranks > 1 or config.recover.max_restarts > 0) and not is_rank() and not arguments.dry_run
    options: dict[str, Any] = {"override": True} if arguments.override else {}
    options |= {"until": arguments.until} if arguments.until else {}
    if is_main:
        going = may_go_on(config, override=arguments.override)(folder)
        if going is not None and not starts_ranks and not is_held(folder):  # or it is refused in a moment
            print(going.describe(), file=sys.stderr)
    if not (arguments.dry_run or arguments.json):  # what those print is what they are for
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
        print(json.dumps(_plain(asdict(summary)), ensure_ascii=False))
    elif not arguments.dry_run:
        print(describe(summary))
    return 0


def run_group(
    command: Sequence[str], config: BaseConfig, place: Place | None = None, record: Record = lambda ended, restart: None
) -> int:
    """Runs the command on the run's ranks of this machine, and returns the exit status. ``place``: of these among others,
    whose launcher starts them again if need be. ``record`` hears of failures, which the run folder has too."""
    folder = run_path(config.run.root, config.experiment_name, config.trial_name)
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
    """The exit status of a run whose ranks all ended with 0: a failure if it never wrote down that it ended."""
    found = existing_run(folder)
    if found is None or found.status != "running" or is_held(folder):
        return 0
    cause = f"the run ended with exit status 0 after {found.steps} steps, before it was done: something called os._exit"
    print(f"error: {cause}", file=sys.stderr)
    write_failure(folder, LaunchEnd(EXIT_FAILED, cause, has_folder=True), None)
    return EXIT_FAILED


def write_failure(folder: Path, ended: LaunchEnd, restart: int | None) -> None:
    """Writes into the run folder how its ranks failed, if it was theirs; what cannot be written is said on the terminal."""
    if not ended.has_folder or (ended.rank == 0 and ended.code == EXIT_CONFIG):  # a refusal leaves the run as it was
        return
    then = None if restart is None else {"number": restart, "step": ended.step}
    try:
        path = record_failure(folder, ended.cause, keep=ended.rank == 0, stacks=ended.stacks, restart=then)
    except (OSError, RunFolderInUse) as error:
        print(f"warning: how it ended could not be written to {folder}: {error}", file=sys.stderr)
        return
    if path is not None:
        print(f"{path} has where every thread stood", file=sys.stderr)


def describe(summary: Any) -> str:
    """The end of a run in a few lines."""
    lines = [f"Done: {summary.steps} step{'' if summary.steps == 1 else 's'}."]
    shown = [name for name in SHOWN if name != "loss" or SHOWN[0] not in summary.metrics]  # of a policy it says nothing
    values = [f"{name} {summary.metrics[name]:.4g}" for name in shown if name in summary.metrics]
    lines += [f"Last step: {', '.join(values)}"] if values else []
    if summary.evaluations:
        told = (f"step {step}: {accuracy:.1%}" for step, accuracy in summary.evaluations.items())
        lines.append(f"Accuracy on the validation rows: {', '.join(told)}")
    lines += [f"Metrics and pictures: {summary.folder}"] if summary.folder else []
    lines += [f"Model: {summary.checkpoint}"] if summary.checkpoint else []
    if summary.checkpoint and not _is_classifier(summary.checkpoint):
        lines.append(f'Try it: tandem generate {summary.checkpoint} "…"')
    lines += [f"Look at it: tandem view {summary.folder}"] if summary.folder else []
    return "\n".join(lines)


def _is_classifier(checkpoint: Path) -> bool:
    """True if a checkpoint scores texts and writes none."""
    file = checkpoint / "config.json"
    architectures = json.loads(file.read_text()).get("architectures") or [] if file.is_file() else []
    return any(name.endswith("ForSequenceClassification") for name in architectures)


def where(arguments: argparse.Namespace, kind: type[BaseConfig]) -> str:
    """After Ctrl-C: where the run's files are."""
    try:
        config = resolve(arguments, kind).config
    except TandemError:
        return "Nothing was started."
    return left_in(run_path(config.run.root, config.experiment_name, config.trial_name))


def left_in(folder: Path) -> str:
    """A sentence about what a run has left in its folder."""
    found = existing_run(folder)
    if found is None:
        return "Nothing was written."
    then = f"Go on: tandem continue {shlex.quote(str(folder))}" if found.checkpoints else "The same command begins it anew."
    return f"{folder} has what was done: {found.describe()}.\n{then}"


def _plain(value: Any) -> Any:
    """JSON-able: paths as text, values that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and value - value != 0 else value
