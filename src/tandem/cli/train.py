"""Train a model with reinforcement learning. The configuration is a YAML file and `key=value` overrides.

examples:
  tandem train examples/addition_grpo.yaml
  tandem train examples/gsm8k_grpo.yaml trial_name=hot gconfig.temperature=1.2 --dry-run
  tandem train train_dataset.path=addition reward=my_reward.py:score total_train_steps=20
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from tandem.cli.running import add_run_arguments, run_training, where
from tandem.config.experiment import TrainConfig

add_arguments = add_run_arguments
interrupted = functools.partial(where, kind=TrainConfig)


def load() -> Callable[..., Any]:
    """The loop; importing it loads torch."""
    from tandem.trainers.rl import train  # noqa: PLC0415 — imports torch

    return train


def run(arguments: argparse.Namespace) -> int:
    """`tandem train`."""
    return run_training(arguments, TrainConfig, load)
