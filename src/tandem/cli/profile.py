"""Run a few steps under a profiler: where time, memory, bytes and idle go, by stage, and the operators within each. The run
has a folder of its own, which is removed; yours is not touched. docs/profile.md says how to read the table.

examples:
  tandem profile examples/addition_grpo.yaml
  tandem profile examples/addition_grpo.yaml async_training=true rollout.max_head_offpolicyness=2 --steps 4
  tandem profile examples/gsm8k_sft.yaml --for sft --into profiles/sft
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tandem.cli import probe
from tandem.cli.arguments import add_config_arguments, count, split_arguments
from tandem.cli.running import resolve, run_group
from tandem.config.arithmetic import trainer_ranks
from tandem.config.commands import KINDS
from tandem.config.errors import ConfigError
from tandem.config.load import load_config
from tandem.launch.local import is_rank
from tandem.state.named import pins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, kinds=True)
    parser.add_argument("--steps", type=count, default=2, metavar="N", help="steps that are recorded (default: 2)")
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="for the traces (default: profiles/EXPERIMENT/TRIAL/TIME)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the steps here, or starts the ranks, each of which comes here again."""
    file, given = split_arguments(arguments.arguments)
    written = load_config(KINDS[arguments.kind], file, given).config
    quiet = probe.quiet(written, besides={text.partition("=")[0] for text in given})
    arguments.arguments = [*([file] if file else []), *given, *quiet]
    resolved = resolve(arguments, KINDS[arguments.kind])
    config = resolved.config
    if getattr(config, "runner", "local") == "ray":
        raise ConfigError("a profile sees this process and its ranks, and runner=ray computes in others: use runner=local")
    if is_rank():
        if arguments.into is None:
            raise ConfigError("tandem profile starts the ranks of actor.backend itself: call it without torchrun")
        return _profile(arguments)
    into = arguments.into or Path("profiles", config.experiment_name, config.trial_name, time.strftime("%Y%m%d-%H%M%S"))
    try:
        into.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".run-", dir=into)
    except OSError as error:
        raise ConfigError(f"--into {into} cannot be written: {error.strerror}") from error
    with _removed_if_empty(into), scratch as root:
        arguments.into = into
        more = [f"run.root={root}", *pins(resolved)]
        if trainer_ranks(config) > 1:
            words = [*arguments.command_line, *more, "--into", str(into)]
            return run_group([sys.executable, "-P", "-m", "tandem", *words], config)
        arguments.arguments += more
        return _profile(arguments)


@contextlib.contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Afterwards the folder is gone if no trace was written into it."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _profile(arguments: argparse.Namespace) -> int:
    from tandem.cli.profiling import profile  # noqa: PLC0415 — imports torch

    return profile(arguments)
