"""`tandem view` and `tandem report`: runs in a browser, from a server or in a file."""

import argparse
import asyncio
import os
from contextlib import ExitStack
from pathlib import Path

from tandem.api.shared_files import write_atomically
from tandem.cli.arguments import TandemCommand, run_at
from tandem.cli.listening import Listening, access_of, add_address, check_address
from tandem.config.errors import ConfigError
from tandem.config.experiment import RunConfig
from tandem.config.libraries import cache_folder
from tandem.state.resuming import NamedRun
from tandem.tracking.record_files import recorded_steps
from tandem.view.pages import Viewer, report
from tandem.view.questions import RunAnswers
from tandem.view.runs import Runs, is_run


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    root = RunConfig().root
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN[@STEP]",
        help=f"runs, or folders of runs (default: {root}); with @STEP the address of its samples is printed",
    )
    add_address(parser, port=8700)


def _view(arguments: argparse.Namespace) -> int:
    check_address(arguments)
    places = places_of(arguments.runs)
    with ExitStack() as stack:
        access, files = access_of(arguments, stack, control=False)
        asyncio.run(_serve(places, access, arguments, files))
    return 0


def places_of(named: list[str]) -> list[NamedRun]:
    """Returns the named runs and folders of runs. Without a name, returns the default root of all runs.

    Raises:
        ConfigError: a run or folder does not exist, or the run has no recorded sample of the step.
    """
    if not named and not os.path.isdir(RunConfig().root):
        raise ConfigError(f"there is no folder {RunConfig().root} here: name runs or folders of runs, or train one first")
    paths = [(text, Path(os.path.expanduser(text))) for text in named or [RunConfig().root]]
    places = [NamedRun(path, None) if os.path.isdir(path) else run_at(text) for text, path in paths]
    for folder, step in places:
        if step is not None and step not in map(str, steps := recorded_steps(folder)):
            available = f"there are steps {steps[0]} to {steps[-1]}" if steps else "there are none of any step"
            raise ConfigError(f"{folder} has no samples of step {step}; {available}")
    return places


async def _serve(places: list[NamedRun], access, arguments: argparse.Namespace, files: dict[str, Path]) -> None:  # type: ignore[no-untyped-def]
    runs, cache = Runs(place.folder for place in places), cache_folder()
    viewer = Viewer(RunAnswers(runs, cache), cache)
    folders = await asyncio.to_thread(runs.all)
    names, steps = {folder: name for name, folder in folders.items()}, (place for place in places if place.step)
    more = "".join(f"\n{{url}}/#samples?run={names[place.folder.absolute()]}&step={place.step}" for place in steps)
    begun = sum(map(is_run, folders.values()))  # of an empty folder, in which a run may begin, there is a place but no run
    count = f"{begun} run{'' if begun == 1 else 's'}"
    where = "" if begun else f" (there is none yet below {', '.join(str(place.folder) for place in places)})"
    await Listening(viewer, access, arguments, files).until_stopped(count + where, more=more)


VIEW = TandemCommand(
    """\
Look at runs in a browser, during training and afterwards: curves, samples, tokens, prompts, time, configuration, logs.
Runs are only read, never changed. Docs: docs/viewer.md.

examples:
  tandem view                              all runs below runs/
  tandem view runs/addition/grpo           one run; several may be named, or folders of runs
  tandem view --host 0.0.0.0 --token-file ~/.tandem/token --allow-host gpu7.example.org

By default only this machine can connect. With a --host that other machines reach, every client needs the token.
""",
    _add_arguments,
    _view,
)


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs; several are compared in one file")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="the HTML file to write; a page there is replaced"
    )


def _report(arguments: argparse.Namespace) -> int:
    output = arguments.output.resolve()  # replaces the target of a symbolic link, not the link
    if output.exists() and not output.is_file():
        raise ConfigError(f"-o {arguments.output} is not a file; give the name of the HTML file to write, as report.html")
    if output.exists() and not _is_page(output):
        raise ConfigError(f"-o {arguments.output} is a file, and not an HTML page: give another name, or remove it")
    places = places_of(arguments.runs)
    if any(place.step for place in places):
        raise ConfigError("a report shows whole runs: leave @STEP out, and look at a step with `tandem view`")
    runs = Runs(place.folder for place in places)
    text = report(RunAnswers(runs, cache_folder()))
    try:
        write_atomically(output, text)
    except OSError as error:
        raise ConfigError(f"-o {arguments.output} cannot be written: {error.strerror or error}") from error
    print(f"{arguments.output}: {', '.join(runs.all())}, {len(text) / 1e6:.1f} MB. Open it in a browser.")
    return 0


def _is_page(file: Path) -> bool:
    """Tells whether a file may be replaced: it is an HTML page, or empty."""
    try:
        with file.open("rb") as content:
            start = content.read(100).lstrip().lower()
    except OSError:
        return False
    return not start or start.startswith((b"<!doctype html", b"<html"))


REPORT = TandemCommand(
    """\
Write runs as one HTML file that opens anywhere, without a server or a network: curves, some samples, prompts over time,
time by stage, configuration, environment, cost, faults and the log. Docs: docs/viewer.md.

examples:
  tandem report runs/addition/grpo -o addition.html
  tandem report runs/addition/grpo runs/addition/dapo -o both.html
""",
    _add_report_arguments,
    _report,
)
