"""`tandem …`: picks the command, and turns errors into messages and exit codes.

Commands are imported when they run, so that `tandem --help` and `tandem config` answer at once, without torch.
"""

import argparse
import errno
import gc
import os
import pkgutil
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from tandem import __version__
from tandem.api.failures import RankFailed
from tandem.cli import leave
from tandem.cli.output import ReaderGone, command_output, survive_lost_output
from tandem.config.coming_from import hint
from tandem.config.errors import ConfigError, TandemError, kind_and_text, nearest_keys, nearest_names
from tandem.config.experiment import TrainConfig
from tandem.config.keys import all_keys
from tandem.launch.local import EXIT_CONFIG, EXIT_FAILED, EXIT_FINAL, EXIT_INTERRUPTED
from tandem.launch.rank import failed_elsewhere, has_launcher, telling_errors


class SubCommand(NamedTuple):
    """A sub-command: its help, and the module of `tandem.cli`, or ``module:object``, that has `add_arguments(parser)` and
    `run(arguments) -> int`."""

    module: str
    help: str
    runs: str = ""
    """The ``module:function`` that runs, if it needs torch: then `--help` works without importing torch."""


COMMANDS = {
    "train": SubCommand("running:TRAIN", "train a model with reinforcement learning"),
    "sft": SubCommand("running:SFT", "fine-tune a model on questions and answers"),
    "preference": SubCommand("running:PREFERENCE", "learn from preferences: DPO, IPO, KTO, SimPO, ORPO"),
    "reward": SubCommand("running:REWARD", "train a reward model from ranked pairs or judged steps"),
    "distill": SubCommand("running:DISTILL", "train a student on its own answers, judged by a teacher model"),
    "launch": SubCommand("launch", "start a run or a script on this machine, on Slurm or on Ray"),
    "continue": SubCommand("runs:CONTINUE", "go on with an interrupted run, or train a finished one longer"),
    "control": SubCommand("runs:CONTROL", "change the reward of a run while it trains"),
    "runs": SubCommand("runs:RUNS", "list runs: status, last metrics, checkpoints, size"),
    "trajectories": SubCommand("trajectories", "look at the samples that were trained, and those that were dropped"),
    "view": SubCommand("view:VIEW", "look at runs in a browser, while they go on and afterwards"),
    "report": SubCommand("view:REPORT", "write runs as one HTML file that opens anywhere"),
    "export": SubCommand("runs:EXPORT", "copy the model of a run into a Hugging Face folder"),
    "generate": SubCommand("generate:GENERATE", "let a model answer a prompt", "generating:generate"),
    "chat": SubCommand("generate:CHAT", "chat with a model: a folder, a hub name or a server", "generating:chat"),
    "serve": SubCommand(
        "serve:SERVE", "serve a model over HTTP: OpenAI's protocol, and tokens for training runs", "serving:run"
    ),
    "serve-reward": SubCommand(
        "serve:SERVE_REWARD", "serve reward models over HTTP, for runs elsewhere", "serving_rewards:run"
    ),
    "algorithms": SubCommand("algorithms", "list the algorithms, or explain one"),
    "eval": SubCommand("eval:EVAL", "evaluate a model on data sets"),
    "compare": SubCommand("eval:COMPARE", "compare two evaluations, with a test of significance"),
    "check-reward": SubCommand("eval:CHECK_REWARD", "check a reward: speed, determinism, hangs, forged answers"),
    "fleet": SubCommand("fleet:FLEET", "list, add and remove the inference servers of a run"),
    "verify-weights": SubCommand("fleet:VERIFY_WEIGHTS", "check which weights a server really serves", "verifying:run"),
    "plan": SubCommand(
        "profile:PLAN", "say how much memory, time and disk a run needs, and whether it fits", "planning:run"
    ),
    "profile": SubCommand("profile:PROFILE", "run a few steps, and say where time, memory and idle time go"),
    "graph": SubCommand("graph", "show the models of a run and the stages of a step, as text or as a picture"),
    "config": SubCommand("config:CONFIG", "show the resolved configuration and where each value comes from"),
    "convert-config": SubCommand("config:CONVERT_CONFIG", "translate a configuration of TRL or verl into one of Tandem's"),
    "doctor": SubCommand("doctor", "show what this machine has, for a bug report"),
}

EPILOG = """commands:
{commands}

`tandem COMMAND --help` says more about each. For a start:

  tandem train examples/addition_grpo.yaml --dry-run    check a run and say what it would do
  tandem train examples/addition_grpo.yaml              learn one-digit addition in a few minutes on a CPU
  tandem generate smollm2-135m "What is 3 + 4?"         ask the built-in model

exit codes: 0 done, 1 failed, 2 wrong configuration or usage, 130 interrupted (Ctrl-C, SIGTERM, SIGHUP)"""


def top_parser() -> argparse.ArgumentParser:
    """Returns the parser of `tandem` itself, which knows only the names of the commands."""
    commands = "\n".join(f"  {name:<16}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tandem",
        usage="tandem COMMAND …",
        description="Train language models with reinforcement learning, on a CPU or on GPUs.",
        epilog=EPILOG.format(commands=commands),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    return parser


def _unknown(text: str, argv: Sequence[str], parser: argparse.ArgumentParser, kind: type) -> str:
    """Suggests what to write instead of an unknown option. ``kind``: the configuration class of the command, whose keys are
    compared with the option's name."""
    name, _, value = text.partition("=")
    near = get_close_matches(name, parser._option_string_actions, n=1, cutoff=0.7)
    if near or "key=value" not in parser.format_usage():
        return f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "")
    key, keys = name.strip("-").replace("-", "_"), list(all_keys(kind))
    value = value or "".join(argv[argv.index(text) + 1 :][:1]) or "…"
    if value.endswith((".yaml", ".yml")):
        return f"a configuration file is written without {name}: {value} key=value …"
    foreign = "" if key in keys else hint(key, keys)
    key = key if key in keys else (nearest_keys(key, keys) or [key])[0]
    return f"values are given as key=value: {foreign or f'{key}={value}'}"


def _terminate(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM and SIGHUP like Ctrl-C: the exception lets everything close. If another rank has failed, the exception
    is `RankFailed` instead."""
    cause = failed_elsewhere()
    raise KeyboardInterrupt if cause is None else RankFailed(cause)


def import_object(name: str) -> Any:
    """Imports ``package.module`` or ``package.module:object`` without looking for garbage, of which an import makes none:
    looking for it takes a fifth of the time."""
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        return pkgutil.resolve_name(name)
    finally:
        if len(sys.modules) > before and not gc.get_freeze_count():  # the count takes up to 0.1 s
            gc.freeze()  # together these make all objects old, so that the next collections do not visit them
            gc.unfreeze()
        if enabled:
            gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    top = top_parser()
    name = top.parse_args(argv[:1] or ["--help"]).command
    if name not in COMMANDS:
        top.error(f"there is no command {name!r}; {nearest_names(name, COMMANDS).partition(' There')[0]}")
    if sys.flags.optimize > 1:
        top.error("python -OO (PYTHONOPTIMIZE=2) removes the docstrings that transformers reads; leave it out")
    command = COMMANDS[name]
    module = import_object(f"tandem.cli.{command.module}")
    parser = argparse.ArgumentParser(
        prog=f"tandem {name}",
        description=getattr(module, "description", module.__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    arguments, unknown = parser.parse_known_intermixed_args(argv[1:])
    if unknown:
        parser.error(_unknown(unknown[0], argv, parser, getattr(module, "config", TrainConfig)))
    arguments.command_line = argv

    def start(arguments: argparse.Namespace) -> int:
        function = import_object(f"tandem.cli.{command.runs}") if command.runs else module.run
        if signal.getsignal(signal.SIGINT) is leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code: int = function(arguments)
        return code

    return run(start, arguments, getattr(module, "interrupted", None))


def run(
    function: Callable[[argparse.Namespace], int],
    arguments: argparse.Namespace,
    interrupted: Callable[[argparse.Namespace], str] | None = None,
) -> int:
    """Calls the command and returns its exit code. A `TandemError` becomes one message. ``interrupted`` returns the text to
    print after Ctrl-C."""
    # a terminal that closes sends SIGHUP; nohup ignores the signal, and it stays ignored
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    handled = [signal.SIGTERM, *hangup] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, _terminate) for number in handled}
    try:
        with command_output():
            return _exit_code(function, arguments, interrupted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(
    function: Callable[[argparse.Namespace], int],
    arguments: argparse.Namespace,
    interrupted: Callable[[argparse.Namespace], str] | None,
) -> int:
    try:
        with telling_errors():
            code = function(arguments)
            print(end="", flush=True)  # an error of writing the output is raised here, inside the try
            return code
    except KeyboardInterrupt:
        state = interrupted(arguments) if interrupted else ""
        print(f"\nInterrupted. {state}".rstrip(), file=sys.stderr)
        return EXIT_INTERRUPTED
    except ReaderGone:  # `tandem config … | head`
        return EXIT_FAILED
    except TandemError as error:
        if arguments.debug:
            raise
        reason = "" if isinstance(error, ConfigError) else _no_process(error)
        print(f"error: {error}{reason}", file=sys.stderr)
        if isinstance(error, ConfigError):
            return EXIT_CONFIG
        return EXIT_FINAL if has_launcher() and not error.may_pass else EXIT_FAILED
    except BaseException as error:  # boundary: a library written in Rust panics if it cannot start a thread
        if arguments.debug or not (reason := _no_process(error)):
            raise
        print(f"error: {kind_and_text(error)}{reason}", file=sys.stderr)
        return EXIT_FAILED


def _no_process(error: BaseException | None) -> str:
    """Returns advice if the error or one of its causes means that no more processes or threads can be started, otherwise
    an empty text."""
    while error is not None:
        place = traceback.extract_tb(error.__traceback__)[-1:]
        locked = any("flock" in (frame.line or "") for frame in place)  # flock fails with the same message as fork
        if not locked and any(
            words in kind_and_text(error) for words in ("can't start new thread", os.strerror(errno.EAGAIN))
        ):
            limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
            remedy = (
                "Type `ulimit -u 4096` before the command" if 0 <= limit < 4096 else "Let the container have more (pids.max)"
            )
            return (
                ". No process or thread can be started: there are too many, or no memory for another. `ulimit -u` is "
                f"{limit if limit >= 0 else 'unlimited'} and counts all programs of your user; a container may allow fewer "
                f"(pids.max). {remedy}, or use fewer threads: threads=1"
            )
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def run_script(script: Callable[[list[str]], int | None]) -> NoReturn:
    """Runs an example's ``main(arguments)`` and exits like a command: an error becomes one message, Ctrl-C one sentence."""

    def trains(_: argparse.Namespace) -> int:
        survive_lost_output()
        return script(sys.argv[1:]) or 0

    sys.exit(run(trains, argparse.Namespace(debug=False)))


if __name__ == "__main__":
    sys.exit(main())
