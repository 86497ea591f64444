"""Serve reward models over HTTP, for runs on other machines, or of other systems.

examples:
  tandem serve-reward runs/helpful/checkpoints/step_60
  tandem serve-reward helpful=runs/helpful/checkpoints/step_60 safe=runs/safety/checkpoints/step_40 --port 8001
  tandem serve-reward glad=CLASSIFIER rude=CLASSIFIER --class-label glad=joy --class-label rude=insult
  tandem train … reward="remote(url=http://127.0.0.1:8001, model=helpful) + 0.2*format"

It listens on this machine only unless --host says otherwise, and then everyone needs the token. Runs of OpenRLHF use the
route /get_reward. See docs/rewards.md.
"""

import argparse

from tandem.cli.listening import add_address, add_media_store
from tandem.cli.sampling import add_device_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "models", nargs="+", metavar="[NAME=]FOLDER", help="reward models: checkpoints of `tandem reward`, or hub names"
    )
    parser.add_argument(
        "--class-label",
        action="append",
        default=[],
        metavar="[NAME=]CLASS",
        help="of a classifier with several classes: the name or number of the class whose log-odds are the score; once for "
        "each, with NAME= where several models are served",
    )
    add_address(parser, port=8001)
    add_media_store(parser)
    engine = parser.add_argument_group("engine")
    add_device_arguments(engine)
    engine.add_argument("--batch-size", type=int, default=64, help="most completions that are read at once (default: 64)")
