"""The server of `tandem serve-reward`."""

import argparse
import asyncio
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch

from tandem.cli.listening import Listening, access_of, check_address, media_bound
from tandem.cli.sampling import device_of
from tandem.config.cores import usable_cores
from tandem.config.errors import ConfigError
from tandem.flow.judging import open_judge
from tandem.protocol.access import Access
from tandem.rewards.serving import RewardApplication, ServedJudge


def run(arguments: argparse.Namespace) -> int:
    """`tandem serve-reward`."""
    check_address(arguments)
    for name, value in (("--threads", arguments.threads), ("--batch-size", arguments.batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    device = device_of(arguments)
    torch.set_num_threads(arguments.threads or usable_cores())
    judges = judges_of(arguments.models, arguments.class_label, device, arguments.dtype)
    with ExitStack() as stack:
        access, files = access_of(arguments, stack, control=False)
        bound = media_bound(arguments, stack, reads_media=any(judge.media for judge in judges.values()))
        served = RewardApplication(judges, batch_size=arguments.batch_size, bound=bound)
        asyncio.run(_serve(served, access, arguments, files))
    return 0


def judges_of(
    models: Sequence[str], class_labels: Sequence[str], device: str, dtype: Literal["auto", "bfloat16", "float32"]
) -> dict[str, ServedJudge]:
    """The reward models of the command line by name, each with its class of ``class_labels``.

    Raises:
        ConfigError: names that are the same or missing, or a folder that `open_judge` refuses.
    """
    folders = _named(models)
    chosen: dict[str, str | int] = {}
    for label in class_labels:
        name, equals, wanted = label.partition("=")
        if not equals and len(folders) == 1:
            name, wanted = next(iter(folders)), label
        if name not in folders or not wanted or name in chosen:
            raise ConfigError(
                f"--class-label {label}: give one class for a model, as in {next(iter(folders))}=CLASS; the models are "
                + ", ".join(folders)
            )
        chosen[name] = int(wanted) if re.fullmatch("[0-9]{1,6}", wanted) else wanted
    return {name: open_judge(path, device, dtype, chosen.get(name)) for name, path in folders.items()}


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
