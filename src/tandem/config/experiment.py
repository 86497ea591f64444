"""The whole configuration of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.constraint import ConstraintConfig
from tandem.config.curriculum import CurriculumConfig
from tandem.config.data import DatasetConfig, ValidDatasetConfig
from tandem.config.extend import ExtendConfig
from tandem.config.generation import GenerationConfig
from tandem.config.roles import ActorConfig, CriticConfig, ReferenceConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.state import CheckpointConfig, RecoverConfig, RunConfig
from tandem.config.terms import Spec
from tandem.config.tracking import TrackingConfig


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation on the validation rows. `tandem train`: accuracy of greedy answers, or of several samples; other commands:
    the loss."""

    every_steps: int | None = None
    """Evaluate before the first step, after every so many steps, and at the end; null turns evaluation off."""

    where: Literal["run", "job"] = "run"
    """`job`: the run evaluates nothing; `tandem eval --follow RUN`, a process of its own, evaluates its checkpoints and
    writes the figures into the run. For `tandem train`."""

    max_rows: int | None = 128
    """Use at most this many validation rows; null uses all."""

    max_new_tokens: int | None = None
    """Most tokens of an answer in evaluation; null takes `gconfig.max_new_tokens`. For `tandem train` only."""

    n_samples: int = 1
    """Samples a row; with several, `eval/pass@k` and `eval/maj@k` are measured too."""

    temperature: float | None = None
    """Temperature in evaluation; 0 is greedy. null: greedy with one sample a row, `gconfig.temperature` with several."""


@dataclass(frozen=True)
class BaseConfig:
    """Keys of every kind of run."""

    experiment_name: str = "tandem"
    """First part of the run folder's name."""

    trial_name: str = "trial"
    """Second part of the run folder's name. The same name again goes on with that run, or is refused; it never
    overwrites it."""

    run: RunConfig = field(default_factory=RunConfig)
    """The run folder."""

    seed: int = 0
    """Seed of all randomness in the run; 0 to 2³² − 1."""

    deterministic: bool = False
    """Fix all orders, so that two runs on one machine are equal to the bit."""

    threads: int | None = None
    """CPU threads; null takes all cores that the process may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto takes a GPU if there is one."""

    total_train_steps: int | None = None
    """Number of training steps; null trains for `total_train_epochs`. If both are set, the run ends at the smaller one."""

    total_train_epochs: int | None = None
    """Number of passes over the training data; null, without `total_train_steps`, means 1."""

    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """Training rows."""

    valid_dataset: ValidDatasetConfig = field(default_factory=ValidDatasetConfig)
    """Validation rows."""

    system_prompt: str | None = None
    """System message before each prompt; null: none."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments for the model's chat template."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """The model that is trained."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""

    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """The behaviour on interruptions and faults."""

    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation during training."""

    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """The places where metrics and samples are written."""

    extend: ExtendConfig = field(default_factory=ExtendConfig)
    """Parts of your own, from a file of yours (docs/extending.md)."""


@dataclass(frozen=True)
class TrainConfig(BaseConfig):
    """Reinforcement learning: `tandem train`."""

    async_training: bool = False
    """Generate while training; tokens may be up to `rollout.max_head_offpolicyness` versions old."""

    runner: Literal["local", "ray"] = "local"
    """The place of the roles. `local`: in this process and its ranks. `ray`: each model in workers of Ray, which this
    process calls (docs/cluster.md#roles-on-ray)."""

    allocation: str | None = None
    """Servers and ranks in one word, which sets `rollout.backend`, `actor.backend` and `placement`: `vllm:d4t2+fsdp:d8` has
    4 servers of 2 GPUs and 8 ranks, each with devices of their own; `vllm:d4|fsdp:d4` shares them."""

    placement: Literal["colocate", "decoupled"] | None = None
    """`colocate`: generation and training take turns on the same devices; `decoupled`: the engine is a process of its own.
    null: `decoupled` if `async_training` is true, else `colocate`. For the embedded engine; servers are always processes of
    their own."""

    memory_limit_gib: float | None = None
    """Most memory of a device, over all processes, that the models may keep at once: parameters, gradients, optimizer state
    and KV cache, but not activations. What a stage does not need sleeps if it must; null keeps everything awake. For
    `placement=colocate` (docs/colocation.md)."""

    workflow: Spec = "rlvr"
    """Name of a workflow, such as `multi_turn(max_turns=5)`, or your own as `my_file.py:ClassOrFunction`
    (docs/writing_a_workflow.md)."""

    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the workflow, by the names of its arguments: `workflow_args.max_turns=5`."""

    reward: Spec = "math"
    """Name of a reward, your own as `my_file.py:function`, the folder of a reward model, or a sum such as
    `math + 0.5*model(path=FOLDER)`; or a list of terms with options, or a recipe for each row
    (docs/writing_a_reward.md#sums-of-rewards)."""

    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    """A term of the reward that is a cost, and its limit."""

    reward_timeout_s: float = 15.0
    """A reward call that takes longer is killed, and its sample counts as failed, not as 0."""

    reward_workers: int | None = None
    """Most worker processes of a reward that runs in them, as every `def` of yours does, on each rank that generates; null
    is one for each of its samples of a step, but at most 8 a core and 64. Beyond the cores, a call begins only while others
    wait (sleep, network)."""

    judge: Spec | None = None
    """Your service that judges, as `my_file.py:Name`: given to a workflow, reward or service that asks for `judge`."""

    environment: Spec | None = None
    """Your environment, as `my_file.py:Name`: who asks for `environment` gets a function that makes one for an episode."""

    agent: Spec | None = None
    """Your agent, as `my_file.py:Name`: given to whoever asks for `agent`."""

    partner: Spec | None = None
    """Another model, which is frozen and which the workflow talks to: a model folder, or `model(path=FOLDER)` with knobs.
    Given to a workflow that asks for `partner` (docs/recipes/two_models.md)."""

    sandbox: Spec = "auto"
    """The place where programs run that nobody trusts: `auto`, `bubblewrap`, `landlock`, `none` (no walls at all), or your
    own as `my_file.py:Name`. Given to whoever asks for `sandbox`, such as the reward `code` (docs/sandbox.md)."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """The choice of prompts."""

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
    """Rows longer than this, in tokens, are dropped and counted."""
