"""The whole configuration of a run, with the settings of run folder, checkpoints, recovery and tracking."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tandem.config.algorithm import AlgorithmConfig, ConstraintConfig
from tandem.config.data import CurriculumConfig, DatasetConfig, ValidDatasetConfig
from tandem.config.parts import (
    MOST_SECONDS,
    Count,
    KnobRule,
    Length,
    Natural,
    NotNegative,
    Positive,
    Rows,
    Samples,
    Seconds,
    Seed,
    Threads,
    Workers,
    whole,
)
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.config.services import ExtendConfig
from tandem.config.terms import Spec
from tandem.config.train_engine import ActorConfig, CriticConfig, ReferenceConfig


@dataclass(frozen=True)
class RunConfig:
    """The folder for the files of a run."""

    root: str = "runs"
    """Folder in which the run folder `<experiment>/<trial>/` is made."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and which ones are kept."""

    every_steps: Count | None = None
    """Save a Hugging Face folder every `every_steps` steps; null saves only at the end."""

    keep_last: Count | None = 2
    """Keep this many of the newest checkpoints; null keeps all."""

    keep_every: Count | None = None
    """Also keep every checkpoint whose step is a multiple of this; null: none."""

    keep_best: str | None = None
    """Also keep the checkpoint with the highest value of this metric, such as `eval/accuracy`; `-eval/loss` keeps the
    lowest."""

    at_end: bool = True
    """Save a checkpoint when training ends."""

    resumable: bool = True
    """Also save the state that resuming needs (12 bytes per parameter); false saves only the model."""

    asynchronous: bool = True
    """Save in the background: training waits only for a copy in host memory (12 bytes per parameter). On several machines,
    and at the end of a run, training waits for the whole save."""

    on_error: Literal["stop", "continue"] = "stop"
    """If a checkpoint cannot be written: `stop` ends the run, `continue` trains on and tries again at the next checkpoint.
    The last checkpoint of a run must be written in any case."""


@dataclass(frozen=True)
class RecoverConfig:
    """The behaviour of a run that is interrupted, fails or hangs."""

    grace_s: Annotated[float, KnobRule(low=0.0, high=86400.0)] = 30.0
    """Maximum seconds for an interrupted run (Ctrl-C, SIGTERM, SIGHUP) to finish and save its step; 0 ends it at once."""

    max_restarts: Annotated[int, whole(0, 1000)] = 0
    """Maximum number of restarts of all ranks from the last checkpoint after one died or hung; needs
    `checkpoint.every_steps`. With `runner=ray`: also the maximum number of replacements of a worker that died."""

    silent_after_s: Annotated[float, KnobRule(low=1.0, high=MOST_SECONDS)] | None = 15.0
    """With `runner=ray`: a worker that does not answer for this long counts as dead and is killed; null waits for ever."""

    cut_off_after_s: Annotated[float, KnobRule(low=1.0, high=MOST_SECONDS)] | None = 300.0
    """On several machines: the run ends if no sign of life comes from one of them for this long (a warning comes after 15
    s); null waits for ever."""

    stalled_after_s: Annotated[float, KnobRule(low=1.0, high=MOST_SECONDS)] | None = 3600.0
    """A run that makes no progress for this long is ended, and the stacks of its threads are written to a file. At least a
    minute more than `rollout.wait_timeout_s` and `episode_timeout_s` is used; null turns this off."""


@dataclass(frozen=True)
class TrackingConfig:
    """Destinations of metrics besides `metrics.jsonl`, which is always written, and recorded samples."""

    sinks: tuple[Spec, ...] = ()
    """Destinations of metrics besides `metrics.jsonl`: any of `tensorboard`, `wandb`, `trackio`, `prometheus`, or your
    own, `my_file.py:Name`."""

    trajectories_per_step: Natural | None = 16
    """Number of samples recorded per step, with at most as many dropped prompts: texts, rewards, and the batch as it was
    trained on (docs/records.md). `null`: all of them; 0: none."""

    trajectories_gib: Positive | None = 1.0
    """Maximum disk space of these records, in GiB; records of the oldest steps are deleted first. `null`: no limit."""

    plot_every_steps: Count | None = 10
    """Draw the curves every `plot_every_steps` steps, and at the end; `null`: no pictures, which saves a second."""

    project: str = "tandem"
    """Project name given to Weights & Biases and trackio."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation on the validation rows. `tandem train` measures the accuracy of greedy answers, or of several samples per
    row; other commands measure the loss."""

    every_steps: Count | None = None
    """Evaluate before the first step, after every `every_steps` steps, and at the end; null turns evaluation off."""

    where: Literal["run", "job"] = "run"
    """`run`: the run evaluates. `job`: a separate process, `tandem eval --follow RUN`, evaluates the run's checkpoints and
    writes the results into the run folder. For `tandem train`."""

    max_rows: Count | None = 128
    """Use at most this many validation rows; null uses all."""

    max_new_tokens: Count | None = None
    """Maximum tokens of an answer in evaluation; null takes `gconfig.max_new_tokens`. For `tandem train` only."""

    n_samples: Samples = 1
    """Number of samples per row; with several, `eval/pass@k` and `eval/maj@k` are measured too."""

    temperature: NotNegative | None = None
    """Temperature in evaluation; 0 is greedy. null: greedy with one sample per row, `gconfig.temperature` with several."""


@dataclass(frozen=True)
class BaseConfig:
    """Keys of every kind of run."""

    experiment_name: str = "tandem"
    """First part of the run folder's name."""

    trial_name: str = "trial"
    """Second part of the run folder's name. If the run folder exists, its run is continued, or the command is refused; it is
    never overwritten."""

    run: RunConfig = field(default_factory=RunConfig)
    """The run folder."""

    seed: Seed = 0
    """Seed of all randomness in the run; 0 to 2³² − 1."""

    deterministic: bool = False
    """Fix the order of all computations, so that two runs on one machine have bit-identical results."""

    threads: Threads | None = None
    """CPU threads; null takes all cores that the process may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto takes a GPU if there is one."""

    total_train_steps: Count | None = None
    """Number of training steps; null trains for `total_train_epochs`. If both are set, the run ends at the smaller one."""

    total_train_epochs: Count | None = None
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
    """When checkpoints are saved and kept."""

    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """The behaviour on interruptions and faults."""

    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Evaluation during training."""

    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """The destinations of metrics and recorded samples."""

    extend: ExtendConfig = field(default_factory=ExtendConfig)
    """Your own replacements for parts of Tandem (docs/extending.md)."""


@dataclass(frozen=True)
class TrainConfig(BaseConfig):
    """Reinforcement learning: `tandem train`."""

    async_training: bool = False
    """Generate while training; tokens may be up to `rollout.max_head_offpolicyness` versions old."""

    runner: Literal["local", "ray"] = "local"
    """Processes in which the models run. `local`: this process and its ranks. `ray`: workers of Ray, which this process
    controls (docs/cluster.md#roles-on-ray)."""

    allocation: str | None = None
    """Sets `rollout.backend`, `actor.backend` and `placement` in one value: `vllm:d4t2+fsdp:d8` is 4 servers of 2 GPUs and 8
    training ranks on separate devices; `vllm:d4|fsdp:d4` is both on the same devices."""

    placement: Literal["colocate", "decoupled"] | None = None
    """`colocate`: generation and training take turns on the same devices; `decoupled`: generation has its own process, and
    its own devices if there are enough. null: `decoupled` if `async_training` is true, else `colocate`. Servers are separate
    processes in any case."""

    memory_limit_gib: Positive | None = None
    """Maximum memory of a device, over all processes, for parameters, gradients, optimizer state and KV cache of the models
    together; activations come on top. Parts that a stage does not need are offloaded (sleep) if necessary. null offloads
    nothing. For `placement=colocate` (docs/colocation.md)."""

    workflow: Spec = "rlvr"
    """Name of a workflow, such as `multi_turn(max_turns=5)`, or your own as `my_file.py:ClassOrFunction`
    (docs/writing_a_workflow.md)."""

    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the workflow, by name: `workflow_args.max_turns=5`."""

    reward: Spec = "math"
    """Name of a reward, your own as `my_file.py:function`, the folder of a reward model, or a sum such as
    `math + 0.5*model(path=FOLDER)`; or a list of terms with options, or a recipe for each row
    (docs/writing_a_reward.md#sums-of-rewards)."""

    constraint: ConstraintConfig = field(default_factory=ConstraintConfig)
    """A term of the reward that is treated as a cost, and its limit."""

    reward_timeout_s: Seconds = 15.0
    """A reward call that takes longer is killed, and its sample counts as failed, not as 0."""

    reward_workers: Workers | None = None
    """Maximum number of worker processes of a reward that uses them (every `def` of yours does), on each rank that
    generates; null is one per sample of a step on that rank, at most 8 per core and 64 in total. Beyond one worker per core,
    a call begins only while earlier calls are idle (they sleep, or wait for the network)."""

    judge: Spec | None = None
    """Your judging service, as `my_file.py:Name`; passed to a workflow, reward or service with an argument `judge`."""

    environment: Spec | None = None
    """Your environment, as `my_file.py:Name`. A workflow or service with an argument `environment` gets a function that
    makes one for an episode."""

    agent: Spec | None = None
    """Your agent, as `my_file.py:Name`; passed to a workflow or service with an argument `agent`."""

    partner: Spec | None = None
    """Another, frozen model that the workflow talks to: a model folder, or `model(path=FOLDER)` with knobs. Passed to a
    workflow with an argument `partner` (docs/recipes/two_models.md)."""

    sandbox: Spec = "auto"
    """The sandbox for untrusted programs: `auto`, `bubblewrap`, `landlock`, `none` (no isolation), or your own as
    `my_file.py:Name`. Passed to a workflow, reward or service with an argument `sandbox`, such as the reward `code`
    (docs/sandbox.md)."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """The choice of prompts."""

    gconfig: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling parameters."""

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

    batch_size: Rows = 16
    """Rows in one optimizer step."""

    max_length: Length = 1024
    """Rows with more tokens than this are dropped and counted."""
