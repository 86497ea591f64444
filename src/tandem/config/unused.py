"""Refuses keys that the user set and that the run would not read. The message names the key that would make them effective.

A key with its default value (or that of the preset) is never refused, so the `config.yaml` of a run can be loaded
unchanged. If the command line chooses another value of an `Unused.choice` than the file, such as another backend, the
file's keys for its own choice are not refused but ignored: see `overruled`. Rules about one section only are in the files
of that section (`check_algorithm.py`, `train_engine.py`, `evaluation.py`), and rules about objects that a run makes in
`flow/plan.py` and `flow/services.py`.
"""

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

from tandem.config.algorithm import PRESETS, Component
from tandem.config.arithmetic import max_head_offpolicyness
from tandem.config.data import DatasetConfig, ValidDatasetConfig, is_procedural
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import INSIDE, STARTED, TENSOR, FleetConfig, kinds_of
from tandem.config.keys import field_types, leaves
from tandem.config.parts import part_of
from tandem.config.preference import (
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    training_config,
)
from tandem.config.rollout import truncations
from tandem.config.train_engine import Layout, either, parse_layout
from tandem.config.yaml_file import COMMAND_LINE

Written = Container[str]
"""Keys that the user set."""


class Unused(NamedTuple):
    """A rule: keys (or whole sections) that are not read under a condition."""

    keys: tuple[str, ...]
    when: Callable[[Any, Written], bool]
    """The condition, a function of the configuration and of the keys that the user set."""

    why: str
    """The reason, and what to do; completes the message "KEY=VALUE is not used"."""

    choice: str = ""
    """The key that decides the condition. If the command line sets it, values of `keys` from a file are ignored."""


def _layouts(config: BaseConfig) -> list[Layout]:
    """Returns the layouts of all models, without invalid ones, which another check refuses."""
    roles = (getattr(config, name, None) for name in ("actor", "critic", "reference", "teacher"))
    layouts = []
    for role in roles:
        with contextlib.suppress(ConfigError):
            layouts.append(parse_layout(either(role, config.actor, "backend")))
    return layouts


def _critic_checkpoints(config: BaseConfig) -> bool:
    return isinstance(config, TrainConfig) and bool(config.critic.gradient_checkpointing)


SPREAD = (
    Unused(
        ("actor.gradient_sync",),
        lambda config, _: all(layout.shards * layout.replicas == 1 for layout in _layouts(config)),
        "because no ranks have sequences of their own: set actor.backend, for example to fsdp:d2, or leave it out",
    ),
    Unused(
        ("actor.gradient_sync",),
        lambda config, _: all(layout.zero is not None for layout in _layouts(config)),
        "by DeepSpeed, whose stage 1 sums gradients once a step and whose stages 2 and 3 with each micro-batch: choose the "
        "stage with actor.backend, or leave it out",
    ),
    Unused(
        ("actor.gradient_sync",),
        lambda config, _: config.actor.offload,
        "with actor.offload=true, which brings gradients to host memory with each micro-batch: leave it out",
    ),
    Unused(
        ("actor.selective_checkpointing",),
        lambda config, _: not (config.actor.gradient_checkpointing or _critic_checkpoints(config)),
        "because nothing is recomputed: set actor.gradient_checkpointing=true, or leave it out",
    ),
)


def paths(data: DatasetConfig | ValidDatasetConfig) -> tuple[str, ...]:
    """Returns all paths that a data set is read from."""
    return tuple(source.path for source in data.sources) or ((data.path,) if data.path else ())


def _no_evaluation(config: BaseConfig, written: Written) -> bool:
    """True if evaluation is off by default. If the user wrote `evaluate.every_steps=null`, its other keys may stay."""
    return config.evaluate.every_steps is None and "evaluate.every_steps" not in written


def _reference_free(loss: str) -> bool:
    """True if a preference loss is known not to need a reference."""
    part = part_of("loss", loss)
    return part.known and not part.needs_reference


def _second_model(config: PreferenceConfig) -> bool:
    """True if a preference loss needs a reference model in memory besides the actor. An actor with adapters is its own
    reference, unless `reference` has settings."""
    return not _reference_free(config.loss.name) and (
        config.actor.lora.rank is None or config.reference != type(config.reference)()
    )


def _no_procedural_rows(config: BaseConfig, valid: bool) -> bool:
    read = (paths(config.valid_dataset) if valid else ()) or paths(config.train_dataset)
    return not any(is_procedural(path) for path in read)


READ_BY = {
    "rollout.engine.threads": STARTED,
    "rollout.engine.kv_cache_gib": ("embedded", "tandem", "vllm"),
    "rollout.engine.prefill_chunk_tokens": ("embedded", "tandem"),
    "rollout.fleet.memory_share": TENSOR,
    "rollout.fleet.options": ("tandem", *TENSOR),
    "rollout.fleet.max_restarts": STARTED,
    "rollout.fleet.vllm_python": ("vllm",),
    "rollout.fleet.sglang_python": ("sglang",),
}
"""Key → kinds of engine and server that read it, if the run starts them."""


def _read_by(key: str, kinds: tuple[str, ...]) -> Unused:
    why = f"because rollout.backend starts no {' or '.join(kinds)}: set it, for example to {kinds[0]}:d1, or leave it out"
    return Unused((key,), lambda config, _: _started(config).isdisjoint(kinds), why, choice="rollout.backend")


def _started(config: TrainConfig) -> frozenset[str]:
    """Returns the kinds of engine and server that the run starts; all of them if `auto` may start any, or if the backend is
    invalid, which another check refuses."""
    backend = config.rollout.backend
    kinds = frozenset() if backend == "auto" else kinds_of(backend, FleetConfig())
    return kinds if kinds or backend == "attached" else frozenset(STARTED)


ALWAYS = (
    Unused(
        (
            "valid_dataset",
            "evaluate.where",
            "evaluate.max_rows",
            "evaluate.max_new_tokens",
            "evaluate.n_samples",
            "evaluate.temperature",
        ),
        _no_evaluation,
        "because nothing is evaluated: set evaluate.every_steps, for example 10 (evaluate.every_steps=null, written out, "
        "keeps evaluation off and this key where it is)",
    ),
    Unused(
        ("train_dataset.size",),
        lambda config, _: _no_procedural_rows(config, valid=False),
        "because no row is computed: size is for `addition` and reasoning_gym:NAME; use train_dataset.max_rows",
    ),
    Unused(
        ("valid_dataset.size",),
        lambda config, _: _no_procedural_rows(config, valid=True),
        "because no row is computed: size is for `addition` and reasoning_gym:NAME; use valid_dataset.max_rows",
    ),
    Unused(
        ("checkpoint.keep_last", "checkpoint.keep_every", "checkpoint.keep_best", "checkpoint.on_error"),
        lambda config, _: config.checkpoint.every_steps is None,
        "because a run saves one checkpoint, at its end: set checkpoint.every_steps, or leave it out",
    ),
    Unused(
        ("checkpoint.keep_every", "checkpoint.keep_best"),
        lambda config, _: config.checkpoint.keep_last is None,
        "because checkpoint.keep_last=null keeps all checkpoints: set keep_last, or leave it out",
    ),
    Unused(
        ("checkpoint.keep_best",),
        lambda config, _: (
            (config.checkpoint.keep_best or "").lstrip("-").startswith("eval/") and config.evaluate.every_steps is None
        ),
        "because nothing is evaluated: set evaluate.every_steps, or leave it out",
    ),
    Unused(
        ("checkpoint.asynchronous",),
        lambda config, _: config.checkpoint.every_steps is None or not config.checkpoint.resumable,
        "because nothing is saved beside training: the last save, and one of the model alone, are waited for; set "
        "checkpoint.every_steps and leave checkpoint.resumable=true, or leave it out",
    ),
    Unused(
        ("tracking.project",),
        lambda config, _: set(config.tracking.sinks) <= {"tensorboard"},
        "by any sink of this run: set tracking.sinks to wandb or trackio, or leave it out",
    ),
    Unused(
        ("actor.optimizer.min_lr_ratio",),
        lambda config, _: config.actor.optimizer.schedule == "constant",
        "by the constant schedule: set actor.optimizer.schedule to linear or cosine, or leave it out",
    ),
)

REINFORCEMENT = (
    Unused(
        (
            "algorithm.kl.where",
            "algorithm.kl.estimator",
            "algorithm.kl.importance",
            "reference",
        ),
        lambda config, _: config.algorithm.kl.coefficient == 0,
        "because algorithm.kl.coefficient is 0; set algorithm.kl.coefficient, for example 0.001, or leave it out",
    ),
    Unused(
        ("algorithm.kl.target",),
        lambda config, _: config.algorithm.kl.coefficient == 0,
        "because algorithm.kl.coefficient is 0, and 0 cannot grow: set algorithm.kl.coefficient to where it shall begin, "
        "for example 0.01",
    ),
    Unused(
        ("algorithm.kl.importance",),
        lambda config, _: config.algorithm.kl.where == "reward",
        "because the KL is in the reward, which has no gradient: leave it out, or set algorithm.kl.where=loss",
    ),
    Unused(
        ("algorithm.kl.horizon",),
        lambda config, _: config.algorithm.kl.target is None,
        "because algorithm.kl.target is null: set it, or leave algorithm.kl.horizon out",
    ),
    Unused(
        ("algorithm.correction.low", "algorithm.correction.high", "algorithm.correction.level"),
        lambda config, _: config.algorithm.correction.weight == "none",
        "with weight=none: set algorithm.correction.weight to truncate or mask, or leave it out",
    ),
    Unused(
        ("rollout.engine.keep_kv_on_update",),
        lambda config, _: max_head_offpolicyness(config) == 0,
        "at staleness 0, where no request is under way while weights change: set async_training=true, or leave it out",
    ),
    Unused(
        ("rollout.engine.keep_kv_on_update",),
        lambda config, _: kinds_of(config.rollout.backend, config.rollout.fleet) == {"sglang"},
        "by SGLang, which computes them anew: leave it out",
        choice="rollout.backend",
    ),
    *(_read_by(key, kinds) for key, kinds in READ_BY.items()),
    Unused(
        ("rollout.engine.kv_cache_gib",),
        lambda config, _: config.device == "cuda" and _started(config) <= set(TENSOR),
        "by vLLM on a GPU, where rollout.fleet.memory_share sets the server's memory: leave it out",
        choice="rollout.backend",
    ),
    Unused(
        ("rollout.fleet",),
        lambda config, _: config.rollout.backend == "embedded",
        "because rollout.backend=embedded is one engine inside the run: set rollout.backend, for example to embedded:d2, or "
        "leave it out",
        choice="rollout.backend",
    ),
    Unused(
        tuple(f"rollout.fleet.{name}" for name in field_types(FleetConfig) if not name.endswith("_python")),
        lambda config, _: config.rollout.backend == "auto",
        "because rollout.backend=auto starts a server only where a GPU is: set rollout.backend, for example to vllm:d1, or "
        "leave it out",
        choice="rollout.backend",
    ),
    Unused(
        ("rollout.fleet.finish_before_update",),
        lambda config, _: max_head_offpolicyness(config) == 0,
        "at staleness 0, where no request is under way while weights change: set async_training=true, or leave it out",
    ),
    Unused(
        ("rollout.verify.tolerance",),
        lambda config, _: config.rollout.verify.every_steps is None,
        "because nothing is verified: set rollout.verify.every_steps, for example 20, or leave it out",
    ),
    Unused(
        ("rollout.weights.folder",),
        lambda config, _: not config.rollout.weights.uses_folder(servers=config.rollout.backend not in INSIDE),
        "because no server reads weights from a disk: set rollout.weights.channel=disk or rollout.backend, or leave it out",
    ),
    Unused(
        (
            "constraint.limit",
            "constraint.step_size",
            "constraint.multiplier",
        ),
        lambda config, _: config.constraint.cost is None,
        "because no term of the reward is a cost: set constraint.cost to the name of one, or leave this key out",
    ),
    Unused(
        ("rollout.replay.max_age", "rollout.replay.max_uses"),
        lambda config, _: config.rollout.replay.groups == 0,
        "because rollout.replay.groups is 0: set it, for example to 4, or leave this key out",
    ),
    Unused(
        ("curriculum.target",),
        lambda config, _: config.curriculum.round_rows is None,
        "because curriculum.round_rows is null: set it, for example to 500, or leave this key out",
    ),
    Unused(
        ("algorithm.allow_truncated_sampling",),
        lambda config, _: not truncations(config.gconfig),
        "because nothing is truncated: set gconfig.top_p, gconfig.top_k or gconfig.min_new_tokens, or leave it out",
        choice="gconfig.top_p",
    ),
)

SUPERVISED = (
    Unused(
        ("evaluate.where", "evaluate.max_new_tokens", "evaluate.n_samples", "evaluate.temperature"),
        lambda *_: True,
        "by supervised training, whose evaluation is the loss of held-out rows and generates nothing: leave it out, and "
        "measure answers with tandem eval",
    ),
    Unused(
        ("tracking.trajectories_per_step",),
        lambda *_: True,
        "by supervised training, which samples nothing: leave it out",
    ),
    Unused(
        ("actor.mini_batches", "actor.epochs_per_batch"),
        lambda *_: True,
        "by supervised training, whose optimizer steps are set by batch_size: leave it out",
    ),
    Unused(
        tuple(
            f"{data}.{name}" for data in ("train_dataset", "valid_dataset") for name in ("answer_column", "prompt_suffix")
        ),
        lambda config, _: isinstance(config, (PreferenceConfig, RewardModelConfig)),
        "by learning from judged completions: leave it out, and name their columns with train_dataset.columns",
    ),
    Unused(
        ("reference.path", "reference.dtype", "reference.backend"),
        lambda config, _: isinstance(config, PreferenceConfig) and _reference_free(config.loss.name),
        "because this loss compares with no reference: leave it out, or set loss=dpo",
    ),
    Unused(
        ("memory_limit_gib",),
        lambda config, _: isinstance(config, PreferenceConfig) and not _second_model(config),
        "because the actor is the only model in memory, and each step needs all of it: leave it out",
    ),
    Unused(
        ("margin",),
        lambda config, _: isinstance(config, RewardModelConfig) and config.supervision != "pairs",
        "with supervision=steps or safety, where there is right and wrong: leave it out, or set supervision=pairs",
    ),
    Unused(
        ("step_separator",),
        lambda config, _: isinstance(config, RewardModelConfig) and config.supervision != "steps",
        "with supervision=pairs or safety: leave it out, or set supervision=steps",
    ),
)


def unused(config: BaseConfig, written: Written, *, saved: bool = False) -> Iterator[str]:
    """Yields a message for each key that was set and is not read. ``saved``: the file is the configuration of an existing
    run; only keys of the command line are reported, because the version that began the run accepted the others."""
    reported = set()
    reportable = {key for key in written if written[key] == COMMAND_LINE} if saved and isinstance(written, Mapping) else None
    for key, value, rule in _in_vain(config, written):
        if key not in reported and (reportable is None or key in reportable):
            reported.add(key)
            yield f"{key}={_shown(value)} is not used {rule.why}"


def overruled(config: BaseConfig, sources: Mapping[str, str]) -> dict[str, str]:
    """Returns the keys of a file that are not read because of a choice on the command line → the key of that choice.

    They are ignored, so that a file written for one `rollout.backend` can be tried with another. ``sources``: key that was
    set → its source.
    """
    return {
        key: rule.choice
        for key, _, rule in _in_vain(config, sources)
        if sources.get(rule.choice) == COMMAND_LINE and sources.get(key, COMMAND_LINE) != COMMAND_LINE
    }


def _in_vain(config: BaseConfig, written: Written) -> Iterator[tuple[str, Any, Unused]]:
    """Yields key, value and rule of each setting that is not read."""
    if isinstance(config, DistillConfig):
        config = training_config(config)
    rules = ALWAYS + SPREAD + (REINFORCEMENT if isinstance(config, TrainConfig) else SUPERVISED)
    untouched = dict(leaves(type(config)()))
    changed = {key: value for key, value in leaves(config) if value not in (untouched[key],)}
    for rule in rules:
        if not rule.when(config, written):
            continue
        sections = tuple(f"{name}." for name in rule.keys)
        for key, value in changed.items():
            applies = key in rule.keys or key.startswith(sections)
            if applies and value not in _preset_values(config, key):
                yield key, value, rule


def _preset_values(config: BaseConfig, key: str) -> Iterator[Any]:
    """Yields the preset's values of a key; with asynchronous training or replay also the value for that."""
    if not isinstance(config, TrainConfig) or config.algorithm.preset not in PRESETS:
        return
    preset = PRESETS[config.algorithm.preset]
    stale = config.async_training or config.rollout.replay.groups > 0
    added = [{"algorithm": preset.asynchronous}] if stale else []
    for table in ({"algorithm": preset.values}, *added, preset.run):
        value: Any = table
        for name in key.split("."):
            value = value.get(name) if hasattr(value, "get") else None
        if value is not None:
            yield value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Component):
        return value.name
    if isinstance(value, tuple):
        return f"[{', '.join(getattr(item, 'path', str(item)) for item in value)}]"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
