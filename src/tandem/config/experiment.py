"""The whole configuration of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.curriculum import CurriculumConfig
from tandem.config.data import DatasetConfig, ValidDatasetConfig
from tandem.config.generation import GenerationConfig
from tandem.config.roles import ActorConfig, CriticConfig, ReferenceConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.state import CheckpointConfig, RecoverConfig, RunConfig
from tandem.config.tracking import TrackingConfig


@dataclass(frozen=True)
class EvaluateConfig:
    """Accuracy on the validation set, greedy unless there are several samples; in supervised training, the loss there."""

    every_steps: int | None = None
    """Evaluate before the first step, every so many steps and at the end; null never evaluates."""

    max_rows: int | None = 128
    """Rows of the validation set that are used; null uses all."""

    max_new_tokens: int | None = None
    """Longest answer in evaluation; null takes `gconfig.max_new_tokens`. For `tandem train` only."""

    n_samples: int = 1
    """Samples of each row; several give `eval/pass@k` and `eval/maj@k` too."""

    temperature: float | None = None
    """Temperature of evaluation, 0 is greedy; null is greedy with one sample and `gconfig.temperature` with several."""


@dataclass(frozen=True)
class BaseConfig:
    """What every kind of run has."""

    experiment_name: str = "tandem"
    """First part of the run folder's name."""

    trial_name: str = "trial"
    """Second part of the run folder's name; a folder that has a run is never overwritten."""

    run: RunConfig = field(default_factory=RunConfig)
    """The run folder."""

    seed: int = 0
    """All randomness of the run follows from this; 0 to 2³² − 1."""

    deterministic: bool = False
    """Fixed order and fixed waves, so that two runs are equal to the bit on one machine."""

    threads: int | None = None
    """CPU threads; null takes the cores that this process may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes a GPU when there is one."""

    total_train_steps: int | None = None
    """Batches to train on; null trains for `total_train_epochs`."""

    total_train_epochs: int | None = None
    """Passes over the data set; null with `total_train_steps` unset means 1."""

    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """Training rows."""

    valid_dataset: ValidDatasetConfig = field(default_factory=ValidDatasetConfig)
    """Validation rows."""

    system_prompt: str | None = None
    """System message put before each prompt; null puts none."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the model's chat template."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """The model that is trained."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""

    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Interruptions, faults and restarts."""

    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation during training."""

    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Metrics and samples."""


@dataclass(frozen=True)
class TrainConfig(BaseConfig):
    """Reinforcement learning: `tandem train`."""

    async_training: bool = False
    """Generate while training, within the staleness bound."""

    placement: Literal["colocate", "decoupled"] | None = None
    """Generation and training share the devices in turns, or have their own; null follows `async_training`."""

    workflow: str = "rlvr"
    """Registered workflow, or `my_file.py:ClassOrFunction`; see docs/writing_a_workflow.md."""

    reward: str = "math"
    """Registered reward, or `my_file.py:function`."""

    reward_timeout_s: float = 15.0
    """A reward that takes longer is killed and is a failure of its sample, never a 0."""

    reward_workers: int | None = None
    """Most worker processes of a reward that runs in them, as every `def` of yours does; null is one for each sample of a
    step, but at most 8 a core and 64. Beyond the cores, a call begins only while others wait (sleep, network)."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Choice of prompts."""

    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation and staleness."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The algorithm."""

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The reference policy."""

    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic."""


@dataclass(frozen=True)
class SFTConfig(BaseConfig):
    """Supervised fine-tuning: `tandem sft`."""

    batch_size: int = 16
    """Rows in one optimizer step."""

    max_length: int = 1024
    """Rows with more tokens are dropped with a reason."""
