"""Makes the inference engine that the configuration names."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from transformers import AutoConfig

from tandem.api.engines import InferenceEngine
from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.config.rollout import RolloutConfig
from tandem.engines.inference.core import EngineCore
from tandem.engines.inference.embedded import EmbeddedEngine
from tandem.engines.inference.process import EmbeddedProcess
from tandem.models.heads import refuse_classifier
from tandem.models.precision import resolve_dtype

BACKENDS = ("embedded",)


def build_inference_engine(
    rollout: RolloutConfig,
    *,
    folder: Path,
    placement: Literal["colocate", "decoupled"],
    threads: int,
    device: str,
    deterministic: bool,
) -> InferenceEngine:
    """The engine, its model loaded from ``folder``; ``threads`` are the run's, see `engine_threads`.

    Raises:
        ConfigError: `rollout.backend` is not known, or the folder holds a reward model.
    """
    if rollout.backend not in BACKENDS:
        raise ConfigError(f"rollout.backend must be one of {', '.join(BACKENDS)}, got {rollout.backend!r}")
    refuse_classifier(folder, AutoConfig.from_pretrained(folder))
    config = replace(rollout.engine, threads=engine_threads(rollout, placement=placement, threads=threads))
    dtype, version = resolve_dtype(rollout.dtype, device), WeightVersion(0)
    if placement == "decoupled":
        return EmbeddedProcess.start(
            folder, config, dtype, device, version=version, threads=config.threads, deterministic=deterministic
        )
    core = EngineCore(folder, config, dtype, device, version)
    return EmbeddedEngine(
        core, version=version, threads=config.threads, deterministic=deterministic, keep_kv=config.keep_kv_on_update
    )


def engine_threads(rollout: RolloutConfig, *, placement: Literal["colocate", "decoupled"], threads: int) -> int:
    """CPU threads of generation: what is configured; else all where it takes turns with training, half where it does not."""
    return rollout.engine.threads or (threads if placement == "colocate" else max(1, threads // 2))
