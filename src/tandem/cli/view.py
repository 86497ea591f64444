"""Look at runs in a browser, while they go on and afterwards: curves, samples, tokens, prompts, time, configuration, logs.
It only reads. Docs: docs/viewer.md.

examples:
  tandem view                              all runs below runs/
  tandem view runs/addition/grpo           one run; several may be named, or folders of runs
  tandem view --host 0.0.0.0 --token-file ~/.tandem/token --allow-host gpu7.example.org

It listens on this machine only unless --host says otherwise, and then whoever looks needs the token.
"""

import argparse
import asyncio
import os
from contextlib import ExitStack
from pathlib import Path

from tandem.cli.arguments import run_at
from tandem.cli.listening import Listening, access_of, add_address, check_address
from tandem.config.cache import cache_folder
from tandem.config.errors import ConfigError
from tandem.config.state import RunConfig
from tandem.state.named import NamedRun
from tandem.tracking.record_files import recorded_steps
from tandem.view.questions import RunAnswers
from tandem.view.routes import Viewer
from tandem.view.runs import Runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    root = RunConfig().root
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN[@STEP]",
        help=f"runs, or folders of runs (default: {root}); of a step the samples' address is told",
    )
    add_address(parser, port=8700)


def run(arguments: argparse.Namespace) -> int:
    check_address(arguments)
    places = places_of(arguments.runs)
    with ExitStack() as stack:
        access, files = access_of(arguments, stack, control=False)
        asyncio.run(_serve(places, access, arguments, files))
    return 0


def places_of(named: list[str]) -> list[NamedRun]:
    """The runs that are named, and folders that have runs; the root of all runs if there is no name.

    Raises:
        ConfigError: there is no such run or folder, or no recorded sample of the step.
    """
    if not named and not os.path.isdir(RunConfig().root):
        raise ConfigError(f"there is no folder {RunConfig().root} here: name runs or folders of runs, or train one first")
    paths = [(text, Path(os.path.expanduser(text))) for text in named or [RunConfig().root]]
    places = [NamedRun(path, None) if os.path.isdir(path) else run_at(text) for text, path in paths]
    for folder, step in places:
        if step is not None and step not in map(str, steps := recorded_steps(folder)):
            there = f"there are steps {steps[0]} to {steps[-1]}" if steps else "there are none of any step"
            raise ConfigError(f"{folder} has no samples of step {step}; {there}")
    return places


async def _serve(places: list[NamedRun], access, arguments: argparse.Namespace, files: dict[str, Path]) -> None:  # type: ignore[no-untyped-def]
    runs, cache = Runs(place.folder for place in places), cache_folder()
    viewer = Viewer(RunAnswers(runs, cache), cache)
    found = await asyncio.to_thread(runs.all)
    names, steps = {folder: name for name, folder in found.items()}, (one for one in places if one.step)
    more = "".join(f"\n{{url}}/#samples?run={names[one.folder.absolute()]}&step={one.step}" for one in steps)
    what = f"{len(found)} run{'' if len(found) == 1 else 's'}"
    where = "" if found else f" (there is none yet below {', '.join(str(place.folder) for place in places)})"
    await Listening(viewer, access, arguments, files).until_told(what + where, more=more)
