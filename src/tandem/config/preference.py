"""Learning from judged completions: preference losses, reward models, and distillation from a teacher."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tandem.config.algorithm import AlgorithmConfig, Component, CorrectionConfig
from tandem.config.arithmetic import servers_sleep
from tandem.config.check_algorithm import component_problems
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.keys import field_types
from tandem.config.parts import Length, Positive, Rows, Seconds, Workers, part_of
from tandem.config.rollout import GenerationConfig, RolloutConfig
from tandem.config.terms import Spec


@dataclass(frozen=True)
class FrozenConfig:
    """The frozen policy that the loss compares with. It is loaded only for losses that need one."""

    path: str | None = None
    """Model to load as the reference; null takes the actor's initial weights."""

    backend: str | None = None
    """Layout over all ranks, or `fsdp:dN` over N of them, in the form of `actor.backend`; null takes the actor's."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward pass; null takes the actor's."""


@dataclass(frozen=True)
class PreferenceConfig(BaseConfig):
    """Preference learning: `tandem preference`."""

    memory_limit_gib: Positive | None = None
    """Maximum memory of a device, over all processes, for parameters, gradients and optimizer state of actor and reference
    together; activations come on top. Parts that a stage does not need are offloaded (sleep) if necessary. null offloads
    nothing (docs/colocation.md)."""

    loss: Component = field(default_factory=lambda: Component("dpo"))
    """Loss and its knobs: `loss=dpo loss.beta=0.05`; one of `dpo`, `ipo`, `kto`, `simpo`, `orpo`."""

    batch_size: Rows = 16
    """Rows in one optimizer step: pairs, or single completions with `loss=kto`."""

    max_length: Length = 1024
    """Rows with a side of more tokens than this are dropped and counted."""

    reference: FrozenConfig = field(default_factory=FrozenConfig)
    """The frozen policy; `dpo`, `ipo` and `kto` compare with it."""


@dataclass(frozen=True)
class RewardModelConfig(BaseConfig):
    """Training a reward model: `tandem reward`."""

    supervision: Literal["pairs", "steps", "safety"] = "pairs"
    """`pairs`: rows have a better and a worse side. `safety`: rows have a safer and a less safe side, each labelled safe or
    not; the score is a cost, above 0 for unsafe completions (docs/constraints.md). `steps`: rows have a completion whose
    steps are labelled right or wrong."""

    batch_size: Rows = 16
    """Rows in one optimizer step."""

    max_length: Length = 1024
    """Rows with more tokens than this, on either side, are dropped and counted."""

    margin: float = 0.0
    """Target for the difference between the scores of the two sides; rows with a `margin` column use their own."""

    step_separator: str = "\n"
    """Text between the steps of a completion, with `supervision=steps`."""


@dataclass(frozen=True)
class TeacherConfig:
    """The model that the student learns from. It computes log-probabilities of the student's samples and generates
    nothing."""

    path: str | None = None
    """Model folder, hub name, or a built-in name; it must have the student's tokenizer."""

    backend: str | None = None
    """Layout over all ranks, or `fsdp:dN` over N of them, in the form of `actor.backend`; null takes the student's."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward pass; null takes the actor's."""


@dataclass(frozen=True)
class DistillConfig(BaseConfig):
    """On-policy distillation: `tandem distill`."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher."""

    runner: Literal["local", "ray"] = "local"
    """Processes in which the models run. `local`: this process and its ranks; `ray`: workers of Ray
    (docs/cluster.md#roles-on-ray)."""

    async_training: bool = False
    """Generate while training; tokens may be up to `rollout.max_head_offpolicyness` versions old."""

    memory_limit_gib: Positive | None = None
    """Maximum memory of a device, over all processes, for parameters, gradients, optimizer state and KV cache of the models
    together; activations come on top. null offloads nothing (docs/colocation.md)."""

    workflow: Spec = "rlvr"
    """Registered workflow, or `my_file.py:ClassOrFunction`."""

    reward: Spec = "math"
    """Only measured, never trained on: a registered reward, or `my_file.py:function`."""

    reward_timeout_s: Seconds = 15.0
    """A reward call that takes longer is killed, and its sample counts as failed."""

    reward_workers: Workers | None = None
    """Maximum number of worker processes of a reward that uses them (every `def` of yours does); null is one per sample of a
    step, at most 8 per core and 64 in total. Beyond one worker per core, a call begins only while earlier calls are idle
    (they sleep, or wait for the network)."""

    gconfig: GenerationConfig = field(default_factory=lambda: GenerationConfig(n_samples=1))
    """Sampling parameters."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation and staleness."""


def training_config(config: DistillConfig) -> TrainConfig:
    """Returns the configuration of distillation as reinforcement learning: REINFORCE with an advantage per token, and the
    mean over all tokens."""
    shared = {name: getattr(config, name) for name in field_types(DistillConfig) if name != "teacher"}
    is_off_policy = config.async_training or config.rollout.replay.groups > 0
    correction = CorrectionConfig("truncate") if is_off_policy else CorrectionConfig()
    algorithm = AlgorithmConfig(
        preset="reinforce",
        advantage=Component("reinforce"),
        policy_loss=Component("reinforce"),
        aggregation=Component("token_mean"),
        correction=correction,
    )
    return TrainConfig(**shared, algorithm=algorithm)


def may_sleep(config: BaseConfig) -> bool:
    """True if parts may sleep between the stages of a step, because of a memory limit or because the cache of servers
    does."""
    training = training_config(config) if isinstance(config, DistillConfig) else config
    limit = training.memory_limit_gib if isinstance(training, TrainConfig | PreferenceConfig) else None
    return limit is not None or (isinstance(training, TrainConfig) and servers_sleep(training))


def problems(config: BaseConfig) -> Iterator[str]:
    """Yields a message for each broken rule about several keys of `tandem preference`, `reward` or `distill`."""
    if isinstance(config, PreferenceConfig):
        if part_of("loss", config.loss.name).needs_baseline and config.batch_size < 2:
            yield (
                f"batch_size must be at least 2 for loss={config.loss.name}, which compares with other rows' completions, "
                f"got {config.batch_size}"
            )
        yield from component_problems("loss", "loss", config.loss)
        for name, data in (("train_dataset", config.train_dataset), ("valid_dataset", config.valid_dataset)):
            if "margin" in data.columns:
                yield (
                    f"{name}.columns.margin={data.columns['margin']} is not used by preference losses, which have no "
                    "margins: leave it out, or train a reward model (tandem reward)"
                )
    if isinstance(config, RewardModelConfig) and not config.step_separator:
        yield "step_separator is empty; steps would run into each other: leave it out, or give the text between steps"
    if isinstance(config, DistillConfig) and config.teacher.path is None:
        yield "teacher.path is missing: give the model to learn from, a folder, a hub name or a built-in name"
