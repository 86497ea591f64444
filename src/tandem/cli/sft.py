"""Supervised fine-tuning on questions and answers. The configuration is a YAML file and `key=value` overrides.

example:
  tandem sft examples/gsm8k_sft.yaml actor.optimizer.lr=2e-5
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from tandem.cli.running import add_run_arguments, run_training, where
from tandem.config.experiment import SFTConfig

add_arguments = add_run_arguments
interrupted = functools.partial(where, kind=SFTConfig)


def load() -> Callable[..., Any]:
    """The loop; importing it loads torch."""
    from tandem.trainers.sft import train  # noqa: PLC0415 — imports torch

    return train


def run(arguments: argparse.Namespace) -> int:
    """`tandem sft`."""
    return run_training(arguments, SFTConfig, load)
