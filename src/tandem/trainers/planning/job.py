"""What a configuration makes a machine hold and do: models, engine, sequences. Everything else is arithmetic on this."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.algorithms.preference import is_paired, needs_baseline, needs_reference
from tandem.config.arithmetic import max_head_offpolicyness, placement
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.fleet import parse_backend
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config
from tandem.config.roles import critic_engine_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.roles.actor import choose_parts
from tandem.trainers.critic import needs_critic
from tandem.trainers.parts import needs_greedy_baseline, reference_config
from tandem.trainers.planning.machine import Machine
from tandem.trainers.planning.shape import Dtype, Head, Shape
from tandem.trainers.preference import make_loss


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence."""

    prompt: int
    completion: int
    """Expected, which the time follows from."""

    longest: int
    """Of the longest completion, which the memory follows from."""


@dataclass(frozen=True)
class Held:
    """A model in a training engine."""

    role: str
    shape: Shape
    head: Head
    dtype: Dtype
    """That it computes in; the weights that it holds are float32."""

    ranks: int
    trained: bool
    max_tokens: int
    chunk_tokens: int
    checkpointing: bool = False
    mini_batches: int = 1
    epochs: int = 1
    entropy: bool = False
    """Its update computes the entropy of each token too."""

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part."""
        return self.ranks > 1


@dataclass(frozen=True)
class Generator:
    """Embedded engines, which generate."""

    shape: Shape
    delivered: Dtype
    """Of the weights that are published to it."""

    dtype: Dtype
    """That it computes in."""

    engines: int
    own_process: bool
    kv_cache_gib: float
    max_running: int
    prefill_chunk: int
    max_len: int
    sequences: int
    """Samples under way at once, of all engines."""

    foreign: str | None = None
    """Servers of another make, which plan their own memory and whose speed is not known here."""


@dataclass(frozen=True)
class Job:
    """A run, as far as it costs anything."""

    kind: str
    models: tuple[Held, ...]
    """The trained ones and the frozen ones; the actor comes first."""

    lengths: Lengths
    groups: int
    """Prompts, or rows, in one step."""

    generated: int
    """Samples that are drawn for each prompt; 0: nothing is generated."""

    trained: int
    """Sequences of each prompt that are trained on."""

    together: bool = False
    """The sequences of a row go into one micro-batch."""

    generator: Generator | None = None
    asynchronous: bool = False
    proximal: bool = False
    """A pass of the actor without gradients comes before its update."""

    kept_versions: int = 0
    """Old weights that are kept to verify deliveries."""

    verifies: bool = False
    checkpoints: int | None = 2
    """Checkpoints that are kept; None: all."""

    saves_beside: bool = False
    """Training goes on while a copy of its state is written."""

    workers: int = 0
    """Reward worker processes."""

    @property
    def actor(self) -> Held:
        """The model that is trained."""
        return self.models[0]

    @property
    def frozen(self) -> tuple[Held, ...]:
        """Models that only score."""
        return tuple(model for model in self.models if not model.trained)

    @property
    def critic(self) -> Held | None:
        """A critic with a model of its own."""
        return next((model for model in self.models if model.role == "critic"), None)


def job_of(config: BaseConfig, machine: Machine, lengths: Lengths, read: Callable[[str], Shape]) -> Job:
    """The job of a configuration. ``read``: from a model's path to its shape.

    Raises:
        ConfigError: a backend that is not planned here.
    """
    if isinstance(config, DistillConfig):
        job = _reinforcement(training_config(config), machine, lengths, read)
        teacher = replace(config.actor, path=str(config.teacher.path), dtype=config.teacher.dtype or config.actor.dtype)
        return replace(job, kind="distill", models=(*job.models, held("teacher", teacher, machine, read, trained=False)))
    if isinstance(config, TrainConfig):
        return _reinforcement(config, machine, lengths, read)
    return _supervised(config, machine, lengths, read)


def held(
    role: str,
    config: TrainEngineConfig,
    machine: Machine,
    read: Callable[[str], Shape],
    *,
    head: Head = "lm",
    trained: bool = True,
    mini_batches: int = 1,
    epochs: int = 1,
    entropy: bool = False,
) -> Held:
    """A model in a training engine of this configuration."""
    found = re.fullmatch(r"fsdp:d([1-9]\d*)", config.backend)
    if found is None:
        raise ConfigError(f"{role}: the plan knows backends of the form fsdp:dN, got {config.backend!r}")
    if config.offload:
        raise ConfigError(f"{role}: the plan does not know what a run needs with actor.offload=true; leave it out to plan")
    if config.lora.rank is not None:
        raise ConfigError(f"{role}: there is no plan for LoRA yet ({role}.lora.rank={config.lora.rank}); plan without it")
    return Held(
        role=role,
        shape=read(config.path),
        head=head,
        dtype=resolved(config.dtype, machine),
        ranks=int(found[1]),
        trained=trained,
        max_tokens=config.max_tokens_per_micro_batch,
        chunk_tokens=config.logprob_chunk_tokens,
        checkpointing=config.gradient_checkpointing,
        mini_batches=mini_batches,
        epochs=epochs,
        entropy=entropy,
    )


def resolved(name: str, machine: Machine) -> Dtype:
    """`auto` as `tandem.models.precision.resolve_dtype` reads it, on a machine that need not be here."""
    if name == "auto":
        return "bfloat16" if machine.fast_bfloat16 else "float32"
    return "bfloat16" if name == "bfloat16" else "float32"


def _reinforcement(config: TrainConfig, machine: Machine, lengths: Lengths, read: Callable[[str], Shape]) -> Job:
    algorithm, updates = config.algorithm, config.actor.mini_batches * config.actor.epochs_per_batch
    _, tokens, _ = choose_parts(algorithm, config.gconfig.max_new_tokens)
    kl = algorithm.kl
    in_reward = kl.coefficient > 0 and kl.where == "reward"
    proximal = updates > 1 or in_reward or kl.target is not None or tokens.needs_proximal
    models = [
        held(
            "actor", config.actor, machine, read, head="both" if config.critic.shared else "lm",
            mini_batches=config.actor.mini_batches, epochs=config.actor.epochs_per_batch,
            entropy=algorithm.entropy_coefficient > 0 or not proximal,
        )
    ]  # fmt: skip
    if needs_critic(config) and not config.critic.shared:
        models.append(
            held(
                "critic", critic_engine_config(config.actor, config.critic), machine, read, head="scalar",
                mini_batches=config.critic.mini_batches or config.actor.mini_batches,
                epochs=config.critic.epochs_per_batch or config.actor.epochs_per_batch,
            )
        )  # fmt: skip
    if kl.coefficient > 0:
        models.append(held("reference", reference_config(config), machine, read, trained=False))
    eta, samples = max_head_offpolicyness(config), config.gconfig.n_samples + needs_greedy_baseline(config)
    return Job(
        kind="train",
        models=tuple(models),
        lengths=lengths,
        groups=config.rollout.batch_size,
        generated=samples,
        trained=algorithm.update_samples or config.gconfig.n_samples,
        generator=_generator(config, models[0].shape, machine, samples),
        asynchronous=config.async_training,
        proximal=proximal,
        kept_versions=0 if config.rollout.verify.every_steps is None else max(1, eta),
        verifies=config.rollout.verify.every_steps is not None,
        checkpoints=config.checkpoint.keep_last,
        saves_beside=_saves_beside(config),
        workers=2,
    )


def _saves_beside(config: BaseConfig) -> bool:
    wish = config.checkpoint
    return wish.every_steps is not None and wish.asynchronous and wish.resumable


def _generator(config: TrainConfig, shape: Shape, machine: Machine, samples: int) -> Generator:
    rollout = config.rollout
    servers = parse_backend(rollout.backend)
    kinds = {kind for kind, _ in servers or ()}
    foreign = sorted(kinds - {"embedded", "tandem"}) or (["attached"] if servers is not None and not kinds else [])
    delivered = resolved(rollout.dtype, machine)
    episodes = (max_head_offpolicyness(config) + 1) * rollout.batch_size
    if not config.async_training:
        episodes = int(rollout.batch_size * rollout.oversample)
    return Generator(
        shape=shape,
        delivered=delivered,
        dtype="float32" if delivered == "bfloat16" and not machine.fast_bfloat16 else delivered,
        engines=max(1, sum(count for kind, count in servers or () if kind in ("embedded", "tandem"))),
        own_process=servers is not None or placement(config) == "decoupled",
        kv_cache_gib=rollout.engine.kv_cache_gib,
        max_running=rollout.engine.max_running,
        prefill_chunk=rollout.engine.prefill_chunk_tokens,
        max_len=rollout.engine.max_model_len or shape.context,
        sequences=min(episodes, rollout.max_concurrent or episodes) * samples,
        foreign=" and ".join(foreign) if foreign else None,
    )


def _supervised(config: BaseConfig, machine: Machine, lengths: Lengths, read: Callable[[str], Shape]) -> Job:
    """Supervised fine-tuning, preferences, reward models."""
    scalar = isinstance(config, RewardModelConfig)
    models = [held("actor", config.actor, machine, read, head="scalar" if scalar else "lm")]
    pairs = scalar and config.supervision == "pairs"  # type: ignore[attr-defined]
    baseline = False
    if isinstance(config, PreferenceConfig):
        loss = make_loss(config).function
        pairs, baseline = is_paired(loss), needs_baseline(loss)
        if needs_reference(loss):
            models.append(held("reference", reference_config(config), machine, read, trained=False))  # type: ignore[arg-type]
    elif not isinstance(config, SFTConfig | RewardModelConfig):
        raise ConfigError(f"there is no plan for {type(config).__name__}")
    return Job(
        kind={SFTConfig: "sft", PreferenceConfig: "preference", RewardModelConfig: "reward"}[type(config)],
        models=tuple(models),
        lengths=lengths,
        groups=config.batch_size,  # type: ignore[attr-defined]
        generated=0,
        trained=2 if pairs else 1,
        together=pairs,
        proximal=baseline,
        checkpoints=config.checkpoint.keep_last,
        saves_beside=_saves_beside(config),
    )
