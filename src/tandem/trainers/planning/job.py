"""What a configuration makes a machine hold and do: models, engine, sequences. Everything else is arithmetic on this."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tandem.algorithms.preference import is_paired, needs_baseline, needs_reference
from tandem.config.arithmetic import max_head_offpolicyness, placement, samples_together
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, SFTConfig, TrainConfig
from tandem.config.fleet import parse_backend
from tandem.config.lora import LoRAConfig
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config
from tandem.config.roles import critic_engine_config
from tandem.roles.actor import choose_parts
from tandem.trainers.critic import needs_critic
from tandem.trainers.parts import backend_key, needs_greedy_baseline, reference_config
from tandem.trainers.planning.disk import Saves, saves_of
from tandem.trainers.planning.held import Held, held, resolved
from tandem.trainers.planning.machine import Machine
from tandem.trainers.planning.shape import Dtype, Shape
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

    adapter: int = 0
    """Parameters of the adapter that is delivered alone; 0: whole weights are."""

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
    saves: Saves = field(default_factory=Saves)
    """Checkpoints of the run."""

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


def job_of(
    config: BaseConfig, machine: Machine, lengths: Lengths, read: Callable[[str], Shape], *, rows: int | None = None
) -> Job:
    """The job of a configuration. ``read``: from a model's path to its shape; ``rows``: of the data, where they are known.

    Raises:
        ConfigError: what the engines themselves would refuse.
    """
    if isinstance(config, DistillConfig):
        job = _reinforcement(training_config(config), machine, lengths, read)
        job = replace(job, kind="distill", models=(*job.models, _teacher(config, machine, read)))
    elif isinstance(config, TrainConfig):
        job = _reinforcement(config, machine, lengths, read)
    else:
        job = _supervised(config, machine, lengths, read)
    return replace(job, saves=saves_of(config, rows))


def _teacher(config: DistillConfig, machine: Machine, read: Callable[[str], Shape]) -> Held:
    path, dtype = str(config.teacher.path), config.teacher.dtype or config.actor.dtype
    engine = replace(config.actor, path=path, dtype=dtype, lora=LoRAConfig())
    return held("teacher", engine, machine, read(path), trained=False)


def _reference(config: TrainConfig | PreferenceConfig, machine: Machine, actor: Held, read: Callable[[str], Shape]) -> Held:
    """The frozen policy; beside adapters it is the actor's own model, see `tandem.trainers.parts.frozen_policy`."""
    if actor.adapters is not None and config.reference == type(config.reference)():
        return replace(actor, role="reference", head="lm", trained=False, adapters=None, own=False)
    engine, key = reference_config(config), backend_key(config, "reference")
    return held("reference", engine, machine, read(engine.path), trained=False, key=key)


def _reinforcement(config: TrainConfig, machine: Machine, lengths: Lengths, read: Callable[[str], Shape]) -> Job:
    algorithm, updates = config.algorithm, config.actor.mini_batches * config.actor.epochs_per_batch
    _, tokens, _ = choose_parts(algorithm, config.gconfig.max_new_tokens)
    kl = algorithm.kl
    in_reward = kl.coefficient > 0 and kl.where == "reward"
    proximal = updates > 1 or in_reward or kl.target is not None or tokens.needs_proximal
    models = [
        held(
            "actor", config.actor, machine, read(config.actor.path), head="both" if config.critic.shared else "lm",
            mini_batches=config.actor.mini_batches, epochs=config.actor.epochs_per_batch,
            entropy=algorithm.entropy_coefficient > 0 or not proximal,
        )
    ]  # fmt: skip
    if needs_critic(config) and not config.critic.shared:
        engine = critic_engine_config(config.actor, config.critic)
        models.append(
            held(
                "critic", engine, machine, read(engine.path), head="scalar", key=backend_key(config, "critic"),
                mini_batches=config.critic.mini_batches or config.actor.mini_batches,
                epochs=config.critic.epochs_per_batch or config.actor.epochs_per_batch,
            )
        )  # fmt: skip
    if kl.coefficient > 0:
        models.append(_reference(config, machine, models[0], read))
    eta, samples = max_head_offpolicyness(config), config.gconfig.n_samples + needs_greedy_baseline(config)
    return Job(
        kind="train",
        models=tuple(models),
        lengths=lengths,
        groups=config.rollout.batch_size,
        generated=samples,
        trained=algorithm.update_samples or config.gconfig.n_samples,
        generator=_generator(config, models[0], machine, samples),
        asynchronous=config.async_training,
        proximal=proximal,
        kept_versions=0 if config.rollout.verify.every_steps is None else max(1, eta),
        verifies=config.rollout.verify.every_steps is not None,
        saves_beside=_saves_beside(config),
        workers=config.reward_workers or min(machine.threads, samples_together(config)),  # of one that computes
    )


def _saves_beside(config: BaseConfig) -> bool:
    wish = config.checkpoint
    return wish.every_steps is not None and wish.asynchronous and wish.resumable


def _generator(config: TrainConfig, actor: Held, machine: Machine, samples: int) -> Generator:
    rollout, shape = config.rollout, actor.shape
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
        adapter=_delivered_adapter(config, actor, kinds),
        foreign=" and ".join(foreign) if foreign else None,
    )


def _delivered_adapter(config: TrainConfig, actor: Held, kinds: set[str]) -> int:
    """Parameters of the adapter that goes to the engines alone: only our own take one, and not from a folder or a group."""
    alone = kinds <= {"embedded"} and not config.rollout.fleet.servers and config.rollout.weights.channel == "auto"
    return actor.adapters.parameters(actor.shape) if actor.adapters is not None and alone else 0


def _supervised(config: BaseConfig, machine: Machine, lengths: Lengths, read: Callable[[str], Shape]) -> Job:
    """Supervised fine-tuning, preferences, reward models."""
    scalar = isinstance(config, RewardModelConfig)
    models = [held("actor", config.actor, machine, read(config.actor.path), head="scalar" if scalar else "lm")]
    pairs = scalar and config.supervision == "pairs"  # type: ignore[attr-defined]
    baseline = False
    if isinstance(config, PreferenceConfig):
        loss = make_loss(config).function
        pairs, baseline = is_paired(loss), needs_baseline(loss)
        if needs_reference(loss):
            models.append(_reference(config, machine, models[0], read))
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
        saves_beside=_saves_beside(config),
    )
