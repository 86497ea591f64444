"""Learn from preferences (DPO, IPO, KTO, SimPO, ORPO). The configuration is a YAML file and `key=value` overrides.

example:
  tandem preference examples/addition_preference.yaml loss=simpo loss.beta=2
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from tandem.cli.running import add_run_arguments, run_training, where
from tandem.config.preference import PreferenceConfig

add_arguments = add_run_arguments
interrupted = functools.partial(where, kind=PreferenceConfig)


def load() -> Callable[..., Any]:
    """The loop; importing it loads torch."""
    from tandem.trainers.preference import train  # noqa: PLC0415 — imports torch

    return train


def run(arguments: argparse.Namespace) -> int:
    """`tandem preference`."""
    return run_training(arguments, PreferenceConfig, load)
