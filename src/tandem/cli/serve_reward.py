"""Serve reward models over HTTP, for runs on other machines, or of other systems.

examples:
  tandem serve-reward runs/helpful/checkpoints/step_60
  tandem serve-reward helpful=runs/helpful/checkpoints/step_60 safe=runs/safety/checkpoints/step_40 --port 8001
  tandem train … reward="remote(url=http://127.0.0.1:8001, model=helpful) + 0.2*format"

It listens on this machine only unless --host says otherwise, and then everyone needs the token. Runs of OpenRLHF use the
route /get_reward. See docs/rewards.md.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from tandem.cli.listening import Listening, access_of, add_address, check_address
from tandem.cli.sampling import add_device_arguments, device_of
from tandem.config.errors import ConfigError
from tandem.flow.judging import open_judge
from tandem.protocol.access import Access
from tandem.rewards.serving import RewardApplication
from tandem.state.machine import usable_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "models", nargs="+", metavar="[NAME=]FOLDER", help="reward models: checkpoints of `tandem reward`, or hub names"
    )
    add_address(parser, port=8001)
    engine = parser.add_argument_group("engine")
    add_device_arguments(engine)
    engine.add_argument("--batch-size", type=int, default=64, help="most completions that are read at once (default: 64)")


def run(arguments: argparse.Namespace) -> int:
    """`tandem serve-reward`."""
    check_address(arguments)
    for name, value in (("--threads", arguments.threads), ("--batch-size", arguments.batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    device = device_of(arguments)
    torch.set_num_threads(arguments.threads or usable_cores())
    judges = {name: open_judge(path, device, arguments.dtype) for name, path in _named(arguments.models).items()}
    with ExitStack() as stack:
        access, files = access_of(arguments, stack, control=False)
        asyncio.run(_serve(RewardApplication(judges, batch_size=arguments.batch_size), access, arguments, files))
    return 0


def _named(models: Sequence[str]) -> dict[str, str]:
    """Folders by name: the one before ``=``, or the last part of the folder.

    Raises:
        ConfigError: two models have one name.
    """
    named: dict[str, str] = {}
    for model in models:
        name, equals, path = model.partition("=") if not Path(model).exists() else ("", "", model)
        if not equals:
            name, path = Path(model).name, model
        elif not name:
            raise ConfigError(f"{model}: a name stands before =, as in helpful=FOLDER")
        if name in named:
            raise ConfigError(f"two models are called {name!r}; give them names: helpful={named[name]} other={path}")
        named[name] = path
    return named


async def _serve(
    application: RewardApplication, access: Access, arguments: argparse.Namespace, files: dict[str, Path]
) -> None:
    await Listening(application, access, arguments, files).until_told(
        ", ".join(application.models), more='; a run asks with reward="remote(url={url})"'
    )
