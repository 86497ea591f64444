"""Start a run, or a script of yours, on this machine, on Slurm or on Ray: ranks on one machine or on several.

The arguments after the launcher are those of `tandem train`: a YAML file, or a script in its place, and `key=value`
overrides, which are passed to the script too. The configuration of a script is the YAML file beside it with the same name,
and these overrides; a script can have no other arguments.

examples:
  tandem launch local examples/addition_grpo.yaml actor.backend=fsdp:d2
  tandem launch slurm examples/gsm8k_grpo.yaml actor.backend=fsdp:d16 --nodes 2 --time 12:00:00 --sbatch gpus-per-node=8
  tandem launch slurm examples/gsm8k_grpo.py actor.backend=fsdp:d2 --dry-run
  tandem launch ray examples/gsm8k_grpo.yaml actor.backend=fsdp:d8 --gpus-per-rank 1
"""

import argparse
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.api.services import own_class
from tandem.cli.arguments import split_arguments
from tandem.cli.output import survive_lost_output
from tandem.cli.running import TRAINING, run_group
from tandem.config.arithmetic import folder_of, trainer_ranks
from tandem.config.errors import ConfigError, nearest_names
from tandem.config.experiment import BaseConfig
from tandem.config.load import Resolved, load_config
from tandem.launch.launchers import (
    ATTEMPT,
    EXIT_INTERRUPTED,
    FOLDER,
    HELD,
    Launcher,
    LaunchJob,
    launcher_class,
    launcher_names,
    supervise,
    write_end,
)
from tandem.launch.local import EXIT_CONFIG, EXIT_FAILED
from tandem.launch.place import place_of
from tandem.launch.watch import LaunchEnd
from tandem.state.resuming import pinned, pins

LAUNCHER = "tandem launch"
"""Name of the command in messages about a launcher class of the user."""

RANKS = "ranks"
"""Name of the internal launcher with which all other launchers start a group of ranks on one machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("launcher", help=f"one of {', '.join(launcher_names())}, or my_file.py:Name")
    parser.add_argument("words", nargs="*", metavar="CONFIG|SCRIPT.py [key=value …]", help="the run")
    parser.add_argument("--command", choices=TRAINING, default="train", help="for a CONFIG (default: train)")
    parser.add_argument("--dry-run", action="store_true", help="check the run, show what would be started, start nothing")
    for name in launcher_names():
        launcher_class(name).add_arguments(parser.add_argument_group(name))


def run(arguments: argparse.Namespace) -> int:
    name, names = arguments.launcher, launcher_names()
    if name == RANKS:
        return _ranks(arguments)
    user_class = own_class(name, LAUNCHER, Launcher, ("jobs", "options")) if ".py:" in name else None
    if user_class is None and name not in names:
        raise ConfigError(f"there is no launcher {name!r}; {nearest_names(name, names)}, and my_file.py:Name")
    kind = launcher_class(name) if user_class is None else user_class.kind
    for option, default in _options(kind).items():
        vars(arguments).setdefault(option, default)
    _refuse_others(arguments, name, kind)
    try:
        series = [shlex.split(words) for words in getattr(arguments, "array", [])]
    except ValueError as error:
        raise ConfigError(f"--array {' '.join(arguments.array)}: {error}") from error
    jobs = [_job(arguments, words) for words in series or [[]]]
    launcher: Launcher = kind(jobs, arguments) if user_class is None else user_class(jobs=jobs, options=arguments)
    if arguments.dry_run:
        print(launcher.describe())
        return 0
    survive_lost_output()
    return supervise(launcher, sys.stdout)


def _refuse_others(arguments: argparse.Namespace, name: str, kind: type[Launcher]) -> None:
    """Raises `ConfigError` for an option of another launcher, which this launcher would ignore."""
    known, options = _options(kind), {other: _options(launcher_class(other)) for other in launcher_names()}
    for other, defaults in options.items():
        for option, default in defaults.items():
            if option not in known and getattr(arguments, option) != default:
                raise ConfigError(f"--{option.replace('_', '-')} is an option of tandem launch {other}, not of {name}")


def _options(kind: type[Launcher]) -> dict[str, Any]:
    """Returns the launcher's own options and their defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    kind.add_arguments(parser)
    return vars(parser.parse_args([]))


def _job(arguments: argparse.Namespace, extra: Sequence[str] = ()) -> LaunchJob:
    """Returns the job of the command line, with the words ``extra`` of `--array` appended. A file in ``extra`` replaces the
    file of the command line."""
    words = list(arguments.words)
    if split_arguments(extra)[0] is not None:
        words = split_arguments(words)[1]
    words += extra
    resolved = _config(arguments.command, words)
    config = resolved.config
    folder = folder_of(config).resolve()
    command = [] if arguments.command == "train" else ["--command", arguments.command]
    ranks, recover = trainer_ranks(config), config.recover
    name = f"{config.experiment_name}/{config.trial_name}"
    return LaunchJob(
        name, folder / FOLDER, (*command, *words, *pins(resolved)), ranks, recover.grace_s, recover.max_restarts
    )


def _config(command: str, words: Sequence[str]) -> Resolved[BaseConfig]:
    """Loads the configuration of a job's words; of a script, from the YAML file beside it. Raises `ConfigError`."""
    file, overrides = split_arguments(words)
    if file is not None and file.endswith(".py"):
        if not Path(file).is_file():
            raise ConfigError(f"there is no script {file}")
        beside = Path(file).with_suffix(".yaml")
        file = str(beside) if beside.is_file() else None
    return pinned(load_config(TRAINING[command].config, file, overrides))


def _ranks(arguments: argparse.Namespace) -> int:
    """Runs one group of ranks, writes how it ended, and returns its exit status. A group that ended on request returns 0,
    because the launcher would take any other status for a failure and end all other groups at once."""
    if os.environ.get(HELD):
        threading.Thread(target=_end_with_launcher, daemon=True).start()
    place, attempt, failures = place_of(os.environ), os.environ.get(ATTEMPT), []

    def record(ended: LaunchEnd, restart: int | None) -> None:
        failures.append(ended)

    script = split_arguments(arguments.words)[0] or ""
    start = ["-m", "tandem", arguments.command] if not script.endswith(".py") else []
    words = [word for word in arguments.words if start or word != script]
    command = [sys.executable, *(["-P", *start] if start else [script]), *words]
    code = EXIT_FAILED
    try:
        code = run_group(command, _config(arguments.command, arguments.words).config, place, record)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except ConfigError:
        code = EXIT_CONFIG
        raise
    finally:
        if attempt:
            group = place.first if place else 0
            refused = LaunchEnd(code, rank=group, at=time.time()) if code == EXIT_CONFIG and not failures else None
            write_end(Path(attempt), group, code, failures[-1] if failures and code else refused)
    return 0 if code == EXIT_INTERRUPTED else code


def _end_with_launcher() -> None:
    """Sends SIGTERM to this process at the end of standard input, which closes however the launcher ends."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
