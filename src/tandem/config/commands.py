"""The commands that train, and the configuration of each."""

from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig

KINDS: dict[str, type[BaseConfig]] = {
    "train": TrainConfig,
    "sft": SFTConfig,
    "preference": PreferenceConfig,
    "reward": RewardModelConfig,
    "distill": DistillConfig,
}
"""Name of a command that trains → its configuration."""

COMMANDS = {kind: name for name, kind in KINDS.items()}
"""Whose configuration it is; `run.json` says so, for `tandem continue`."""
