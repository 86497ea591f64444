"""Learning from judged completions: preference losses, reward models, and distillation from a teacher."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tandem.config.algorithm import AlgorithmConfig, Component, CorrectionConfig
from tandem.config.arithmetic import servers_sleep
from tandem.config.check_algorithm import component_problems
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.config.keys import field_types
from tandem.config.parts import part_of
from tandem.config.rollout import RolloutConfig
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

    memory_limit_gib: float | None = None
    """Most memory of a device, over all processes, that actor and reference may keep at once: parameters, gradients and
    optimizer state, but not activations. What a stage does not need sleeps if it must; null keeps everything awake
    (docs/colocation.md)."""

    loss: Component = field(default_factory=lambda: Component("dpo"))
    """Loss and its knobs: `loss=dpo loss.beta=0.05`; one of `dpo`, `ipo`, `kto`, `simpo`, `orpo`."""

    batch_size: int = 16
    """Rows in one optimizer step: pairs, or single completions with `loss=kto`."""

    max_length: int = 1024
    """Rows with a side longer than this, in tokens, are dropped and counted."""

    reference: FrozenConfig = field(default_factory=FrozenConfig)
    """The frozen policy; `dpo`, `ipo` and `kto` compare with it."""


@dataclass(frozen=True)
class RewardModelConfig(BaseConfig):
    """Training a reward model: `tandem reward`."""

    supervision: Literal["pairs", "steps", "safety"] = "pairs"
    """`pairs`: rows have a better and a worse side. `safety`: rows have a safer and a less safe side, each labelled safe or
    not; the score is a cost, above 0 for what is unsafe (docs/constraints.md). `steps`: rows have a completion whose steps
    are labelled right or wrong."""

    batch_size: int = 16
    """Rows in one optimizer step."""

    max_length: int = 1024
    """Rows longer than this, in tokens (on either side), are dropped and counted."""

    margin: float = 0.0
    """The least difference wanted between the scores of the two sides; rows with a `margin` column use their own."""

    step_separator: str = "\n"
    """Text between the steps of a completion, with `supervision=steps`."""


@dataclass(frozen=True)
class TeacherConfig:
    """The model that the student learns from; it reads what the student wrote and writes nothing itself."""

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
    """The place of the models. `local`: in this process and its ranks; `ray`: in workers of Ray
    (docs/cluster.md#roles-on-ray)."""

    async_training: bool = False
    """Generate while training; tokens may be up to `rollout.max_head_offpolicyness` versions old."""

    memory_limit_gib: float | None = None
    """Most memory of a device, over all processes, that the models may keep at once: parameters, gradients, optimizer state
    and KV cache, but not activations. null keeps everything awake (docs/colocation.md)."""

    workflow: Spec = "rlvr"
    """Registered workflow, or `my_file.py:ClassOrFunction`."""

    reward: Spec = "math"
    """Only measured, never trained on: a registered reward, or `my_file.py:function`."""

    reward_timeout_s: float = 15.0
    """A reward call that takes longer is killed, and its sample counts as failed."""

    reward_workers: int | None = None
    """Most worker processes of a reward that runs in them, as every `def` of yours does; null is one for each sample of a
    step, but at most 8 a core and 64. Beyond the cores, a call begins only while others wait (sleep, network)."""

    gconfig: GenerationConfig = field(default_factory=lambda: GenerationConfig(n_samples=1))
    """Sampling."""

    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation and staleness."""


def training_config(config: DistillConfig) -> TrainConfig:
    """The reinforcement learning that distillation is: REINFORCE on an advantage a token, every token the same."""
    shared = {name: getattr(config, name) for name in field_types(DistillConfig) if name != "teacher"}
    sampling = config.gconfig
    elsewhere = config.async_training or config.rollout.replay.groups > 0 or sampling.train_first_token
    correction = CorrectionConfig("truncate") if elsewhere else CorrectionConfig()
    algorithm = AlgorithmConfig(
        preset="reinforce",
        advantage=Component("reinforce"),
        policy_loss=Component("reinforce"),
        aggregation=Component("token_mean"),
        correction=correction,
    )
    return TrainConfig(**shared, algorithm=algorithm)


def may_sleep(config: BaseConfig) -> bool:
    """True if anything may sleep between the stages of a step: there is a memory limit, or the cache of servers sleeps."""
    training = training_config(config) if isinstance(config, DistillConfig) else config
    limit = training.memory_limit_gib if isinstance(training, TrainConfig | PreferenceConfig) else None
    return limit is not None or (isinstance(training, TrainConfig) and servers_sleep(training))


def problems(config: BaseConfig) -> Iterator[str]:
    """Rules that join several keys of the configurations here."""
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
