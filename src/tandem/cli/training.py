"""The commands that train. Each is a configuration and a loop; the rest is the same for all of them."""

import argparse
import importlib
from dataclasses import dataclass
from pathlib import Path

from tandem.cli.running import add_run_arguments, run_training, where
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.state.existing import existing_run, run_info


@dataclass(frozen=True)
class Training:
    """A command that trains."""

    config: type[BaseConfig]
    loop: str
    """The module whose ``train`` is the loop; importing it loads torch."""

    description: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        return run_training(arguments, self.config, lambda: importlib.import_module(self.loop).train)

    def interrupted(self, arguments: argparse.Namespace) -> str:
        return where(arguments, self.config)


TRAIN = Training(
    TrainConfig,
    "tandem.trainers.rl",
    """Train a model with reinforcement learning. The configuration is a YAML file and `key=value` overrides.

examples:
  tandem train examples/addition_grpo.yaml
  tandem train examples/gsm8k_grpo.yaml trial_name=hot gconfig.temperature=1.2 --dry-run
  tandem train train_dataset.path=addition reward=my_reward.py:score total_train_steps=20
""",
)
SFT = Training(
    SFTConfig,
    "tandem.trainers.sft",
    """Supervised fine-tuning on questions and answers. The configuration is a YAML file and `key=value` overrides.

example:
  tandem sft examples/gsm8k_sft.yaml actor.optimizer.lr=2e-5
""",
)
PREFERENCE = Training(
    PreferenceConfig,
    "tandem.trainers.preference",
    """Learn from preferences (DPO, IPO, KTO, SimPO, ORPO). The configuration is a YAML file and `key=value` overrides.

example:
  tandem preference examples/addition_preference.yaml loss=simpo loss.beta=2
""",
)
REWARD = Training(
    RewardModelConfig,
    "tandem.trainers.reward",
    """Train a reward model from ranked pairs or judged steps. The configuration is a YAML file and `key=value` overrides.

example:
  tandem reward examples/addition_reward.yaml actor.optimizer.lr=2e-5
""",
)
DISTILL = Training(
    DistillConfig,
    "tandem.trainers.distill",
    """Distillation: the student answers, and a teacher model judges each token of the answers. The configuration is
a YAML file and `key=value` overrides.

example:
  tandem distill examples/addition_distill.yaml teacher.path=FOLDER
""",
)

TRAINING = {"train": TRAIN, "sft": SFT, "preference": PREFERENCE, "reward": REWARD, "distill": DISTILL}


def command_of(run: Path) -> str:
    """The command that began the run. Raises `ConfigError` where the folder holds no run, or does not say."""
    if existing_run(run) is None or not (run / "config.yaml").is_file():
        raise ConfigError(
            f"{run} is not the folder of a run that a command of Tandem made; `tandem runs` lists those there are"
        )
    command = run_info(run).get("command")
    if command not in TRAINING:
        raise ConfigError(
            f"{run} does not say which command began it: its run.json is lost or damaged, or a script made it. "
            f'Restore run.json, with {", ".join(TRAINING)} as its "command", or repeat the command that began the run'
        )
    return str(command)
