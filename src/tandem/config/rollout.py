"""Rollout: the inference engine, concurrency, staleness, failures."""

from dataclasses import dataclass, field
from typing import Literal

from tandem.config.delivery import DeliveryConfig, VerifyConfig
from tandem.config.fleet import FleetConfig


@dataclass(frozen=True)
class EmbeddedEngineConfig:
    """The built-in inference engine."""

    max_running: int = 128
    """Sequences decoded together in one step."""

    kv_cache_gib: float = 2.0
    """Memory for keys and values; requests wait for admission when it is full."""

    prefill_chunk_tokens: int = 1024
    """Prompt tokens computed between two decode steps; longer prompts are computed in pieces of this size."""

    max_model_len: int | None = None
    """Most tokens of prompt and completion together; null takes the model's context."""

    keep_kv_on_update: bool = False
    """Keep keys and values of running requests over a weight update instead of recomputing them under the new weights."""

    threads: int | None = None
    """CPU threads of the engine; null takes `threads` when colocated and half of it when decoupled."""


@dataclass(frozen=True)
class ReplayConfig:
    """Training again on groups of earlier batches."""

    groups: int = 0
    """Groups of earlier batches that join each batch, beside its new ones; 0 is off."""

    max_age: int = 4
    """Most versions that a replayed token may be behind the trainer."""

    max_uses: int = 1
    """Times that a group may be replayed, after its first use."""


@dataclass(frozen=True)
class RolloutConfig:
    """Where samples come from and how many are under way."""

    backend: str = "embedded"
    """Inference engine: `embedded` is the built-in one, inside the run. `embedded:dN`, `tandem:dN`, `vllm:dN`, `sglang:dN`
    are N servers of a kind that the run starts, `+` joins kinds, and `attached` takes those of `rollout.fleet` alone."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of generation (auto: bfloat16 where the device is fast in it, else float32)."""

    engine: EmbeddedEngineConfig = field(default_factory=EmbeddedEngineConfig)
    """Settings of the embedded engine, also of those in `embedded:dN` and `tandem:dN`."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    """Settings of a fleet: every backend but `embedded`."""

    weights: DeliveryConfig = field(default_factory=DeliveryConfig)
    """How new weights reach the engine."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """Proof that they did."""

    batch_size: int = 8
    """Prompts (episodes, groups) in one training step."""

    max_concurrent: int | None = None
    """Most episodes under way at once; null means what the staleness bound admits."""

    max_head_offpolicyness: int | None = None
    """η: most versions that a trained token may be behind the trainer; null means 0, or 1 when training is asynchronous."""

    on_expiry: Literal["mask", "wait", "drop"] = "mask"
    """Tokens older than η at consumption: `mask` takes them out of the loss, `wait` holds admission back so that there are
    none, `drop` drops the group."""

    episode_timeout_s: float = 600.0
    """An episode that takes longer is cancelled and counted as dropped with reason `deadline`."""

    max_retries: int = 2
    """How often an episode is run again after an infrastructure failure."""

    max_data_failures: int = 1000
    """The run stops when this many episodes in a row were dropped, or lost most of their samples, because of their data or
    reward; also when so many in a row were dropped because of the infrastructure."""

    min_group_size: int | None = None
    """A group with fewer samples than this, because some failed, is dropped; null is half of them, rounded up."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay of earlier batches."""

    oversample: float = 1.0
    """Synchronous only: start this many times `batch_size` episodes and abort the slowest once the batch is full."""

    wait_timeout_s: float = 3600.0
    """A step that waits longer than this for its batch ends the run with an error that says what it waited for."""
