"""Quantities that follow from a configuration: staleness bound, placement, steps, and the arithmetic of a run in words."""

import math
from dataclasses import replace
from typing import Literal

from tandem.config.backend import parse_layout
from tandem.config.engine_memory import PLACES, SERVER_PLACES
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.fleet import INSIDE, TENSOR, kinds_of, parse_backend
from tandem.config.generation import GenerationConfig
from tandem.config.machines import machines
from tandem.config.recipes import sums_of
from tandem.config.rollout import RolloutConfig
from tandem.config.terms import Term, read_term

Placement = Literal["colocate", "decoupled"]


def max_head_offpolicyness(config: TrainConfig) -> int:
    """η: the most versions that a trained token may be behind the trainer."""
    if not config.async_training:
        return 0
    wished = config.rollout.max_head_offpolicyness
    return 1 if wished is None else wished


def max_token_age(config: TrainConfig) -> int:
    """The most versions that any trained token may be behind the trainer, replayed ones included."""
    eta, replay = max_head_offpolicyness(config), config.rollout.replay
    return max(eta, replay.max_age) if replay.groups else eta


def placement(config: TrainConfig) -> Placement:
    """`colocate` or `decoupled`; follows `async_training` unless it was set."""
    return config.placement or ("decoupled" if config.async_training else "colocate")


def servers_sleep(config: TrainConfig) -> bool:
    """True if the cache of servers sleeps while models train, on GPUs; see `rollout.fleet.sleep`."""
    rollout = config.rollout
    return rollout.fleet.sleep is not False and can_sleep(config) and rollout.backend not in INSIDE


def can_sleep(config: TrainConfig) -> bool:
    """True if all inference takes turns with training, in engines or servers that can give memory back."""
    rollout = config.rollout
    sleeps = rollout.backend in INSIDE or {part.partition(":")[0] for part in rollout.backend.split("+")} <= set(TENSOR)
    return placement(config) == "colocate" and sleeps and not rollout.fleet.servers and rollout.fleet.watch is None


def generating_ranks(config: TrainConfig) -> tuple[int, ...]:
    """The ranks that have an inference engine. Where an embedded engine takes turns with training: the first of each set of
    ranks that train on the same sequences. Where the run starts servers: the first of each machine that has some. Else, and
    with a weight channel of the user's, rank 0; on Ray the controller has it."""
    layout, rollout = parse_layout(config.actor.backend), config.rollout
    servers = parse_backend(rollout.backend)
    if config.extend.weight_channel is not None or config.runner == "ray":
        return (0,)
    if servers:
        return machines().firsts[: max(one.count for one in servers)]
    if servers is not None or placement(config) != "colocate" or rollout.weights.channel != "auto":
        return (0,)
    return tuple(range(0, layout.ranks, layout.context * layout.tensor))


def rollout_here(config: TrainConfig) -> RolloutConfig:
    """The configuration's, with those servers alone that this machine starts: they are dealt to the machines in turn, and
    attached ones are the first machine's. Example: of ``tandem:d3`` two machines start ``tandem:d2`` and ``tandem:d1``."""
    rollout, servers, here = config.rollout, parse_backend(config.rollout.backend), machines()
    if not servers or here.count == 1 or config.extend.weight_channel is not None:
        return rollout
    own = [replace(one, count=len(range(here.number, one.count, here.count))) for one in servers]
    backend = "+".join(str(one) for one in own if one.count) or "attached"
    fleet = replace(rollout.fleet, servers=(), watch=None) if here.number else rollout.fleet
    return replace(rollout, backend=backend, fleet=fleet)


def trainer_ranks(config: BaseConfig) -> int:
    """Processes that run the trainer's loop: one a rank, or the controller of workers on Ray."""
    return 1 if getattr(config, "runner", "local") == "ray" else parse_layout(config.actor.backend).ranks


def samples_together(config: TrainConfig, *, here: bool = False) -> int:
    """Samples that are generated and judged for one step, those included that `rollout.oversample` may abort. ``here``: on
    one of the ranks that generate."""
    groups = math.ceil(config.rollout.batch_size * config.rollout.oversample)
    return math.ceil(groups / (len(generating_ranks(config)) if here else 1)) * config.gconfig.n_samples


def partner_of(config: TrainConfig) -> str | None:
    """The path of the model that the workflow talks to; None if there is none, or it is of a user's class.

    Raises:
        ConfigError: its path is missing.
    """
    if config.partner is None:
        return None
    term = read_term(config.partner, "partner")
    if term.is_file or term.registered != "model":
        return None
    if not isinstance(term.arguments.get("path"), str):
        raise ConfigError(f"partner={config.partner} needs the folder of a model: partner=model(path=FOLDER)")
    return str(term.arguments["path"])


def workflow_of(config: TrainConfig) -> Term:
    """The workflow with all its knobs: those in its own spelling, and `workflow_args`.

    Raises:
        ConfigError: it cannot be read, or a knob is given twice.
    """
    term = read_term(config.workflow, "workflow")
    for name in config.workflow_args:
        if name in term.knobs:
            raise ConfigError(f"workflow={config.workflow} and workflow_args.{name} both give {name}: leave one of them out")
    return replace(term, knobs={**term.knobs, **config.workflow_args})


def rewards_of(config: TrainConfig) -> tuple[str, ...]:
    """The sums that judge rows of the run, those of `reward` first, without repeats."""
    sources = (*config.train_dataset.sources, *config.valid_dataset.sources)
    named = [config.reward, *(source.reward for source in sources if source.reward)]
    return tuple(dict.fromkeys(one for spec in named for one in sums_of(spec)))


def is_save_due(config: BaseConfig, step: int, steps: int, leaving: bool = False) -> bool:
    """True if `checkpoint` asks for a save after this step, of ``steps``. ``leaving``: the run is interrupted after it, and
    saved if it saves at all and can go on from there."""
    wish = config.checkpoint
    on_leaving = leaving and wish.resumable and (wish.every_steps is not None or wish.at_end)
    return bool(wish.every_steps and step % wish.every_steps == 0) or (step == steps and wish.at_end) or on_leaving


def stalled_after_s(config: BaseConfig) -> float | None:
    """`recover.stalled_after_s`, or a minute more than an episode or a batch may take, where that is longer."""
    limit, rollout = config.recover.stalled_after_s, getattr(config, "rollout", None)
    if limit is None or rollout is None:
        return limit
    return max(limit, rollout.episode_timeout_s + 60.0, rollout.wait_timeout_s + 60.0)


def total_steps(config: BaseConfig, num_rows: int) -> int:
    """Training steps of the run: `total_train_steps`, or those of `total_train_epochs`; the smaller where both are set."""
    if config.total_train_epochs is None and config.total_train_steps is not None:
        return config.total_train_steps
    by_epochs = _steps_of_epochs(config, num_rows)
    return by_epochs if config.total_train_steps is None else min(by_epochs, config.total_train_steps)


def first_limit(config: BaseConfig, num_rows: int) -> str:
    """Says whether `total_train_steps` or `total_train_epochs` ends the run; empty if only one of them is set."""
    steps, epochs = config.total_train_steps, config.total_train_epochs
    if steps is None or epochs is None:
        return ""
    by_epochs = _steps_of_epochs(config, num_rows)
    first, other = f"total_train_steps={steps}", f"total_train_epochs={epochs} ({_many(by_epochs, 'step')})"
    if by_epochs < steps:
        first, other = other, first
    return f"{first} ends the run, before {other}" if by_epochs != steps else f"{first} and {other} are the same"


def _steps_of_epochs(config: BaseConfig, num_rows: int) -> int:
    return math.ceil((config.total_train_epochs or 1) * num_rows / _batch_size(config))


def _batch_size(config: BaseConfig) -> int:
    return config.rollout.batch_size if isinstance(config, TrainConfig) else getattr(config, "batch_size", 1)


def arithmetic(config: BaseConfig, num_rows: int) -> str:
    """Prompts × samples, mini-batches, micro-batches, optimizer steps, steps, epochs. ``num_rows``: rows in one epoch."""
    steps = total_steps(config, num_rows)
    lines = _step(config) if isinstance(config, TrainConfig) else _supervised(config)
    batch_size, limit = _batch_size(config), first_limit(config, num_rows)
    per_epoch = num_rows / batch_size
    lines += [
        f"Epoch: {num_rows} rows ÷ {batch_size} = {per_epoch:g} steps." if per_epoch == int(per_epoch)
        else f"Epoch: {num_rows} rows ÷ {batch_size} = {per_epoch:.2f} steps; a step may span two epochs.",
        f"Run: {_many(steps, 'step')}, {steps * batch_size} rows, {steps * batch_size / max(1, num_rows):.2f} epochs"
        + (f"; {limit}." if limit else "."),
    ]  # fmt: skip
    return "\n".join(lines)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}{'es' if what.endswith('ch') else 's'}"


def _micro_batches(tokens: int, budget: int) -> str:
    return _many(max(1, math.ceil(tokens / budget)), "micro-batch")


def _step(config: TrainConfig) -> list[str]:
    prompts, samples, actor = config.rollout.batch_size, config.gconfig.n_samples, config.actor
    updates = actor.mini_batches * actor.epochs_per_batch
    groups = math.ceil(prompts / actor.mini_batches)
    most = "" if prompts % actor.mini_batches == 0 else "at most "
    budget = actor.micro_batch_tokens
    trained = config.algorithm.update_samples or samples
    completion_tokens = groups * trained * config.gconfig.max_new_tokens
    eta = max_head_offpolicyness(config)
    how = f"asynchronous, at most {_many(eta, 'version')} behind" if config.async_training else "synchronous"
    return [
        f"Step: {prompts} prompts × {samples} samples = {prompts * samples} sequences of at most "
        f"{config.gconfig.max_new_tokens} new tokens.",
        f"Update: {_many(actor.mini_batches, 'mini-batch')} of {most}{groups} × {trained} = {groups * trained} sequences, "
        f"{actor.epochs_per_batch} pass{'' if actor.epochs_per_batch == 1 else 'es'} = {_many(updates, 'optimizer step')}.",
        f"Micro-batches: at most {budget} tokens each; a mini-batch has at most {completion_tokens} completion tokens, "
        f"so about {_micro_batches(completion_tokens, budget)} when all answers are that long, plus what the prompts take.",
        f"Generation: {how}, {_where(config)}.",
    ]


def _where(config: TrainConfig) -> str:
    """Names where samples come from: the placement of the one embedded engine, or servers, which are other processes."""
    backend = config.rollout.backend
    return placement(config) if backend in INSIDE else f"on servers (rollout.backend={backend})"


def _supervised(config: BaseConfig) -> list[str]:
    batch_size, longest = getattr(config, "batch_size", 1), getattr(config, "max_length", 1)
    budget, tokens = config.actor.micro_batch_tokens, batch_size * longest
    return [
        f"Step: {_many(batch_size, 'row')} of at most {longest} tokens = 1 optimizer step.",
        f"Micro-batches: at most {budget} tokens each, so at most about {_micro_batches(tokens, budget)}.",
    ]


def evaluates_every(config: BaseConfig) -> int | None:
    """`evaluate.every_steps`; None also where another process evaluates (`evaluate.where=job`)."""
    return config.evaluate.every_steps if config.evaluate.where == "run" else None


def is_evaluation_due(every_steps: int | None, step: int, steps: int) -> bool:
    """True if an evaluation follows ``step``: every `evaluate.every_steps`, before step 1 (0), and after the last."""
    return every_steps is not None and (step % every_steps == 0 or step == steps)


def evaluation_gconfig(config: TrainConfig) -> GenerationConfig:
    """The run's sampling with the number of samples, temperature and length of its evaluation."""
    wanted = config.evaluate
    temperature = wanted.temperature
    greedy = wanted.n_samples == 1 if temperature is None else temperature == 0
    return replace(
        config.gconfig,
        n_samples=wanted.n_samples,
        greedy=greedy,
        temperature=temperature or config.gconfig.temperature,
        first_token_temperature=None,
        train_first_token=False,
        max_new_tokens=wanted.max_new_tokens or config.gconfig.max_new_tokens,
    )


def evaluation_places(config: TrainConfig) -> int:
    """Most samples of an evaluation under way at once: what the engine decodes together, half of it where rollouts go on."""
    own = kinds_of(config.rollout.backend, config.rollout.fleet) & {"embedded", "tandem"}
    most = config.rollout.engine.max_running or (PLACES if own else SERVER_PLACES)
    return max(1, most // 2) if placement(config) == "decoupled" else most
