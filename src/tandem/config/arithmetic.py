"""Quantities that follow from a configuration: staleness bound, placement, steps; and a summary of a run's sizes as text."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tandem.config.devices import machines
from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, CheckpointConfig, TrainConfig
from tandem.config.fleet import INSIDE, TENSOR, kinds_of, parse_backend
from tandem.config.recipes import sums_of
from tandem.config.rollout import PLACES, SERVER_PLACES, GenerationConfig, RolloutConfig
from tandem.config.terms import Term, read_term
from tandem.config.train_engine import parse_layout

Placement = Literal["colocate", "decoupled"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
MAX_NAME = 100


def max_head_offpolicyness(config: TrainConfig) -> int:
    """Returns η: a token is trained only if at most η newer versions of the weights exist than the one that generated it."""
    if not config.async_training:
        return 0
    bound = config.rollout.max_head_offpolicyness
    return 1 if bound is None else bound


def max_token_age(config: TrainConfig) -> int:
    """Returns the same bound as `max_head_offpolicyness`, but also for replayed tokens, which may be older."""
    eta, replay = max_head_offpolicyness(config), config.rollout.replay
    return max(eta, replay.max_age) if replay.groups else eta


def placement(config: TrainConfig) -> Placement:
    """Returns `placement`, or its default: `decoupled` with `async_training`, else `colocate`."""
    return config.placement or ("decoupled" if config.async_training else "colocate")


def servers_sleep(config: TrainConfig) -> bool:
    """True if servers on GPUs free their cache (sleep) while models train; see `rollout.fleet.sleep`."""
    rollout = config.rollout
    return rollout.fleet.sleep is not False and can_sleep(config) and rollout.backend not in INSIDE


def can_sleep(config: TrainConfig) -> bool:
    """True if all inference takes turns with training, and all engines or servers can free their memory."""
    rollout = config.rollout
    sleeps = rollout.backend in INSIDE or {part.partition(":")[0] for part in rollout.backend.split("+")} <= set(TENSOR)
    return placement(config) == "colocate" and sleeps and not rollout.fleet.servers and rollout.fleet.watch is None


def generating_ranks(config: TrainConfig) -> tuple[int, ...]:
    """Returns the ranks that have an inference engine.

    With the embedded engine in placement `colocate`: the first of each set of ranks that train on the same sequences. With
    servers that the run starts: the first rank of each machine that has a server. Otherwise, with a user's weight channel,
    and on Ray (the controller): rank 0.
    """
    layout, rollout = parse_layout(config.actor.backend), config.rollout
    servers = parse_backend(rollout.backend)
    if config.extend.weight_channel is not None or config.runner == "ray":
        return (0,)
    if servers:
        return machines().firsts[: max(kind.count for kind in servers)]
    if servers is not None or placement(config) != "colocate" or rollout.weights.channel != "auto":
        return (0,)
    return tuple(range(0, layout.ranks, layout.context * layout.tensor))


def rollout_here(config: TrainConfig) -> RolloutConfig:
    """Returns the `rollout` section with only the servers that this machine starts. Servers are distributed over the
    machines in turn; attached servers belong to the first machine. Example: with ``tandem:d3``, two machines start
    ``tandem:d2`` and ``tandem:d1``."""
    rollout, servers, machine = config.rollout, parse_backend(config.rollout.backend), machines()
    if not servers or machine.count == 1 or config.extend.weight_channel is not None:
        return rollout
    local = [replace(kind, count=len(range(machine.number, kind.count, machine.count))) for kind in servers]
    backend = "+".join(str(kind) for kind in local if kind.count) or "attached"
    fleet = replace(rollout.fleet, servers=(), watch=None) if machine.number else rollout.fleet
    return replace(rollout, backend=backend, fleet=fleet)


def trainer_ranks(config: BaseConfig) -> int:
    """Returns the number of processes that run the trainer's loop: one per rank; on Ray only the controller."""
    return 1 if getattr(config, "runner", "local") == "ray" else parse_layout(config.actor.backend).ranks


def samples_together(config: TrainConfig, *, here: bool = False) -> int:
    """Returns the number of samples that are generated and judged at once for a step, including those that
    `rollout.oversample` may abort. ``here``: only those of one rank that generates."""
    groups = math.ceil(config.rollout.batch_size * config.rollout.oversample)
    return math.ceil(groups / (len(generating_ranks(config)) if here else 1)) * config.gconfig.n_samples


def partner_of(config: TrainConfig) -> str | None:
    """Returns the path of the model that the workflow talks to; None if there is none, or it is a user's class.

    Raises:
        ConfigError: the path is missing.
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
    """Returns the workflow with all its knobs: those written with its name, and `workflow_args`.

    Raises:
        ConfigError: the workflow cannot be parsed, or a knob is given twice.
    """
    term = read_term(config.workflow, "workflow")
    for name in config.workflow_args:
        if name in term.knobs:
            raise ConfigError(f"workflow={config.workflow} and workflow_args.{name} both give {name}: leave one of them out")
    return replace(term, knobs={**term.knobs, **config.workflow_args})


def rewards_of(config: TrainConfig) -> tuple[str, ...]:
    """Returns the text of every reward that judges rows of the run, such as `math + 0.2*format`, without repeats. Those of
    the key `reward` come first."""
    sources = (*config.train_dataset.sources, *config.valid_dataset.sources)
    named = [config.reward, *(source.reward for source in sources if source.reward)]
    return tuple(dict.fromkeys(text for spec in named for text in sums_of(spec)))


def is_save_due(rules: CheckpointConfig, step: int, steps: int, leaving: bool = False) -> bool:
    """True if a checkpoint is due after ``step`` of ``steps``. ``leaving``: the run is interrupted after this step; a
    checkpoint is then due if the run saves any and can be resumed."""
    on_leaving = leaving and rules.resumable and (rules.every_steps is not None or rules.at_end)
    return bool(rules.every_steps and step % rules.every_steps == 0) or (step == steps and rules.at_end) or on_leaving


def stalled_after_s(config: BaseConfig) -> float | None:
    """Returns the larger of `recover.stalled_after_s` and a minute more than an episode or a batch may take; None: off."""
    limit, rollout = config.recover.stalled_after_s, getattr(config, "rollout", None)
    if limit is None or rollout is None:
        return limit
    return max(limit, rollout.episode_timeout_s + 60.0, rollout.wait_timeout_s + 60.0)


def total_steps(config: BaseConfig, num_rows: int) -> int:
    """Returns the number of training steps, by `total_train_steps` or `total_train_epochs`; the smaller if both are set."""
    if config.total_train_epochs is None and config.total_train_steps is not None:
        return config.total_train_steps
    by_epochs = _steps_of_epochs(config, num_rows)
    return by_epochs if config.total_train_steps is None else min(by_epochs, config.total_train_steps)


def first_limit(config: BaseConfig, num_rows: int) -> str:
    """Returns a text that says which of `total_train_steps` and `total_train_epochs` ends the run; empty unless both are
    set."""
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
    """Returns the sizes of a run as text: prompts × samples, mini-batches, micro-batches, optimizer steps, steps, epochs.
    ``num_rows``: rows in one epoch."""
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
    """Returns words for the place of generation: the placement of the embedded engine, or the servers."""
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
    """Returns `evaluate.every_steps`; None if another process evaluates (`evaluate.where=job`)."""
    return config.evaluate.every_steps if config.evaluate.where == "run" else None


def is_evaluation_due(every_steps: int | None, step: int, steps: int) -> bool:
    """True if an evaluation is due after ``step``: before step 1 (0), every ``every_steps``, and after the last of
    ``steps``.
    """
    return every_steps is not None and (step % every_steps == 0 or step == steps)


def evaluation_gconfig(config: TrainConfig) -> GenerationConfig:
    """Returns the run's sampling parameters with the number of samples, temperature and length of its evaluation."""
    evaluation = config.evaluate
    temperature = evaluation.temperature
    greedy = evaluation.n_samples == 1 if temperature is None else temperature == 0
    return replace(
        config.gconfig,
        n_samples=evaluation.n_samples,
        greedy=greedy,
        temperature=temperature or config.gconfig.temperature,
        first_token_temperature=None,
        max_new_tokens=evaluation.max_new_tokens or config.gconfig.max_new_tokens,
    )


def evaluation_places(config: TrainConfig) -> int:
    """Returns the most samples of an evaluation in progress at once: the number of sequences that the engine decodes
    together, or half of it if rollouts continue meanwhile (`decoupled`)."""
    tandem_engines = kinds_of(config.rollout.backend, config.rollout.fleet) & {"embedded", "tandem"}
    most = config.rollout.engine.max_running or (PLACES if tandem_engines else SERVER_PLACES)
    return max(1, most // 2) if placement(config) == "decoupled" else most


def check_name(key: str, name: str) -> str:
    """Returns the name if it is valid as the name of a single folder.

    Raises:
        ConfigError: it is not; the message gives the key, the value and the rule.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ConfigError(
            f"{key} must be the name of one folder: letters, digits, '.', '_' and '-', not starting with '.' or '-', "
            f"at most {MAX_NAME} characters; got {name!r}"
        )
    return name


def run_path(root: str | Path, experiment: str, trial: str) -> Path:
    """Returns the path `<root>/<experiment>/<trial>` after checking the names."""
    parts = check_name("experiment_name", experiment), check_name("trial_name", trial)
    try:
        return Path(root).expanduser().joinpath(*parts)
    except RuntimeError as error:
        raise ConfigError(f"run.root={root} begins with the home folder of an unknown user: {error}") from error


def folder_of(config: BaseConfig) -> Path:
    """Returns the path of a configuration's run folder. Raises as `run_path`."""
    return run_path(config.run.root, config.experiment_name, config.trial_name)
