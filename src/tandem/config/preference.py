"""Learning from judged completions: preference losses, reward models, and distillation from a teacher."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandem.config.algorithm import AlgorithmConfig, Component, CorrectionConfig
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.config.keys import field_types
from tandem.config.knobs import KnobRule, Knobs
from tandem.config.nearest import nearest_names
from tandem.config.rollout import RolloutConfig

BETA = "Strength of the pull towards the reference, inverse: a small value lets the policy go far."

PREFERENCE_LOSSES: Mapping[str, Knobs] = {
    "dpo": {
        "beta": KnobRule(0.1, above=0.0, meaning=BETA),
        "label_smoothing": KnobRule(
            0.0, low=0.0, high=0.5, meaning="Share of pairs that are believed to be the wrong way round."
        ),
    },
    "ipo": {"beta": KnobRule(0.1, above=0.0, meaning="The difference of mean log-ratios is drawn to 1/(2·beta).")},
    "kto": {
        "beta": KnobRule(0.1, above=0.0, meaning=BETA),
        "desirable_weight": KnobRule(1.0, low=0.0, meaning="Weight of completions with a true label."),
        "undesirable_weight": KnobRule(1.0, low=0.0, meaning="Weight of completions with a false label."),
    },
    "simpo": {
        "beta": KnobRule(2.5, above=0.0, meaning="Scale of the mean log-probabilities."),
        "gamma": KnobRule(1.375, low=0.0, meaning="Margin by which the better side should lead."),
    },
    "orpo": {"odds_weight": KnobRule(0.1, low=0.0, meaning="λ: weight of the odds ratio beside the likelihood.")},
}
"""Loss → its knobs; a test compares them with the functions' signatures."""

REFERENCE_FREE = ("simpo", "orpo")
"""Losses that never load a reference."""


@dataclass(frozen=True)
class FrozenConfig:
    """The frozen policy that the loss compares with. It is loaded only for losses that need one."""

    path: str | None = None
    """Model to load as the reference; null takes the actor's initial weights."""

    backend: str | None = None
    """Layout over the ranks, in the form of `actor.backend`; null takes the actor's."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward pass; null takes the actor's."""


@dataclass(frozen=True)
class PreferenceConfig(BaseConfig):
    """Preference learning: `tandem preference`."""

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

    supervision: Literal["pairs", "steps"] = "pairs"
    """`pairs`: rows have a better and a worse side. `steps`: rows have a completion whose steps are labelled right or
    wrong."""

    batch_size: int = 16
    """Rows in one optimizer step."""

    max_length: int = 1024
    """Rows longer than this, in tokens (on either side), are dropped and counted."""

    margin: float = 0.0
    """How much higher the better side should score; rows with a `margin` column use their own."""

    step_separator: str = "\n"
    """Text between the steps of a completion, with `supervision=steps`."""


@dataclass(frozen=True)
class TeacherConfig:
    """The model that the student learns from; it reads what the student wrote and writes nothing itself."""

    path: str | None = None
    """Model folder, hub name, or a built-in name; it must have the student's tokenizer."""

    backend: str | None = None
    """Layout over the ranks, in the form of `actor.backend`; null takes the student's."""

    dtype: Literal["auto", "bfloat16", "float32"] | None = None
    """Precision of its forward pass; null takes the actor's."""


@dataclass(frozen=True)
class DistillConfig(BaseConfig):
    """On-policy distillation: `tandem distill`."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher."""

    async_training: bool = False
    """Generate while training; tokens may be up to `rollout.max_head_offpolicyness` versions old."""

    workflow: str = "rlvr"
    """Registered workflow, or `my_file.py:ClassOrFunction`."""

    reward: str = "math"
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


def problems(config: BaseConfig) -> Iterator[str]:
    """Rules that join several keys of the configurations here."""
    if isinstance(config, PreferenceConfig):
        if config.loss.name == "kto" and config.batch_size < 2:
            yield (
                f"batch_size must be at least 2 for loss=kto, which compares with other rows' completions, "
                f"got {config.batch_size}"
            )
        yield from _loss(config.loss)
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


def _loss(loss: Component) -> Iterator[str]:
    if ":" in loss.name:
        return  # my_file.py:function, whose signature is checked when it is loaded
    if loss.name not in PREFERENCE_LOSSES:
        yield f"loss={loss.name} is not known; {nearest_names(loss.name, PREFERENCE_LOSSES)}, or my_file.py:function"
        return
    knobs = PREFERENCE_LOSSES[loss.name]
    for name, value in loss.knobs.items():
        if name not in knobs:
            users = [other for other, own in PREFERENCE_LOSSES.items() if name in own]
            hint = f"; {', '.join(users)} would use it" if users else ""
            yield f"loss.{name}={value} is not used by {loss.name}, which has {', '.join(knobs)}{hint}. Leave it out"
        elif not knobs[name].allows(value):
            yield f"loss.{name} must be {knobs[name].rule()}, got {value}"
