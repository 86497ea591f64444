"""Refuses a model that no training engine here can train, from its configuration, before weights are read."""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from tandem.api.weight_files import is_complete
from tandem.config.backend import Layout, layout_problems
from tandem.config.errors import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.zero_library import import_deepspeed
from tandem.models.architecture import Architecture
from tandem.models.compiled import refuse_without_compiler
from tandem.models.context_parallel import refuse_uneven_heads
from tandem.models.foreign import read_hf_config
from tandem.models.heads import ClassLabel, prepare_classifier, refuse_classifier
from tandem.models.load import load_causal_lm, load_scalar_model
from tandem.models.media.families import family_of


def check_train_engine(
    config: TrainEngineConfig,
    folder: Path,
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
    head: str,
    key: str,
    class_label: ClassLabel | None = None,
) -> Architecture:
    """Passes if an engine of ``config`` can train the model in ``folder``, which may lack weights, laid out as ``layout``.

    ``head``, ``class_label``: as `build_train_engine` takes them. ``key``: where ``config.backend`` was written.

    Raises:
        ConfigError: the model is of another kind than is needed or is not computed exactly here, or cannot be laid over
            the ranks so; a library or a compiler is missing.
    """
    found = read_hf_config(folder)
    architecture = Architecture.from_config(found)
    if head == "scalar":
        prepare_classifier(folder, found, class_label)
    else:
        refuse_classifier(folder, found)
    _check_media(config, folder, found, layout, key)
    if is_complete(folder):
        if head == "scalar":
            load_scalar_model(folder, device="meta", class_label=class_label)
        else:
            load_causal_lm(folder, device="meta")
    check_layout(config, layout, key, cpu=device.type == "cpu", rounded=dtype != torch.float32)
    check_heads(config, layout, architecture.num_heads, architecture.num_kv_heads, key)
    if layout.zero is not None:
        import_deepspeed(device)
    if config.compile:
        refuse_without_compiler(device)
    return architecture


def _check_media(config: TrainEngineConfig, folder: Path, found: PretrainedConfig, layout: Layout, key: str) -> None:
    """The part of models that see or hear."""
    family, written = family_of(folder, found), f"{key}={config.backend}"
    towers = {} if family is None else family.towers
    role = key.rpartition(".")[0]
    for setting, names in (("freeze", config.freeze), ("lora.towers", config.lora.towers)):
        for name in names:
            if name not in towers:
                raise ConfigError(
                    f"{role}.{setting} has {name!r}, and {folder} "
                    + (f"has the parts {', '.join(towers)}" if towers else "reads text alone: leave it out")
                )
    if family is None:
        return
    if layout.tensor > 1 or layout.context > 1 or layout.zero is not None:
        raise ConfigError(
            f"{folder} reads {' and '.join(family.kinds)}, and {written} does not divide what sees or hears: use "
            f"fsdp:d{layout.ranks}"
        )


def check_heads(config: TrainEngineConfig, layout: Layout, heads: int, kv_heads: int, key: str) -> None:
    """Passes if attention can be divided over the ranks.

    Raises:
        ConfigError: it cannot; says how many heads there are.
    """
    refuse_uneven_heads(heads, kv_heads, layout.tensor, 1, key)
    if config.context_parallel == "all_to_all":
        refuse_uneven_heads(heads, kv_heads, layout.tensor, layout.context, key)


def check_layout(config: TrainEngineConfig, layout: Layout, key: str, *, cpu: bool, rounded: bool) -> None:
    """Passes if the settings go with the layout, which ``key`` says, on such a device. ``rounded``: it computes in another
    dtype than float32.

    Raises:
        ConfigError: they do not.
    """
    written = f"{key}={config.backend}"
    for problem in layout_problems(layout, written, config):
        raise ConfigError(problem)
    if config.lora.rank is not None and (layout.tensor > 1 or layout.zero is not None):
        why = "DeepSpeed has no adapters here" if layout.zero is not None else "t cuts every matrix, but no adapter"
        raise ConfigError(f"lora does not go with {written}: {why}; use fsdp:d{layout.data}")
    if config.offload and cpu:
        raise ConfigError(
            "actor.offload=true brings layers from host memory to a GPU as they are computed, and without a GPU there is no "
            "other memory than that: leave it out"
        )
    if layout.zero == 1 and rounded:
        raise ConfigError(
            "stage 1 of DeepSpeed adds up gradients in another way where the model computes in bfloat16, which is not "
            f"supported: use deepspeed:zero2:d{layout.data}, or actor.dtype=float32"
        )
