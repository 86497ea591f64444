"""The server of `tandem serve-reward`."""

import argparse
import asyncio
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch

from tandem.cli.arguments import device_of, require
from tandem.cli.listening import Listening, access_of, check_address, media_bound
from tandem.config.devices import usable_cores
from tandem.config.errors import ConfigError
from tandem.flow.residents import open_judge
from tandem.protocol.access import Access
from tandem.rewards.serving import RewardApplication, ServedJudge


def run(arguments: argparse.Namespace) -> int:
    """Runs `tandem serve-reward` until it is stopped, and returns the exit code."""
    check_address(arguments)
    options = {"--threads": arguments.threads, "--batch-size": arguments.batch_size}
    require((name, value, value is None or value >= 1, "at least 1") for name, value in options.items())
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
    """Loads the reward models of the command line and returns them by name.

    Args:
        models: `FOLDER` or `NAME=FOLDER`.
        class_labels: `CLASS` or `NAME=CLASS`: the class of a classifier whose log-odds are the score.
        device: `cuda` or `cpu`.
        dtype: precision of the weights.

    Raises:
        ConfigError: a name is repeated or unknown, or `open_judge` refuses a folder.
    """
    folders = _named(models)
    chosen: dict[str, str | int] = {}
    for label in class_labels:
        name, equals, class_name = label.partition("=")
        if not equals and len(folders) == 1:
            name, class_name = next(iter(folders)), label
        if name not in folders or not class_name or name in chosen:
            raise ConfigError(
                f"--class-label {label}: give one class for each model, as in {next(iter(folders))}=CLASS; the models are "
                + ", ".join(folders)
            )
        chosen[name] = int(class_name) if re.fullmatch("[0-9]{1,6}", class_name) else class_name
    return {name: open_judge(path, device, dtype, chosen.get(name)) for name, path in folders.items()}


def _named(models: Sequence[str]) -> dict[str, str]:
    """Returns folders by name. The name of a model is the text before ``=``, or the last part of its folder.

    Raises:
        ConfigError: two models have one name.
    """
    named: dict[str, str] = {}
    for model in models:
        name, equals, path = model.partition("=") if not Path(model).exists() else ("", "", model)
        if not equals:
            name, path = Path(model).name, model
        elif not name:
            raise ConfigError(f"{model}: write a name before =, as in helpful=FOLDER")
        if name in named:
            raise ConfigError(f"two models are called {name!r}; give them names: helpful={named[name]} other={path}")
        named[name] = path
    return named


async def _serve(
    application: RewardApplication, access: Access, arguments: argparse.Namespace, files: dict[str, Path]
) -> None:
    await Listening(application, access, arguments, files).until_stopped(
        ", ".join(application.models), more='; a run asks with reward="remote(url={url})"'
    )
