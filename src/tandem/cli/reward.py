"""Train a reward model from ranked pairs or judged steps. The configuration is a YAML file and `key=value` overrides.

example:
  tandem reward examples/addition_reward.yaml actor.optimizer.lr=2e-5
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from tandem.cli.running import add_run_arguments, run_training, where
from tandem.config.preference import RewardModelConfig

add_arguments = add_run_arguments
interrupted = functools.partial(where, kind=RewardModelConfig)


def load() -> Callable[..., Any]:
    """The loop; importing it loads torch."""
    from tandem.trainers.reward import train  # noqa: PLC0415 — imports torch

    return train


def run(arguments: argparse.Namespace) -> int:
    """`tandem reward`."""
    return run_training(arguments, RewardModelConfig, load)
