"""Checks a configuration: the bounds of single keys, and rules about several keys together."""

import dataclasses
import math
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from tandem.config import preference
from tandem.config.algorithm import PRESETS, AlgorithmConfig
from tandem.config.arithmetic import arithmetic, can_sleep, max_head_offpolicyness, placement, total_steps, trainer_ranks
from tandem.config.check_algorithm import constraint_problems, corrects_itself, critic_problems, groups, part_problems
from tandem.config.data import COLUMNS, DatasetConfig, ValidDatasetConfig
from tandem.config.errors import ConfigError, nearest_names, refuse
from tandem.config.experiment import BaseConfig, RecoverConfig, TrainConfig
from tandem.config.fleet import INSIDE, fleet_problems
from tandem.config.keys import bounds, leaves
from tandem.config.parts import KnobRule
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config
from tandem.config.rollout import delivery_problems, truncations
from tandem.config.services import SERVICES, extension_problems
from tandem.config.terms import read_term
from tandem.config.train_engine import fewer_ranks_problems, layout_problems, lora_problems, parse_layout
from tandem.config.unused import paths, unused

__all__ = ["arithmetic", "check", "max_head_offpolicyness", "placement", "total_steps"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
FILE_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
MAY_BE_EMPTY = ("system_prompt", "step_separator", "train_dataset.prompt_suffix", "valid_dataset.prompt_suffix")
GIVEN_TO_TEMPLATES = (
    "conversation",
    "messages",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
"""Names that `chat_template_kwargs` must not set, because they are arguments of the renderer, or Tandem sets them."""


def check(config: BaseConfig, written: Container[str] = (), *, saved: bool = False) -> None:
    """Refuses a configuration that cannot work, and reports all problems together. ``written``: the keys that the user set.
    ``saved``: see `unused`.

    Raises:
        ConfigError: there are problems; the message has each with its key, the value, the rule and the remedy.
    """
    refuse(problems(config, written, saved=saved))


def problems(config: BaseConfig, written: Container[str] = (), *, saved: bool = False) -> list[str]:
    """Returns a message for each setting that cannot work; see `check`.

    Values out of bounds come first, and then what is wrong whatever allowed values these keys get: other rules would add
    misleading messages about the same value.
    """
    if wrong := list(out_of_bounds(config, written)):
        rules = bounds(type(config))
        outside = [words.partition(" ")[0] for words in wrong]
        choices = {key: _allowed(rules[key], config, key) for key in outside}
        lasting: list[str] = []
        for number in range(3):
            tried = {key: values[number % len(values)] for key, values in choices.items()}
            others = problems(_with(config, tried), written, saved=saved)
            lasting = [words for words in lasting if words in others] if number else others
            if not lasting:  # as usual; the other values need no try
                break
        return wrong + [words for words in lasting if not any(key in words for key in outside)]
    wrong = [*_texts(config), *_common(config), *unused(config, written, saved=saved)]
    wrong += lora_problems(config, compares=isinstance(config, (TrainConfig, DistillConfig, PreferenceConfig)))
    if isinstance(config, TrainConfig):
        wrong += [
            *_rollout(config),
            *_algorithm(config),
            *part_problems(config),
            *_correction(config, written),
            *_sampling(config),
        ]
        wrong += groups(config, written)
        wrong += [*critic_problems(config), *constraint_problems(config)]
        wrong += _evaluation_job(config)
    elif config.evaluate.where == "job" and isinstance(config, DistillConfig):
        wrong.append("evaluate.where=job is for `tandem train`: leave it out")
    if not isinstance(config, (TrainConfig, DistillConfig)):
        wrong += _rewards_of_sources(config)
    if isinstance(config, (PreferenceConfig, RewardModelConfig, DistillConfig)):
        wrong += preference.problems(config)
    if isinstance(config, PreferenceConfig) and config.memory_limit_gib is not None:
        wrong += _sleepers(config, f"memory_limit_gib={config.memory_limit_gib}")
    if isinstance(config, DistillConfig):
        trained = training_config(config)
        wrong += [*_rollout(trained), *_sampling(trained), *groups(trained, written)]
    return wrong


def out_of_bounds(config: object, written: Container[str]) -> Iterator[str]:
    """Yields a message for each value outside its bounds, with its source if ``written`` is key → source."""
    rules = bounds(type(config))
    for key, value in leaves(config):
        if key in rules and value is not None and not rules[key].allows(value):
            source = f" ({written[key]})" if isinstance(written, Mapping) and key in written else ""
            yield f"{key} must be {rules[key].rule()}, got {value}{source}"


def _allowed(rule: KnobRule, config: object, key: str) -> list[object]:
    """Returns some values that a key may have, its default first."""
    default = dict(leaves(type(config)()))[key]
    start = next((value for value in (rule.low, rule.above, rule.high) if value is not None), 0)
    near = [type(start)(start + step) for step in (1, 0, 2, 0.5)] + ([] if rule.high is None else [rule.high])
    return [default, *(value for value in near if value != default and rule.allows(value))]


def _with(config: Any, values: Mapping[str, object]) -> Any:
    """Returns a copy of a configuration, with these values under dotted keys."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        new = _with(getattr(config, name), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{name: new})
    return config


def _texts(config: BaseConfig) -> Iterator[str]:
    for key, value in leaves(config):
        if value == "" and key not in MAY_BE_EMPTY:
            yield f"{key} is empty; give it a value, or leave it out"
    for name in config.chat_template_kwargs:
        if name in GIVEN_TO_TEMPLATES:
            yield f"chat_template_kwargs.{name} is set by Tandem: leave it out"


def _common(config: BaseConfig) -> Iterator[str]:
    for key in ("experiment_name", "trial_name"):
        name = getattr(config, key)
        if not NAME.fullmatch(name) or len(name) > 100:
            yield (
                f"{key} must be the name of one folder: letters, digits, '.', '_' and '-', not starting with '.' or '-', "
                f"at most 100 characters; got {name!r}"
            )
    if config.actor.compile and config.deterministic:
        yield "actor.compile=true contradicts deterministic=true: fused operations round otherwise; leave one of them out"
    yield from _dataset("train_dataset", config.train_dataset)
    yield from _dataset("valid_dataset", config.valid_dataset)
    train, valid = config.train_dataset, config.valid_dataset
    if train.path is None and not train.sources:
        yield "train_dataset.path is missing: give a folder, a file, a hub name, `addition` or reasoning_gym:NAME"
    if config.evaluate.every_steps is not None and not paths(valid):
        yield from _validation_split(config)
    restarts, saving = config.recover.max_restarts, config.checkpoint
    if restarts and (saving.every_steps is None or not saving.resumable):
        how = "checkpoint.every_steps=null" if saving.every_steps is None else "checkpoint.resumable=false"
        yield (
            f"recover.max_restarts={restarts} would begin at step 0 each time, because {how} saves nothing to go on from: "
            "set checkpoint.every_steps, for example 20, and leave checkpoint.resumable=true; or leave max_restarts out"
        )
    silent = config.recover.silent_after_s
    if silent != RecoverConfig().silent_after_s and getattr(config, "runner", "local") == "local":
        yield f"recover.silent_after_s={silent} is for the workers of runner=ray; leave it out"
    cut_off = config.recover.cut_off_after_s
    if cut_off != RecoverConfig().cut_off_after_s and trainer_ranks(config) == 1:
        yield f"recover.cut_off_after_s={cut_off} is for ranks on several machines; leave it out"
    yield from _backends(config)
    yield from extension_problems(config)
    for sink in config.tracking.sinks:
        term = read_term(sink, "tracking.sinks")
        if not term.is_file and term.name not in SERVICES["sink"]:
            near = nearest_names(term.name, SERVICES["sink"])
            yield f"tracking.sinks has {sink!r}; {near}, and my_file.py:Name. A list is written [tensorboard, wandb]"
    for sink in sorted({sink for sink in config.tracking.sinks if config.tracking.sinks.count(sink) > 1}):
        yield f"tracking.sinks names {sink} more than once; once is enough"


def _validation_split(config: BaseConfig) -> Iterator[str]:
    """Yields a message if validation and training have the same rows, because both name the same data and no other split."""
    train, every = config.train_dataset, config.evaluate.every_steps
    for path in paths(train):
        if path.endswith(FILE_ENDINGS):
            yield (
                f"evaluate.every_steps={every} needs validation rows, but train_dataset.path={path} "
                "is one file without splits; set valid_dataset.path, or evaluate.every_steps=null"
            )
    split = config.valid_dataset.split or "test"
    if split == (train.split or "train"):
        yield (
            f"evaluate.every_steps={every} would evaluate on the training rows: both are split {split!r}; set "
            "valid_dataset.split to another one, or valid_dataset.path"
        )


def _dataset(key: str, data: DatasetConfig | ValidDatasetConfig) -> Iterator[str]:
    if data.path is not None and data.sources:
        yield f"{key} has both path={data.path} and sources; keep one: put the path among the sources"
    for ours in data.columns or ():
        if ours not in COLUMNS:
            yield f"{key}.columns.{ours} is not a name that Tandem knows; {nearest_names(ours, COLUMNS)}"
    labels = [source.label for source in data.sources]
    for i, source in enumerate(data.sources):
        if not source.path:
            yield f"{key}.sources[{i}].path is empty; give a folder, a file, a hub name, `addition` or reasoning_gym:NAME"
        elif source.label in labels[:i]:
            yield (
                f"{key}.sources[{i}] has the same name in metrics as another source, {source.label!r}; "
                f"tell them apart with name, for example {{path: {source.path}, name: {source.label}_{i}}}"
            )
        if not (source.weight > 0 and math.isfinite(source.weight)):
            yield f"{key}.sources[{i}].weight must be above 0, got {source.weight}; to not use a source, remove it"


def _backends(config: BaseConfig) -> Iterator[str]:
    """Yields a message for each problem of a model's layout over all or some of the actor's ranks."""
    fits = False
    for role in ("actor", "critic", "reference", "teacher"):
        backend = getattr(getattr(config, role, None), "backend", None)
        if backend is None:
            continue
        try:
            layout = parse_layout(backend, f"{role}.backend")
        except ConfigError as problem:
            yield str(problem)
            continue
        if role == "actor" and "@" in backend:
            yield f"actor.backend={backend}: the actor is on all ranks of the run; leave @{backend.partition('@')[2]} out"
            continue
        fits = fits or role == "actor"  # compare with the actor's ranks only if the actor's backend is valid
        if fits:
            yield from fewer_ranks_problems(layout, f"{role}.backend={backend}", config.actor)
        yield from layout_problems(layout, f"{role}.backend={backend}", config.actor)


def _fleet(config: TrainConfig) -> Iterator[str]:
    """Yields a message for each setting that does not work with several servers."""
    rollout = config.rollout
    if rollout.backend in INSIDE:
        return
    if config.deterministic:
        yield (
            f"deterministic=true contradicts rollout.backend={rollout.backend}: the order of arrival decides which "
            "server computes what; use rollout.backend=embedded"
        )


def _memory_limit(config: TrainConfig) -> Iterator[str]:
    """Yields a message for each setting under which models cannot sleep (be offloaded)."""
    limit = f"memory_limit_gib={config.memory_limit_gib}"
    backend = config.rollout.backend
    if config.rollout.fleet.sleep is False and config.memory_limit_gib is not None:
        yield f"rollout.fleet.sleep=false contradicts {limit}, under which servers sleep: leave one of them out"
    if config.rollout.fleet.sleep is not None and backend not in INSIDE and not can_sleep(config):
        yield (
            f"rollout.fleet.sleep={str(config.rollout.fleet.sleep).lower()} is for vLLM and SGLang servers that the run "
            "starts on the GPUs of training (rollout.backend=vllm:dN with placement=colocate and no server of others), and "
            f"here rollout.backend={backend} with placement={placement(config)}: leave it out"
        )
    if config.memory_limit_gib is None:
        return
    if not can_sleep(config):
        yield (
            f"{limit} is for placement=colocate where the engine sleeps while others work: rollout.backend=embedded, or "
            "vllm:dN or sglang:dN on GPUs, and no server of others. Here it keeps its memory: leave memory_limit_gib out"
        )
    yield from _sleepers(config, limit)


def _sleepers(config: TrainConfig | PreferenceConfig, limit: str) -> Iterator[str]:
    """Yields a message for each model that cannot sleep. ``limit``: the key and its value."""
    for role in ("actor", "critic", "reference", "teacher"):
        backend = getattr(getattr(config, role, None), "backend", None) or ""
        if backend.startswith("deepspeed"):
            yield f"{limit} does not go with {role}.backend={backend}, whose memory is DeepSpeed's own; use fsdp:dN"
    if config.actor.offload:
        yield f"{limit} does not go with actor.offload=true, which keeps the actor in host memory: leave one of them out"


def _balance(config: TrainConfig) -> Iterator[str]:
    if config.rollout.balance is None:
        return
    if not config.async_training:
        yield (
            "rollout.balance=auto is for asynchronous training, where generation and training run side by side; set "
            "async_training=true, or leave it out"
        )
    if config.rollout.backend not in INSIDE or config.actor.backend != "fsdp:d1":
        yield (
            "rollout.balance=auto moves CPU threads between one process that trains and one that generates: it needs "
            "rollout.backend=embedded and actor.backend=fsdp:d1; leave it out"
        )


def _rollout(config: TrainConfig) -> Iterator[str]:
    yield from _balance(config)
    rollout, eta = config.rollout, config.rollout.max_head_offpolicyness
    yield from fleet_problems(rollout.backend, rollout.fleet, config.gconfig.min_new_tokens)
    yield from _fleet(config)
    fleet, channel = rollout.fleet, rollout.weights.channel
    yield from delivery_problems(channel, rollout.backend, placement(config), fleet.servers, fleet.watch)
    yield from _memory_limit(config)
    if not config.async_training and eta:
        yield (
            f"rollout.max_head_offpolicyness={eta} contradicts async_training=false, which means 0; "
            "set async_training=true, or leave rollout.max_head_offpolicyness out"
        )
    if config.async_training and eta == 0:
        yield (
            "rollout.max_head_offpolicyness=0 contradicts async_training=true: a bound of 0 makes generation and training "
            "take turns. For asynchronous training set the bound to at least 1, or leave it out. To take turns set "
            "async_training=false; placement=decoupled still gives the engine a process of its own"
        )
    if config.async_training and config.deterministic:
        yield "deterministic=true contradicts async_training=true, where timing decides; set one of them to false"
    if config.async_training and config.placement == "colocate":
        yield (
            "placement=colocate contradicts async_training=true: the devices would be used in turns and nothing overlaps; "
            "leave placement out"
        )
    if rollout.workers and config.runner == "local":
        yield f"rollout.workers={rollout.workers} is for runner=ray; with runner=local each rank runs episodes: leave it out"
    if rollout.oversample > 1 and config.async_training:
        yield (
            f"rollout.oversample={rollout.oversample:g} is for synchronous training; asynchronous training waits for no "
            "straggler anyway: leave it out"
        )
    if rollout.oversample > 1 and config.deterministic:
        yield f"rollout.oversample={rollout.oversample:g} contradicts deterministic=true, where timing decides; set it to 1"
    if rollout.on_expiry != "mask" and max_head_offpolicyness(config) == 0:
        yield f"rollout.on_expiry={rollout.on_expiry} has no effect at staleness 0; set async_training=true, or leave it out"
    if config.actor.mini_batches > rollout.batch_size:
        yield (
            f"actor.mini_batches must be at most rollout.batch_size ({rollout.batch_size}), groups are never divided; "
            f"got {config.actor.mini_batches}"
        )
    if (rollout.min_group_size or 1) > config.gconfig.n_samples:
        yield (
            f"rollout.min_group_size must be at most gconfig.n_samples ({config.gconfig.n_samples}), "
            f"got {rollout.min_group_size}; every group would be dropped"
        )


def _algorithm(config: TrainConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.preset not in PRESETS:
        yield f"algorithm.preset={algorithm.preset} is not known; {nearest_names(algorithm.preset, PRESETS)}"
    yield from _kl(algorithm)


def _kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    kl = algorithm.kl
    if kl.in_loss and kl.estimator == "k1" and not kl.importance:
        yield (
            "algorithm.kl.estimator=k1 in the loss has a gradient of zero on average; use k2, k3 or k3_plus, "
            "algorithm.kl.importance=true, or algorithm.kl.where=reward"
        )
    if kl.in_reward and kl.estimator not in (None, "k1"):
        yield (
            f"algorithm.kl.estimator={kl.estimator} is for the loss; the reward takes k1: leave it out, "
            "or set algorithm.kl.where=loss"
        )


def _correction(config: TrainConfig, written: Container[str]) -> Iterator[str]:
    correction = config.algorithm.correction
    none = correction.weight == correction.reject.name == "none" and not corrects_itself(config)
    if config.async_training and none and "algorithm.correction.weight" not in written:
        yield (
            "async_training=true trains on tokens of older versions, but algorithm.correction.weight is none; "
            "use truncate or mask, or write algorithm.correction.weight=none to go without"
        )


def _sampling(config: TrainConfig) -> Iterator[str]:
    sampling = config.gconfig
    truncated = truncations(sampling)
    if truncated and not config.algorithm.allow_truncated_sampling:
        yield (
            f"{' and '.join(truncated)} draws from a truncated distribution, not the one trained on; "
            "set gconfig.top_p=1, gconfig.top_k=0 and gconfig.min_new_tokens=0, or algorithm.allow_truncated_sampling=true"
        )
    if "" in sampling.stop:
        yield "gconfig.stop holds an empty string, which every text contains: leave it out"
    if any(token < 0 for token in sampling.stop_token_ids):
        yield f"gconfig.stop_token_ids must be at least 0, got {list(sampling.stop_token_ids)}"
    if sampling.greedy:
        yield "gconfig.greedy=true explores nothing, so nothing can be learnt: set it to false (evaluation is greedy)"
    if config.evaluate.n_samples > 1 and config.evaluate.temperature == 0:
        yield (
            f"evaluate.temperature=0 is greedy, so evaluate.n_samples={config.evaluate.n_samples} makes equal answers; set "
            "a temperature above 0, or evaluate.n_samples=1"
        )
    if sampling.min_new_tokens > sampling.max_new_tokens:
        yield (
            f"gconfig.min_new_tokens must be at most gconfig.max_new_tokens ({sampling.max_new_tokens}), "
            f"got {sampling.min_new_tokens}"
        )
    longest = config.rollout.engine.max_model_len
    if longest is not None and longest <= sampling.max_new_tokens:
        yield (
            f"rollout.engine.max_model_len must exceed gconfig.max_new_tokens ({sampling.max_new_tokens}), so that a "
            f"prompt fits before the answer; got {longest}"
        )


def _rewards_of_sources(config: BaseConfig) -> Iterator[str]:
    for key, data in (("train_dataset", config.train_dataset), ("valid_dataset", config.valid_dataset)):
        for i, source in enumerate(data.sources):
            if source.reward is not None:
                yield f"{key}.sources[{i}].reward={source.reward} is for `tandem train` only: leave it out"


def _evaluation_job(config: TrainConfig) -> Iterator[str]:
    """Yields a message for each setting that does not work with an evaluation of checkpoints by another process."""
    every, saving = config.evaluate.every_steps, config.checkpoint
    if config.evaluate.where == "run" or every is None:
        return
    if saving.every_steps is None or every % saving.every_steps:
        yield (
            f"evaluate.where=job evaluates checkpoints, and checkpoint.every_steps={saving.every_steps or 'null'} makes "
            f"none at every {every} steps (evaluate.every_steps): set checkpoint.every_steps={every}"
        )
    if (saving.keep_best or "").lstrip("-").startswith("eval/"):
        yield (
            f"checkpoint.keep_best={saving.keep_best} needs figures of the run itself, and with evaluate.where=job another "
            "process measures them: leave one of them out, or set checkpoint.keep_last=null"
        )
