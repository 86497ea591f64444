"""`tandem eval`, `tandem compare` and `tandem check-reward`: measure a model or a reward, train nothing."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from tandem.cli.arguments import TandemCommand, split_arguments
from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError, TandemError
from tandem.config.evaluation import load_evaluation
from tandem.config.load import Resolved, describe
from tandem.config.yaml_file import Assignment, Scalar
from tandem.state.resuming import pinned, pins

OPTIONS = {
    "workflow": ("workflow", str, "registered workflow, or my_file.py:ClassOrFunction (default: rlvr)"),
    "reward": ("reward", str, "registered reward, or my_file.py:function (default: the benchmark's, else math)"),
    "success": ("success", str, "when a sample is right, such as 'reward >= 1' (default: if its accuracy is 1)"),
    "n": ("gconfig.n_samples", int, "samples of each row; several give pass@k and maj@k (default: 1, greedy)"),
    "temperature": ("gconfig.temperature", float, "sample at this temperature instead of greedily"),
    "max-new-tokens": ("gconfig.max_new_tokens", int, "longest answer in tokens (default: 512)"),
    "max-rows": ("max_rows", int, "only the first rows of each data set"),
    "seed": ("seed", int, "the same seed gives the same answers (default: 0)"),
    "label": ("label", str, "name of the evaluation's folder (default: model and data)"),
    "out": ("out", str, "folder of evaluations (default: evaluations)"),
}
"""Option → (key, type, help): short forms of frequently used keys."""

NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.+)")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="MODEL [FILE] [key=value …]",
        help="a model: a folder, a run (RUN or RUN@STEP), a hub name or smollm2-135m; a YAML file; keys that replace its "
        "values (docs/configuration.md)",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="DATA",
        help="known benchmark, folder, file or hub name, or BENCHMARK=FOLDER; once for each data set",
    )
    for option, (key, kind, text) in OPTIONS.items():
        parser.add_argument(f"--{option}", type=kind, metavar=key.rpartition(".")[2].upper(), help=text)
    parser.add_argument(
        "--follow",
        action="store_true",
        help="the model is a run: evaluate its checkpoints as it trains, as its configuration says (evaluate.where=job)",
    )
    parser.add_argument("--k", type=int, nargs="+", help="the k of pass@k and maj@k (default: 2, 4, 8 … and n)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that the start checks, show the configuration and its sources, and start nothing",
    )
    parser.add_argument("--all", action="store_true", help="with --dry-run: show also the keys with default values")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object; progress goes to stderr")


def resolve(arguments: argparse.Namespace) -> Resolved[Any]:
    """Builds the configuration from the arguments.

    Raises:
        ConfigError: there is more than one model or file, or a value is refused.
    """
    words = [word for word in arguments.arguments if not word.endswith((".yaml", ".yml"))]
    files = [word for word in arguments.arguments if word.endswith((".yaml", ".yml"))]
    if len(files) > 1:
        raise ConfigError(f"one configuration file at most, got {', '.join(files)}")
    try:
        model, overrides = split_arguments(words)
    except ConfigError as error:
        raise ConfigError(f"one model at most, got {', '.join(w for w in words if '=' not in w)}") from error
    chosen: list[str | Assignment] = [_assignment("model", model)] if model is not None else []
    chosen += overrides
    chosen += _of_options(arguments)
    resolved = pinned(load_evaluation(files[0] if files else None, chosen))
    if not pins(resolved):
        return resolved
    return load_evaluation(files[0] if files else None, [*chosen, _assignment("model", resolved.config.model)])


def _of_options(arguments: argparse.Namespace) -> Iterator[Assignment]:
    for option, (key, _, _) in OPTIONS.items():
        value = getattr(arguments, option.replace("-", "_"))
        if value is not None:
            yield _assignment(key, value)
    if arguments.k:
        yield Assignment(("k",), [_scalar(k) for k in arguments.k], "command line")
    if arguments.data:
        yield Assignment(("data",), [_data(text) for text in arguments.data], "command line")


def _data(text: str) -> dict[str, Any]:
    named = NAMED.fullmatch(text)
    if named is None:
        return {"path": _scalar(text)}
    return {"path": _scalar(named.group(2)), "benchmark": _scalar(named.group(1))}


def _scalar(value: Any) -> Scalar:
    return Scalar(str(value), value)


def _assignment(key: str, value: Any) -> Assignment:
    return Assignment(tuple(key.split(".")), _scalar(value), "command line")


def _interrupted(arguments: argparse.Namespace) -> str:
    if arguments.follow:
        return "Finished evaluations are kept; the same command goes on from there."
    from tandem.evaluation.run import state_of  # noqa: PLC0415 — imports torch

    try:
        return state_of(resolve(arguments).config)
    except TandemError:
        return "Nothing was started."


def _evaluate(arguments: argparse.Namespace) -> int:
    if arguments.follow:
        return _follow(arguments)
    resolved = resolve(arguments)
    from tandem.evaluation.run import evaluate_model, try_evaluation  # noqa: PLC0415 — imports torch

    if arguments.dry_run:
        try_evaluation(resolved.config)
        print(describe(resolved, hidden=() if arguments.all else ("default",)))
        return 0

    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        finished = evaluate_model(resolved.config)
    print(json.dumps(finished.results, ensure_ascii=False) if arguments.json else finished.text)
    if finished.judged == 0:
        raise TandemError(f"no sample could be judged; {finished.folder}/samples.jsonl says why")
    return 0


def _follow(arguments: argparse.Namespace) -> int:
    for option in ("data", "k", "dry_run", "all"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option.replace('_', '-')} does not go with --follow, which evaluates as the run says")
    if files := [word for word in arguments.arguments if word.endswith((".yaml", ".yml")) and "=" not in word]:
        raise ConfigError(f"--follow takes no file, got {files[0]}: the run's own configuration names the data sets")
    name, overrides = split_arguments(arguments.arguments)
    if name is None:
        raise ConfigError("name the run to follow: tandem eval --follow RUN")
    from tandem.evaluation.validation import FIGURES, follow  # noqa: PLC0415 — imports torch

    measured = 0
    for figures in follow(name, [*overrides, *_of_options(arguments)]):
        measured += 1
        shown = {key: value for key, value in figures.items() if key in ("eval/accuracy", "eval/reward")}
        line = (
            json.dumps(figures)
            if arguments.json
            else f"step {figures['step']}: "
            + ", ".join(f"{key.removeprefix('eval/')} {value:.4g}" for key, value in shown.items())
        )
        print(line, flush=True)
    if not arguments.json:
        print(f"The run has ended; {measured} evaluations are new in its {FIGURES}, which `tandem view` shows.")
    return 0


EVAL = TandemCommand(
    """Evaluate a model on one or several data sets, with the engine, workflows and rewards of training; nothing is trained.

examples:
  tandem eval smollm2-135m --data gsm8k --max-rows 200
  tandem eval gsm8k/grpo@200 --data gsm8k --data svamp --n 8 --temperature 0.8
  tandem eval --follow addition/grpo threads=1
  tandem eval smollm2-135m --data my/folder prompt_column=text answer_column=label reward=my_reward.py:score

Known by name: gsm8k, math500, svamp, aime24, humaneval, mbpp, livecodebench, apps. They are downloaded from the Hugging Face
hub, or read from data_root=FOLDER or from a folder with the benchmark's name. The evaluation goes into evaluations/LABEL/.
After an interruption the same command goes on from where it stopped.
""",
    _add_arguments,
    _evaluate,
    interrupted=_interrupted,
)


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="an evaluation, or a run (RUN or RUN@STEP)")
    parser.add_argument("second", metavar="B", help="another; differences are B minus A")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap and the permutations (default: 0)")
    parser.add_argument("--confidence", type=float, default=0.95, help="level of the intervals (default: 0.95)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _compare(arguments: argparse.Namespace) -> int:
    from tandem.evaluation.compare import compare, describe, find_pair  # noqa: PLC0415 — imports torch

    if arguments.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {arguments.seed}")
    if not 0 < arguments.confidence < 1:
        raise ConfigError(f"--confidence must lie between 0 and 1, got {arguments.confidence}")
    first, second = find_pair(arguments.first, arguments.second)
    comparison = compare(first, second, seed=arguments.seed, confidence=arguments.confidence)
    print(json.dumps(comparison.as_json(), ensure_ascii=False) if arguments.json else describe(comparison))
    return 0


COMPARE = TandemCommand(
    """Compare two finished evaluations of the same rows, paired row by row, with a test of significance.

With one sample a row: McNemar's exact test. With several: a permutation test that flips the sign of each row's difference.
Intervals of differences: paired bootstrap over rows. Mean rewards are compared too.

A and B are evaluations (a folder or a label) or runs. For runs, the command looks for their evaluations of the same rows.

examples:
  tandem compare evaluations/smollm2-135m evaluations/gsm8k-sft-step_156
  tandem compare addition/grpo@10 addition/grpo
""",
    _add_compare_arguments,
    _compare,
)


READ = ("split", "prompt_column", "answer_column", "prompt_suffix")
"""Keys of the data set that the command line accepts."""


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("spec", metavar="SPEC", help="the reward, written as in reward=SPEC")
    parser.add_argument("data", metavar="DATA", help="folder, file, hub name, addition, or reasoning_gym:NAME")
    parser.add_argument("columns", nargs="*", metavar="key=value", help=f"how to read the data: {', '.join(READ)}")
    parser.add_argument("--rows", type=int, default=20, help="only the first rows (default: 20)")
    parser.add_argument("--timeout", type=float, default=15.0, help="deadline of a call in seconds (reward_timeout_s)")
    parser.add_argument("--json", action="store_true", help="print all results as one JSON object")


def data_config(arguments: argparse.Namespace) -> DatasetConfig:
    """Builds the data set's configuration from the command line.

    Raises:
        ConfigError: a key is unknown, or a number is out of range.
    """
    if arguments.rows < 1 or not arguments.timeout > 0:
        raise ConfigError(f"--rows must be at least 1 and --timeout above 0, got {arguments.rows} and {arguments.timeout:g}")
    options = dict(text.partition("=")[::2] for text in arguments.columns)
    for key in options:
        if key not in READ:
            raise ConfigError(f"unknown key {key!r}; the keys are {', '.join(READ)}, as in answer_column=label")
    return DatasetConfig(path=arguments.data, max_rows=arguments.rows, size=arguments.rows, **options)


def _check_reward(arguments: argparse.Namespace) -> int:
    """Runs `tandem check-reward` and returns the exit code: 1 if a problem was found, otherwise 0."""
    config = data_config(arguments)
    from tandem.data.dataset import load_dataset  # noqa: PLC0415 — these modules import torch
    from tandem.evaluation.reward_check import check_reward, report  # noqa: PLC0415
    from tandem.rewards.build import build_reward  # noqa: PLC0415

    rows = load_dataset(config).rows
    reward = build_reward(arguments.spec, timeout_s=arguments.timeout)
    with contextlib.closing(reward), contextlib.redirect_stdout(sys.stderr):
        result = check_reward(reward, rows, arguments.timeout)
    print(json.dumps(result.as_json(), ensure_ascii=True) if arguments.json else report(result))
    return 1 if result.problems else 0


CHECK_REWARD = TandemCommand(
    """Check a reward before training with it: its speed, whether it is deterministic, which texts make it hang, which forged
answers it accepts, and how often it rejects a reference answer. Works for every reward that judges inside episodes.

examples:
  tandem check-reward math data/gsm8k/test.jsonl --rows 50
  tandem check-reward "code(credit=share)" data/mbpp/mbpp.jsonl
  tandem check-reward my_reward.py:reward my/data.jsonl answer_column=label

Ctrl-C ends it early and prints the results so far. The exit code is 0 if no problem was found, and 1 otherwise.
""",
    _add_check_arguments,
    _check_reward,
)
