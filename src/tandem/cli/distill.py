"""Distillation: the student answers, and a teacher model judges each token of the answers. The configuration is
a YAML file and `key=value` overrides.

example:
  tandem distill examples/addition_distill.yaml teacher.path=FOLDER
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from tandem.cli.running import add_run_arguments, run_training, where
from tandem.config.preference import DistillConfig

add_arguments = add_run_arguments
interrupted = functools.partial(where, kind=DistillConfig)


def load() -> Callable[..., Any]:
    """The loop; importing it loads torch."""
    from tandem.trainers.distill import train  # noqa: PLC0415 — imports torch

    return train


def run(arguments: argparse.Namespace) -> int:
    """`tandem distill`."""
    return run_training(arguments, DistillConfig, load)
