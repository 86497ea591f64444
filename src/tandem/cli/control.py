"""Change the reward of a run while it trains, or see what was changed. The change counts from the next step on.

tandem control RUN                              the reward as it is, what was changed, and what is waiting
tandem control RUN reward.weight format=0.3     give the term `format` another weight
tandem control RUN reward.add '0.2*format'      add a term that needs no model
tandem control RUN reward.remove format         take a term away

RUN is the run's folder; the run must be going on, on this machine. The command waits until the run has answered, which it
does between two steps.
"""

import argparse
from pathlib import Path

from tandem.cli.arguments import run_folder
from tandem.config.changes import ACTIONS, Change
from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.recipes import sums_of
from tandem.config.terms import read_terms
from tandem.state.control import ask, changes, requests, take_answer
from tandem.state.existing import begun_elsewhere, is_held, run_info


class NoAnswer(TandemError):
    """The run has not answered yet, or refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run, such as addition/grpo")
    parser.add_argument("action", nargs="?", help=f"{', '.join(ACTIONS)}; nothing shows what was changed")
    parser.add_argument("value", nargs="?", help="NAME=NUMBER, a term, or a name")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="longest wait for the answer; steps may be long (default: 600)"
    )


def run(arguments: argparse.Namespace) -> int:
    folder = run_folder(arguments.run)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
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
            f"{folder} has runner=ray, under which the reward does not change while it trains; stop the run, and then: "
            f"tandem continue {folder} reward=… --override"
        )
    name = ask(folder, change)
    answer = take_answer(folder, name, arguments.timeout_s)
    if answer is None:
        ended = "" if is_held(folder) else ", and the run has ended"
        raise NoAnswer(
            f"no answer within {arguments.timeout_s:g} s{ended}; the change waits, and is made before the run's next step "
            f"(to take it back, delete {folder / 'control' / name}.request)"
        )
    if "refused" in answer:
        raise ConfigError(str(answer["refused"]))
    print(f"From step {answer['step']} on: reward={answer['reward']}")
    return 0


def refuse_ended(folder: Path) -> None:
    """Passes if the run goes on, here.

    Raises:
        ConfigError: it does not; says what to do.
    """
    if is_held(folder):
        return
    host = begun_elsewhere(folder)
    where = "is not going on" if host is None else f"was begun on {host}, where this must be run"
    raise ConfigError(f"{folder} {where}; `tandem continue {folder}` lets it go on")


def current_reward(folder: Path) -> str:
    """The reward as it is, its changes, and those that wait."""
    reward = load_config(TrainConfig, folder / "config.yaml").config.reward
    made = changes(folder, str(run_info(folder).get("id") or "") or None, reward)
    reward = str(made[-1]["reward"]) if made else reward
    every = (term for one in sums_of(reward) for term in read_terms(one))
    terms = [f"  {term.label:<20} {term.weight:>8g}  {term.spelling}" for term in every]
    lines = [f"reward={reward}", *terms]
    lines += [f"step {row['step']}: {row['action']} {row['value']}" for row in made] or ["Nothing was changed so far."]
    lines += [f"waiting: {request.change or request.id}" for request in requests(folder)]
    usage = [f"  tandem control {folder} {action} {value}" for action, value in ACTIONS.items()]
    return "\n".join([*lines, "To change it:", *usage])
