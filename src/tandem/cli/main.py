"""`tandem …`: picks the command, and turns errors into messages and exit codes.

Commands are imported when they run, so that `tandem --help` and `tandem config` answer at once, without torch.
"""

import argparse
import errno
import os
import pkgutil
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import FrameType
from typing import NamedTuple, NoReturn

from tandem import __version__
from tandem.api.failures import RankFailed
from tandem.cli.output import ReaderGone, command_output, survive_lost_output
from tandem.config.coming_from import hint
from tandem.config.errors import ConfigError, TandemError, kind_and_text, nearest_keys, nearest_names
from tandem.config.experiment import TrainConfig
from tandem.config.keys import all_keys
from tandem.launch.local import EXIT_CONFIG, EXIT_FAILED, EXIT_FINAL, EXIT_INTERRUPTED
from tandem.launch.rank import failed_elsewhere, has_launcher, telling_errors


class SubCommand(NamedTuple):
    """A sub-command: the module, or ``module:object``, that has its `add_arguments(parser)` and its `run(arguments) -> int`,
    and its help."""

    module: str
    help: str
    runs: str = ""
    """The module that has `run` instead, if it imports torch, which `--help` does without."""


COMMANDS = {
    "train": SubCommand("tandem.cli.running:TRAIN", "train a model with reinforcement learning"),
    "sft": SubCommand("tandem.cli.running:SFT", "fine-tune a model on questions and answers"),
    "preference": SubCommand("tandem.cli.running:PREFERENCE", "learn from preferences: DPO, IPO, KTO, SimPO, ORPO"),
    "reward": SubCommand("tandem.cli.running:REWARD", "train a reward model from ranked pairs or judged steps"),
    "distill": SubCommand("tandem.cli.running:DISTILL", "train a student on its own answers, judged by a teacher model"),
    "launch": SubCommand("tandem.cli.launch", "start a run or a script on this machine, on Slurm or on Ray"),
    "continue": SubCommand("tandem.cli.continue_run", "go on with an interrupted run, or train a finished one longer"),
    "control": SubCommand("tandem.cli.control", "change the reward of a run while it trains"),
    "runs": SubCommand("tandem.cli.runs", "list runs: status, last metrics, checkpoints, size"),
    "trajectories": SubCommand(
        "tandem.cli.trajectories", "look at the samples that were trained, and those that were dropped"
    ),
    "view": SubCommand("tandem.cli.view", "look at runs in a browser, while they go on and afterwards"),
    "report": SubCommand("tandem.cli.report", "write runs as one HTML file that opens anywhere"),
    "export": SubCommand("tandem.cli.export", "copy the model of a run into a Hugging Face folder"),
    "generate": SubCommand("tandem.cli.generate", "let a model answer a prompt", "tandem.cli.generating"),
    "chat": SubCommand("tandem.cli.chat", "chat with a model: a folder, a hub name or a server", "tandem.cli.chatting"),
    "serve": SubCommand(
        "tandem.cli.serve", "serve a model over HTTP: OpenAI's protocol, and tokens for training runs", "tandem.cli.serving"
    ),
    "serve-reward": SubCommand(
        "tandem.cli.serve_reward", "serve reward models over HTTP, for runs elsewhere", "tandem.cli.serving_rewards"
    ),
    "algorithms": SubCommand("tandem.cli.algorithms", "list the algorithms, or explain one"),
    "eval": SubCommand("tandem.cli.eval", "evaluate a model on data sets"),
    "compare": SubCommand("tandem.cli.compare", "compare two evaluations, with a test of significance"),
    "check-reward": SubCommand("tandem.cli.check_reward", "check a reward: speed, determinism, hangs, forged answers"),
    "fleet": SubCommand("tandem.cli.fleet", "list, add and remove the inference servers of a run"),
    "verify-weights": SubCommand(
        "tandem.cli.verify_weights", "check which weights a server really serves", "tandem.cli.verifying"
    ),
    "plan": SubCommand(
        "tandem.cli.plan", "say how much memory, time and disk a run needs, and whether it fits", "tandem.cli.planning"
    ),
    "profile": SubCommand("tandem.cli.profile", "run a few steps, and say where time, memory and idle go"),
    "graph": SubCommand("tandem.cli.graph", "show the models of a run and the stages of a step, as text or as a picture"),
    "config": SubCommand("tandem.cli.config", "show the resolved configuration and where each value comes from"),
    "convert-config": SubCommand(
        "tandem.cli.convert_config", "translate a configuration of TRL or verl into one of Tandem's"
    ),
    "doctor": SubCommand("tandem.cli.doctor", "show what this machine has, for a bug report"),
}

EPILOG = """commands:
{commands}

`tandem COMMAND --help` says more about each. For a start:

  tandem train examples/addition_grpo.yaml --dry-run    check a run and say what it would do
  tandem train examples/addition_grpo.yaml              learn one-digit addition in a few minutes on a CPU
  tandem generate smollm2-135m "What is 3 + 4?"         ask the built-in model

exit codes: 0 done, 1 failed, 2 wrong configuration or usage, 130 interrupted (Ctrl-C, SIGTERM, SIGHUP)"""


def top_parser() -> argparse.ArgumentParser:
    """The parser of `tandem` itself, which knows the commands' names only."""
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
    """Says what to write in place of an option that the command of ``parser`` does not have. ``kind``: has its keys."""
    name, _, value = text.partition("=")
    near = get_close_matches(name, parser._option_string_actions, n=1, cutoff=0.7)
    if near or "key=value" not in parser.format_usage():
        return f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else "")
    key, keys = name.strip("-").replace("-", "_"), list(all_keys(kind))
    value = value or "".join(argv[argv.index(text) + 1 :][:1]) or "…"
    if value.endswith((".yaml", ".yml")):
        return f"a configuration file stands alone, without {name}: {value} key=value …"
    foreign = "" if key in keys else hint(key, keys)
    key = key if key in keys else (nearest_keys(key, keys) or [key])[0]
    return f"values are given as key=value: {foreign or f'{key}={value}'}"


def _terminate(number: int, frame: FrameType | None) -> None:
    """A polite kill ends like Ctrl-C: everything is closed on the way out; where another rank failed, as a failure."""
    cause = failed_elsewhere()
    raise KeyboardInterrupt if cause is None else RankFailed(cause)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    top = top_parser()
    name = top.parse_args(argv[:1] or ["--help"]).command
    if name not in COMMANDS:
        top.error(f"there is no command {name!r}; {nearest_names(name, COMMANDS).partition(' There')[0]}")
    if sys.flags.optimize > 1:
        top.error("python -OO (PYTHONOPTIMIZE=2) takes away the docstrings that transformers reads; leave it out")
    command = COMMANDS[name]
    module = pkgutil.resolve_name(command.module)
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

    def start(given: argparse.Namespace) -> int:
        code: int = (import_module(command.runs) if command.runs else module).run(given)
        return code

    return run(start, arguments, getattr(module, "interrupted", None))


def run(
    function: Callable[[argparse.Namespace], int],
    arguments: argparse.Namespace,
    interrupted: Callable[[argparse.Namespace], str] | None = None,
) -> int:
    """Calls the command; an error raised on purpose becomes one message. ``interrupted`` gives Ctrl-C's sentence."""
    # a terminal that closes asks as politely; under nohup nobody listens to it
    closes = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    polite = [signal.SIGTERM, *closes] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, _terminate) for number in polite}
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
            print(end="", flush=True)  # what is lost is lost now
            return code
    except KeyboardInterrupt:
        said = interrupted(arguments) if interrupted else ""
        print(f"\nInterrupted. {said}".rstrip(), file=sys.stderr)
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
    except BaseException as error:  # boundary: a library written in Rust panics where it gets no thread
        if arguments.debug or not (reason := _no_process(error)):
            raise
        print(f"error: {kind_and_text(error)}{reason}", file=sys.stderr)
        return EXIT_FAILED


def _no_process(error: BaseException | None) -> str:
    """Says what to type if an error, or one behind it, means that the user may start no more processes and threads."""
    while error is not None:
        place = traceback.extract_tb(error.__traceback__)[-1:]
        locked = any("flock" in (frame.line or "") for frame in place)  # which fails in the words of a fork
        if not locked and any(
            words in kind_and_text(error) for words in ("can't start new thread", os.strerror(errno.EAGAIN))
        ):
            most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
            more = (
                "Type `ulimit -u 4096` before the command" if 0 <= most < 4096 else "Let the container have more (pids.max)"
            )
            return (
                ". No process or thread can be started: there are too many, or no memory for another. `ulimit -u` is "
                f"{most if most >= 0 else 'unlimited'} and counts all programs of your user; a container may allow fewer "
                f"(pids.max). {more}, or ask for fewer by threads=1"
            )
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


def run_script(script: Callable[[list[str]], None]) -> NoReturn:
    """Runs an example's ``main(arguments)`` as a command would run: errors as one message, Ctrl-C as one sentence."""

    def trains(_: argparse.Namespace) -> int:
        survive_lost_output()
        return script(sys.argv[1:]) or 0

    sys.exit(run(trains, argparse.Namespace(debug=False)))


if __name__ == "__main__":
    sys.exit(main())
