"""Evaluate a model on one or several data sets, with the engine, workflows and rewards of training; nothing is trained.

examples:
  tandem eval smollm2-135m --data gsm8k --max-rows 200
  tandem eval gsm8k/grpo@200 --data gsm8k --data svamp --n 8 --temperature 0.8
  tandem eval --follow addition/grpo threads=1
  tandem eval smollm2-135m --data my/folder prompt_column=text answer_column=label reward=my_reward.py:score

Known by name: gsm8k, math500, svamp, aime24, humaneval, mbpp, livecodebench, apps, fetched from the Hugging Face hub or
taken from data_root=FOLDER or from a folder of that name. The evaluation goes into evaluations/LABEL/; interrupted, the
same command goes on where it was.
"""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from tandem.cli.arguments import split_arguments
from tandem.config.errors import ConfigError, TandemError
from tandem.config.evaluation import load_evaluation
from tandem.config.load import Resolved, describe
from tandem.config.yaml_file import Assignment, Scalar
from tandem.state.named import pinned, pins

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
"""Option → (key, type, help): short forms of the keys that are used most."""

NAMED = re.compile(r"([A-Za-z0-9_-]+)=(.+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--all", action="store_true", help="with --dry-run: show also the values that are as by default")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object; progress goes to stderr")


def resolve(arguments: argparse.Namespace) -> Resolved[Any]:
    """The configuration of these arguments.

    Raises:
        ConfigError: more than one model or file, or anything about a value.
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


def interrupted(arguments: argparse.Namespace) -> str:
    if arguments.follow:
        return "What is measured is kept; the same command goes on from there."
    from tandem.evaluation.run import state_of  # noqa: PLC0415 — imports torch, which is loaded by now

    try:
        return state_of(resolve(arguments).config)
    except TandemError:
        return "Nothing was started."


def run(arguments: argparse.Namespace) -> int:
    if arguments.follow:
        return _follow(arguments)
    resolved = resolve(arguments)
    from tandem.evaluation.run import evaluate_model, try_evaluation  # noqa: PLC0415 — imports torch

    if arguments.dry_run:
        try_evaluation(resolved.config)
        print(describe(resolved, hidden=() if arguments.all else ("default",)))
        return 0

    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        finished = evaluate_model(resolved)
    print(json.dumps(finished.results, ensure_ascii=False) if arguments.json else finished.text)
    if finished.judged == 0:
        raise TandemError(f"no sample could be judged; {finished.folder}/samples.jsonl says why")
    return 0


def _follow(arguments: argparse.Namespace) -> int:
    for option in ("data", "k", "dry_run", "all"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option.replace('_', '-')} does not go with --follow, which evaluates as the run says")
    if files := [word for word in arguments.arguments if word.endswith((".yaml", ".yml")) and "=" not in word]:
        raise ConfigError(f"--follow takes no file, and {files[0]} is one: the run's configuration names the questions")
    name, overrides = split_arguments(arguments.arguments)
    if name is None:
        raise ConfigError("name the run to follow: tandem eval --follow RUN")
    from tandem.evaluation.following import FIGURES, follow  # noqa: PLC0415 — imports torch

    measured = 0
    for figures in follow(name, [*overrides, *_of_options(arguments)]):
        measured += 1
        shown = {key: value for key, value in figures.items() if key in ("eval/accuracy", "eval/reward")}
        told = (
            json.dumps(figures)
            if arguments.json
            else f"step {figures['step']}: "
            + ", ".join(f"{key.removeprefix('eval/')} {value:.4g}" for key, value in shown.items())
        )
        print(told, flush=True)
    if not arguments.json:
        print(f"The run has ended; {measured} evaluations are new in its {FIGURES}, which `tandem view` shows.")
    return 0
