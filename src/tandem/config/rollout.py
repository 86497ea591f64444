"""Rollout: sampling (the `gconfig` section), the inference engine and its memory, concurrency, staleness, failures; and the
delivery of weights to the engines, with its verification."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from tandem.config.fleet import FleetConfig
from tandem.config.parts import (
    Count,
    KnobRule,
    Length,
    Natural,
    Positive,
    PositiveShare,
    Rows,
    Samples,
    Seconds,
    Threads,
    whole,
)


@dataclass(frozen=True)
class GenerationConfig:
    """Sampling parameters of a completion, and the number of completions per prompt."""

    n_samples: Samples = 8
    """Number of samples per prompt; together they form a group."""

    max_new_tokens: Count = 256
    """Maximum tokens of a completion; a completion that reaches this counts as truncated."""

    min_new_tokens: Natural = 0
    """Stop tokens are suppressed until a completion has this many tokens."""

    temperature: Annotated[float, KnobRule(low=0.001, high=1000.0)] = 1.0
    """Logits are divided by this before the softmax; log-probabilities are those of the divided logits."""

    first_token_temperature: Positive | None = None
    """Temperature of the first token of each reply (FIRE, arXiv:2410.21236), which is not trained on, because the policy
    would not have drawn it so often; null takes `temperature`."""

    top_p: PositiveShare = 1.0
    """Nucleus sampling: the smallest set of tokens whose probability reaches this; 1 turns it off."""

    top_k: Natural = 0
    """Only the k most probable tokens may be drawn; 0 turns it off."""

    greedy: bool = False
    """Always take the most probable token instead of sampling."""

    stop: tuple[str, ...] = ()
    """Strings that end a completion when they appear in its text; their tokens stay in the completion."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to those of the model."""


def truncations(sampling: GenerationConfig) -> list[str]:
    """Returns the settings that restrict sampling to a part of the distribution, as ``key=value``."""
    settings = [f"gconfig.top_p={sampling.top_p:g}"] if sampling.top_p < 1 else []
    settings += [f"gconfig.top_k={sampling.top_k}"] if sampling.top_k > 0 else []
    return settings + ([f"gconfig.min_new_tokens={sampling.min_new_tokens}"] if sampling.min_new_tokens > 0 else [])


class ChannelTerms(NamedTuple):
    """The requirements of a weight channel. Code tests these and not the name of the channel."""

    reads: str = "disk"
    """Capability (`InferenceEngine.capabilities`) that a server needs to receive weights from this channel."""

    folder: bool = True
    """True if servers read the weights from a folder, which must be writable for the run."""

    by_group: bool = False
    """True if tensors are sent through a process group that the server joins."""

    on_gpu: bool = False
    """True if a version stays in the memory of the training GPU until the next one, and the server maps that memory."""


CHANNELS = {
    "auto": ChannelTerms(),
    "disk": ChannelTerms(),
    "collective": ChannelTerms("shared_memory", folder=False, by_group=True),
    "ipc": ChannelTerms("ipc", folder=False, on_gpu=True),
}
"""Values of `rollout.weights.channel`; the classes are in `tandem.weights`, and `flow/residents.py` makes them."""

CANNOT_READ = {
    "ipc": "this run hands weights over in the memory of its GPU, which only a server that it started opens; leave "
    "rollout.weights.channel out, and they go by disk",
    "shared_memory": "this run hands weights over in shared memory, which it cannot read; set rollout.fleet.watch or "
    "rollout.fleet.servers, and they go by disk",
    "disk": "this run hands weights over in folders, and it reads none; start it with --weights-root and the folder that "
    "rollout.weights.folder names",
}
"""Capability → end of the message to a server without it. In order of preference."""


@dataclass(frozen=True)
class DeliveryConfig:
    """The delivery of new weights to the inference engines; see docs/weights.md."""

    channel: Literal["auto", "disk", "collective", "ipc"] = "auto"
    """`auto`: shared memory, or a folder if a server reads from one; `disk`: always the folder; `collective`: a process
    group (gloo, or nccl on GPUs), to one embedded engine or to vLLM and SGLang servers; `ipc`: handles of GPU memory,
    to one vLLM or SGLang server on the GPU of training."""

    folder: str | None = None
    """Folder that servers read weights from; they must see it under the same path. null takes `.weights` in `run.root`."""

    @property
    def terms(self) -> ChannelTerms:
        """The requirements of the channel."""
        return CHANNELS[self.channel]

    def uses_folder(self, *, servers: bool) -> bool:
        """True if weights are written to the folder. ``servers``: True if the run has servers."""
        return self.channel == "disk" or (servers and self.terms.folder)


@dataclass(frozen=True)
class VerifyConfig:
    """Verification of the delivery of weights: the trainer computes the log-probabilities of some trajectories with the
    weights of their version, and compares them with the engine's."""

    every_steps: Count | None = 20
    """Verify at steps 1 and 3, and then every `every_steps` steps; null turns verification off."""

    tolerance: Positive | None = None
    """Largest mean difference of log-probabilities, in nats; a larger one ends the run, with the cause if it can be found.
    null takes 0.001 if generation and training are in float32, else 0.1."""


JOINING = ("vllm", "sglang")
"""Kinds of servers that can receive weights through a process group."""


ONE_SERVER = tuple(f"{kind}:{layout}" for kind in JOINING for layout in ("d1", "d1t1"))
"""Values of `rollout.backend` for one such server on one GPU."""


def delivery_problems(
    channel: str, backend: str, placement: str, attached: Sequence[str], watch: str | None
) -> Iterator[str]:
    """Yields a message for each setting of `rollout.weights` that contradicts others. ``attached``: `rollout.fleet.servers`;
    ``watch``: `rollout.fleet.watch`."""
    terms = CHANNELS[channel]
    if terms.on_gpu and watch is not None:
        yield (
            f"rollout.fleet.watch={watch} lets servers join, and rollout.weights.channel={channel} hands weights only to "
            "a server that the run starts on its own GPU; leave one of them out"
        )
    if terms.on_gpu and (backend not in ONE_SERVER or placement != "colocate" or attached):
        yield (
            f"rollout.weights.channel={channel} is for one server that the run starts on the GPU of training and that opens "
            f"this GPU's memory, and here rollout.backend={backend} with placement={placement}; set rollout.backend=vllm:d1 "
            "(or sglang:d1) and placement=colocate without rollout.fleet.servers, or leave rollout.weights.channel out"
        )
    if not terms.by_group:
        return
    kinds = [part.partition(":")[0] for part in backend.split("+") if part != "attached"]
    kinds += [text.partition("=")[0] for text in attached]
    alone = backend in ("embedded", "auto")
    if placement != "decoupled" if alone else not kinds or not set(kinds) <= set(JOINING):
        more = "" if alone else ", or for vLLM and SGLang servers only"
        yield (
            f"rollout.weights.channel={channel} is for one embedded engine in a process of its own{more}, and here "
            f"rollout.backend={backend} with placement={placement}; set rollout.backend=embedded and placement=decoupled, "
            "or leave rollout.weights.channel out"
        )


@dataclass(frozen=True)
class EmbeddedEngineConfig:
    """The built-in inference engine."""

    max_running: Annotated[int, whole(1, 65536)] | None = None
    """Maximum number of sequences decoded together in one step; null: 128 in the embedded engine, the server's own limit in
    vLLM and SGLang."""

    kv_cache_gib: Annotated[float, KnobRule(above=0.0, high=2.0**20)] | None = None
    """Memory for keys and values. When it is full, requests wait, and the latest may be preempted (`rollout/preempted`).
    null on a CPU: 2, or in `tandem eval` a third of the free memory (at least 2). null on a GPU: 90 % of its memory, or 40 %
    if shared with training, minus twice the model's weights (at least 2)."""

    prefill_chunk_tokens: Count | None = None
    """Prompt tokens computed between two decode steps; longer prompts are computed in pieces of this size. null takes 1024
    on a CPU and 8192 on a GPU."""

    max_model_len: Length | None = None
    """Maximum tokens of prompt and completion together. null: the model's context length. For servers that the run starts,
    and on a GPU: the longest prompt of the data plus `gconfig.max_new_tokens`, if `workflow=rlvr`, there are at most 20,000
    rows and no service sends requests to the engine; otherwise a vLLM server takes the most that fits its cache."""

    keep_kv_on_update: bool = False
    """Keep the keys and values of running requests after a weight update instead of recomputing them with the new weights.
    For embedded engines and vLLM."""

    threads: Threads | None = None
    """CPU threads of an engine; null takes an equal share of all `threads` (colocated) or of half of them (decoupled)."""


@dataclass(frozen=True)
class ReplayConfig:
    """Replay: training again on groups of earlier batches."""

    groups: Natural = 0
    """Number of groups of earlier batches that are added to each batch; 0 turns replay off."""

    max_age: Count = 4
    """Maximum number of versions that a replayed token may be behind the trainer."""

    max_uses: Count = 1
    """Number of times that a group may be replayed after its first use."""


@dataclass(frozen=True)
class RolloutConfig:
    """Generation of samples: engine, concurrency, staleness and failures."""

    backend: str = "auto"
    """Inference engine. `auto`: on GPUs vLLM or SGLang, if one is installed and supports the run's settings, else `embedded`
    (docs/gpu.md). `embedded`: the built-in engine, inside the run. `embedded:dN`, `tandem:dN`, `vllm:dN`, `sglang:dN`: the
    run starts N servers of that kind; `+` joins kinds. `attached`: only the servers named in `rollout.fleet`."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of generation (auto: bfloat16 if the device has instructions for it, else float32)."""

    engine: EmbeddedEngineConfig = field(default_factory=EmbeddedEngineConfig)
    """Settings of the embedded engine, and of `embedded:dN` and `tandem:dN`. vLLM and SGLang read `max_running` and
    `max_model_len`, vLLM on a CPU also `kv_cache_gib`."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    """Settings of servers, for every backend except `embedded`."""

    weights: DeliveryConfig = field(default_factory=DeliveryConfig)
    """The delivery of new weights to the engine."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """Verification that new weights reached the engine."""

    batch_size: Rows = 8
    """Number of prompts (groups) per training step."""

    workers: Annotated[int, whole(0, 4096)] = 0
    """With `runner=ray`: number of processes that run the episodes with their tools, environments and rewards, and send
    requests to the engine. 0: the controller runs the episodes."""

    max_concurrent: Count | None = None
    """Maximum number of episodes at the same time; null: as many as the staleness bound allows."""

    max_head_offpolicyness: Natural | None = None
    """η, the staleness bound: the most versions that a trained token may be behind the trainer. null: 1 if training is
    asynchronous, else 0."""

    on_expiry: Literal["mask", "wait", "drop"] = "mask"
    """Handling of tokens that are older than η when their batch is made. `mask`: they are masked out of the loss; `wait`: a
    batch waits for episodes that would get too old; `drop`: their group is dropped."""

    episode_timeout_s: Seconds = 600.0
    """An episode that takes longer is cancelled and counted as dropped, with the reason `deadline`."""

    max_retries: Natural = 2
    """Maximum number of retries of an episode after a failure of the infrastructure, such as a server that died."""

    max_data_failures: Count = 1000
    """The run stops after this many consecutive episodes that were dropped, or lost most of their samples, because of data,
    reward or workflow; also after this many consecutive ones that were dropped because of the infrastructure. If all of the
    first three groups fail as a whole in the user's code, the run stops after the third."""

    min_group_size: Count | None = None
    """A group is dropped if failures leave it fewer samples than this; null: half of them, rounded up."""

    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Replay of earlier batches."""

    balance: Literal["auto"] | None = None
    """`auto`, for asynchronous training on a CPU: moves threads between training and generation during the run, until
    neither waits for the other for more than a tenth of the time. null: the numbers stay as `rollout.engine.threads` sets
    them."""

    oversample: Annotated[float, KnobRule(low=1.0, high=100.0)] = 1.0
    """Synchronous training only: start `oversample` × `batch_size` episodes, and abort the slowest when the batch is
    full."""

    wait_timeout_s: Seconds = 3600.0
    """If a step waits longer than this for its batch, the run ends with an error that says what it waited for."""


CACHE_GIB = 2.0
"""Default cache on a CPU, and on a GPU if the engine has no share of its memory; the smallest default on other GPUs."""

CPU_CHUNK, GPU_CHUNK = 1024, 8192
PLACES = 128
SERVER_PLACES = 1024
"""Number of sequences that a vLLM server on a large GPU decodes together."""


def cache_gib(
    engine: EmbeddedEngineConfig,
    device: str,
    *,
    memory_gib: float | None = None,
    share: float = 0.0,
    weights_gib: float = 0.0,
) -> float:
    """Returns `kv_cache_gib`, or the default for the device, in GiB.

    On a GPU, weights and cache together get ``share`` of its memory (`share_of`). Weights count twice, because an update
    loads new weights beside the old ones. The default depends on the device's total memory and not on its free memory, so
    that the planner computes the same number, and a resumed run has the same settings.

    Args:
        engine: settings of the engine.
        device: ``cpu``; any other value means a GPU.
        memory_gib: total memory of the device, or the part that the run may use; None if the engine has no share of it.
        share: share of this memory for the engine, 0 to 1.
        weights_gib: size of one copy of the weights.
    """
    if engine.kv_cache_gib is not None:
        return engine.kv_cache_gib
    if device == "cpu" or memory_gib is None:
        return CACHE_GIB
    return max(CACHE_GIB, share * memory_gib - 2 * weights_gib)


def chunk_tokens(engine: EmbeddedEngineConfig, device: str) -> int:
    """Returns `prefill_chunk_tokens`, or the default for the device; a GPU needs more tokens to be busy."""
    return engine.prefill_chunk_tokens or (CPU_CHUNK if device == "cpu" else GPU_CHUNK)


def places(engine: EmbeddedEngineConfig) -> int:
    """Returns `max_running`, or the default of the embedded engine."""
    return engine.max_running or PLACES
