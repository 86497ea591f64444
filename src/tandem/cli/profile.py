"""`tandem profile` says where the time of a run goes. Here are also the arguments of `tandem plan` (see `planning.py`), and
the probe that both use: a few steps of the run in a folder that is removed afterwards."""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tandem.cli.arguments import TandemCommand, add_config_arguments, count, split_arguments
from tandem.cli.running import resolve, run_group
from tandem.config.arithmetic import trainer_ranks
from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.keys import leaves
from tandem.config.load import KINDS, load_config
from tandem.launch.local import is_rank
from tandem.planning.machine import DEVICES
from tandem.state.resuming import pins

STEPS = 3
"""Number of steps of a probe. The first step warms up; the others are measured."""

QUIET = {"checkpoint.every_steps": "null", "checkpoint.at_end": "false", "tracking.sinks": "[]", "recover.max_restarts": "0"}
"""Settings with which a probe saves nothing, opens no sink, and does not restart."""

READ_WITH = {
    "checkpoint.every_steps": (
        *("checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.keep_best"),
        *("checkpoint.on_error", "checkpoint.asynchronous"),
    ),
    "tracking.sinks": ("tracking.project",),
    "evaluate.every_steps": ("checkpoint.keep_best",),
    "rollout.verify.every_steps": ("rollout.verify.tolerance",),
}
"""Key → keys that have no effect while that key is off. They are then refused unless they have their default values."""

PARTS = ("generate", "rows", "score", "train", "update_weights", "switch")
"""The parts of a step, by their names in the metrics: `time/NAME_s`."""


class ProbeFailed(TandemError):
    """The run ended before the steps were done."""


def quiet(config: BaseConfig, besides: Iterable[str] = ()) -> list[str]:
    """Returns settings without saves, evaluations and other work outside a typical step. Keys in ``besides`` are kept."""
    usual = dict(leaves(type(config)()))
    values = QUIET | {key: "null" for key in ("evaluate.every_steps", "rollout.verify.every_steps") if key in usual}
    values = {key: value for key, value in values.items() if key not in besides}
    unread = [key for off in values for key in READ_WITH.get(off, ())]
    votes = isinstance(config, TrainConfig) and config.algorithm.labels == "majority"
    if votes and "evaluate.every_steps" in values:
        unread.append("reward")  # a vote rewards the training samples; the reward is only for evaluation
    return [f"{key}={value}" for key, value in (values | {key: _written(usual[key]) for key in unread}).items()]


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def measure(command: str, arguments: Sequence[str]) -> dict[str, float]:
    """Returns seconds of a step and of its parts, and the processes' memory in GiB: medians of the steps after the first.

    ``command``: the command that trains. ``arguments``: its configuration file and keys. Progress goes to stderr.

    Raises:
        ProbeFailed: the run failed; its error is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-probe-") as folder:
        given = [*arguments, *quiet(load_config(KINDS[command], *split_arguments(arguments)).config), f"run.root={folder}"]
        program = [sys.executable, "-P", "-m", "tandem", command, *given, "--until", str(STEPS)]
        code = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode
        files = list(Path(folder).glob("*/*/metrics.jsonl"))
        rows = [json.loads(line) for line in files[0].read_text(encoding="utf-8").splitlines()] if files else []
    rows = [row for row in rows if row["step"] > 1] or rows
    if code or not rows:
        raise ProbeFailed(
            f"the {STEPS} steps that were to be measured ended with exit status {code}; its messages are above"
        )
    names = {f"{name}_s": f"time/{name}_s" for name in ("step", *PARTS)} | {"peak_gib": "memory/peak_gib"}
    return {name: median(row[key] for row in rows) for name, key in names.items() if key in rows[-1]}


def describe(measured: dict[str, float], steps: int | None) -> str:
    """Returns the measurement as text. ``steps``: number of steps of the whole run; None if unknown."""
    whole = measured["step_s"]
    lines = [f"Time of a step, measured here: {_seconds(whole)}"]
    parts = {name: measured[f"{name}_s"] for name in PARTS if measured.get(f"{name}_s", 0.0) >= 0.005 * whole}
    for name, seconds in parts.items():
        lines.append(f"  {name.replace('_', ' '):<18}{_seconds(seconds):>10}{seconds / whole:>7.0%}")
    if steps is not None:
        lines.append(f"All {steps} steps: {_seconds(whole * steps)}, without evaluations and saves")
    if "peak_gib" in measured:
        lines.append(f"Memory of its processes after {STEPS} steps, measured: {measured['peak_gib']:.2f} GiB")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 36_000 else f"{seconds / 3600:.3g} h"


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, kinds=True)
    parser.add_argument("--device", metavar="NAME", help=f"plan for another machine: {', '.join(DEVICES)}")
    parser.add_argument("--count", type=count, default=None, metavar="N", help="number of these devices (default: 1)")
    parser.add_argument("--prompt-tokens", type=count, metavar="N", help="tokens of a prompt, instead of the data's mean")
    parser.add_argument("--measure", action="store_true", help="run three steps here, in a temporary folder, and time them")
    parser.add_argument("--json", action="store_true", help="print one JSON object; keys end in their unit")


PLAN = TandemCommand(
    """\
Say what a run will need before it starts: memory by phase, disk, and whether it fits. Nothing is started and no weights
are read, unless --measure asks for the time of a step here. docs/planning.md says how to read it.

examples:
  tandem plan examples/gsm8k_grpo.yaml
  tandem plan examples/gsm8k_grpo.yaml actor.path=Qwen/Qwen2.5-7B actor.backend=fsdp:d8 --device h200 --count 8
  tandem plan examples/gsm8k_sft.yaml --for sft --prompt-tokens 200 --measure
""",
    _add_plan_arguments,
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, kinds=True)
    parser.add_argument("--steps", type=count, default=2, metavar="N", help="steps that are recorded (default: 2)")
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="folder of the traces (default: profiles/EXPERIMENT/TRIAL/TIME)"
    )


def _run(arguments: argparse.Namespace) -> int:
    """Profiles the steps in this process, or starts the ranks, each of which calls this function again."""
    file, overrides = split_arguments(arguments.arguments)
    written = load_config(KINDS[arguments.kind], file, overrides).config
    silenced = quiet(written, besides={text.partition("=")[0] for text in overrides})
    arguments.arguments = [*([file] if file else []), *overrides, *silenced]
    resolved = resolve(arguments, KINDS[arguments.kind])
    config = resolved.config
    if getattr(config, "runner", "local") == "ray":
        raise ConfigError("tandem profile records this process and its ranks only, not those of Ray: use runner=local")
    if is_rank():
        if arguments.into is None:
            raise ConfigError("tandem profile starts the ranks of actor.backend itself: call it without torchrun")
        return _profile(arguments)
    into = arguments.into or Path("profiles", config.experiment_name, config.trial_name, time.strftime("%Y%m%d-%H%M%S"))
    made = [folder for folder in (into, *into.parents) if not folder.exists()]
    try:
        into.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".run-", dir=into)
    except OSError as error:
        raise ConfigError(f"--into {into} cannot be written: {error.strerror}") from error
    with _removed_if_empty(made), scratch as root:
        arguments.into = into
        extra = [f"run.root={root}", *pins(resolved)]
        if trainer_ranks(config) > 1:
            words = [*arguments.command_line, *extra, "--into", str(into)]
            return run_group([sys.executable, "-P", "-m", "tandem", *words], config)
        arguments.arguments += extra
        return _profile(arguments)


@contextlib.contextmanager
def _removed_if_empty(folders: Iterable[Path]) -> Iterator[None]:
    """Removes these folders, the innermost first, as far as nothing was written into them."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # of the first that is not empty
            for folder in folders:
                folder.rmdir()


def _profile(arguments: argparse.Namespace) -> int:
    from tandem.cli.profiling import profile  # noqa: PLC0415 — imports torch

    return profile(arguments)


PROFILE = TandemCommand(
    """\
Run a few steps under a profiler, and show time, memory, moved bytes and idle time by stage, with each stage's operators.
The steps run in a temporary folder; your run's folder is not touched. docs/profile.md says how to read the table.

examples:
  tandem profile examples/addition_grpo.yaml
  tandem profile examples/addition_grpo.yaml async_training=true rollout.max_head_offpolicyness=2 --steps 4
  tandem profile examples/gsm8k_sft.yaml --for sft --into profiles/sft
""",
    _add_arguments,
    _run,
)
