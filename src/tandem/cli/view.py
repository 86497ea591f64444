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
from contextlib import ExitStack
from pathlib import Path

from tandem.cli.arguments import run_folder
from tandem.cli.listening import Listening, access_of, add_address, check_address
from tandem.config.cache import cache_folder
from tandem.config.errors import ConfigError
from tandem.config.state import RunConfig
from tandem.view.questions import RunAnswers
from tandem.view.routes import Viewer
from tandem.view.runs import Runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    root = RunConfig().root
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", type=run_folder, help=f"runs, or folders of runs (default: {root})"
    )
    add_address(parser, port=8700)


def run(arguments: argparse.Namespace) -> int:
    check_address(arguments)
    runs = Runs(places_of(arguments.runs))
    with ExitStack() as stack:
        access, files = access_of(arguments, stack, control=False)
        asyncio.run(_serve(runs, access, arguments, files))
    return 0


def places_of(named: list[Path]) -> list[Path]:
    """The folders that are named, or the root of the runs.

    Raises:
        ConfigError: one is no folder.
    """
    places = named or [Path(RunConfig().root)]
    for place in places:
        if not place.expanduser().is_dir():
            raise ConfigError(f"there is no folder {place}; give the folder of a run, or one that has runs, such as runs")
    return places


async def _serve(runs: Runs, access, arguments: argparse.Namespace, files: dict[str, Path]) -> None:  # type: ignore[no-untyped-def]
    cache = cache_folder()
    viewer = Viewer(RunAnswers(runs, cache), cache)
    count = len(await asyncio.to_thread(runs.all))
    await Listening(viewer, access, arguments, files).until_told(f"{count} run{'' if count == 1 else 's'}")
