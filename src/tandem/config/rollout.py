"""Rollout: the inference engine, concurrency, staleness, failures."""

from dataclasses import dataclass, field
from typing import Literal

from tandem.config.delivery import DeliveryConfig, VerifyConfig
from tandem.config.fleet import FleetConfig


@dataclass(frozen=True)
class EmbeddedEngineConfig:
    """The built-in inference engine."""

    max_running: int | None = None
    """Sequences decoded together in one step; null: 128 in the embedded engine; a vLLM or SGLang server
    takes its own limit."""

    kv_cache_gib: float | None = None
    """Memory for keys and values. When it is full, requests wait, and the latest may give way (`rollout/preempted`). null
    takes 2 on a CPU, and in `tandem eval` a third of free memory (at least 2); on a GPU 90 % of its memory, or 40 % beside
    training, less twice the model's weights (at least 2)."""

    prefill_chunk_tokens: int | None = None
    """Prompt tokens computed between two decode steps; longer prompts are computed in pieces of this size. null takes 1024
    on a CPU and 8192 on a GPU."""

    max_model_len: int | None = None
    """Most tokens of prompt and completion together. null: the model's context length. For servers that the run
    starts, and on a GPU, it is the longest prompt of the data plus `gconfig.max_new_tokens`, if `workflow=rlvr`, there are
    at most 20,000 rows, and no service asks the engine itself; a vLLM server otherwise takes what its cache holds."""

    keep_kv_on_update: bool = False
    """Keep keys and values of running requests over a weight update instead of recomputing them under the new weights;
    embedded engines and vLLM."""

    threads: int | None = None
    """CPU threads of an engine; null takes an equal share of all `threads` (colocated) or of half of them (decoupled)."""


@dataclass(frozen=True)
class ReplayConfig:
    """Replay: training again on groups of earlier batches."""

    groups: int = 0
    """Number of groups of earlier batches that are added to each batch; 0 turns replay off."""

    max_age: int = 4
    """Most versions that a replayed token may be behind the trainer."""

    max_uses: int = 1
    """Number of times that a group may be replayed after its first use."""


@dataclass(frozen=True)
class RolloutConfig:
    """The source of samples, and the number that is generated at a time."""

    backend: str = "auto"
    """Inference engine. `auto`: on GPUs vLLM or SGLang where one is installed and can do what the run asks for, else
    `embedded` (docs/gpu.md). `embedded`: the built-in engine, inside the run. `embedded:dN`, `tandem:dN`, `vllm:dN`,
    `sglang:dN`: the run starts N servers of that kind; `+` joins kinds. `attached`: only the servers named in
    `rollout.fleet`."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of generation (auto: bfloat16 if the device has instructions for it, else float32)."""

    engine: EmbeddedEngineConfig = field(default_factory=EmbeddedEngineConfig)
    """Settings of the embedded engine; they also apply to `embedded:dN` and `tandem:dN`."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    """Settings of servers, for every backend except `embedded`."""

    weights: DeliveryConfig = field(default_factory=DeliveryConfig)
    """The delivery of new weights to the engine."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """Proof that new weights reached the engine."""

    batch_size: int = 8
    """Prompts (episodes, groups) in one training step."""

    workers: int = 0
    """With `runner=ray`: processes that run the episodes, with their tools, environments and rewards, and ask the engine,
    which stays where it is; 0: the controller runs them."""

    max_concurrent: int | None = None
    """Most episodes that run at the same time; null: as many as the staleness bound allows."""

    max_head_offpolicyness: int | None = None
    """η, the staleness bound: the most versions that a trained token may be behind the trainer. null: 1 if training is
    asynchronous, else 0."""

    on_expiry: Literal["mask", "wait", "drop"] = "mask"
    """The treatment of tokens that are older than η when their batch is made. `mask`: they leave the loss; `wait`: a batch
    waits for episodes that would get too old; `drop`: their group is dropped."""

    episode_timeout_s: float = 600.0
    """An episode that takes longer is cancelled and counted as dropped, with the reason `deadline`."""

    max_retries: int = 2
    """Number of times that an episode is run again after a failure of the infrastructure, such as a server that died."""

    max_data_failures: int = 1000
    """The run stops after this many episodes in a row that were dropped, or lost most of their samples, because of data,
    reward or workflow; also after this many in a row that were dropped because of the infrastructure. If the first three
    groups fail as a whole by the user's code, the run ends with the third."""

    min_group_size: int | None = None
    """A group is dropped if fewer of its samples than this are left, because the others failed; null: half, rounded up."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay of earlier batches."""

    balance: Literal["auto"] | None = None
    """`auto`, in asynchronous training on a CPU: threads move between training and generation while the run goes on, until
    neither waits for the other for more than a tenth of the time. null: they stay as `rollout.engine.threads` says."""

    oversample: float = 1.0
    """Synchronous training only: start `oversample` × `batch_size` episodes, and abort the slowest when the batch is
    full."""

    wait_timeout_s: float = 3600.0
    """If a step waits longer than this for its batch, the run ends with an error that says what it waited for."""
