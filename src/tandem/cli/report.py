"""Write runs as one HTML file that opens anywhere, without a server and a network: curves, some samples, prompts over time,
where the time went, configuration, environment, cost, faults and the log. Docs: docs/viewer.md.

examples:
  tandem report runs/addition/grpo -o addition.html
  tandem report runs/addition/grpo runs/addition/dapo -o both.html
"""

import argparse
from pathlib import Path

from tandem.cli.view import places_of
from tandem.config.cache import cache_folder
from tandem.config.errors import ConfigError
from tandem.state.run_folder import write_atomically
from tandem.view.questions import RunAnswers
from tandem.view.report import report
from tandem.view.runs import Runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs; several are compared in one file")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="the HTML file; one there is replaced"
    )


def run(arguments: argparse.Namespace) -> int:
    output = arguments.output.resolve()  # a link stays one
    if output.exists() and not output.is_file():
        raise ConfigError(f"-o {arguments.output} is no file; give the name of the HTML file to write, such as report.html")
    places = places_of(arguments.runs)
    if any(place.step for place in places):
        raise ConfigError("a report is of whole runs: leave @STEP out, and look at a step with `tandem view`")
    runs = Runs(place.folder for place in places)
    text = report(RunAnswers(runs, cache_folder()))
    try:
        write_atomically(output, text)
    except OSError as error:
        raise ConfigError(f"-o {arguments.output} cannot be written: {error.strerror or error}") from error
    print(f"{arguments.output}: {', '.join(runs.all())}, {len(text) / 1e6:.1f} MB. Open it in a browser.")
    return 0
