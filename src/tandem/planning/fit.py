"""Checks before the start whether the models of a run fit into the memory of this machine.

Only the impossible is refused: weights, moments, gradients and servers' shares that exceed the device. Estimates beside them
(activations, caches, fragmentation) lead to a warning.
"""

import bisect
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tandem.config.errors import ConfigError
from tandem.config.experiment import BaseConfig, TrainConfig
from tandem.config.train_engine import CHUNK_TOKENS, MICRO_BATCH_TOKENS, TrainEngineConfig
from tandem.models.footprint import FLOAT32
from tandem.models.shape import Shape, read_shape
from tandem.planning.job import Job, Lengths, job_of
from tandem.planning.machine import Machine, gpus
from tandem.planning.memory import GIB
from tandem.planning.plan import Plan, make_plan

log = logging.getLogger(__name__)

LOGITS_SHARE = 32
"""A chunk of logits may take 1/32 of a GPU in float32. Larger chunks add to the head's gradient less often."""

MICRO_BATCHES = (40960, 32768, 24576, 16384, 12288, 8192, MICRO_BATCH_TOKENS)
"""Micro-batch sizes in tokens that `fitting` tries, largest first."""

PROMPT_TOKENS = 256
"""Tokens of a prompt that the warning assumes; `tandem plan` reads the data instead."""


def memory_here(device: str) -> Machine:
    """The GPUs of this run with their memory. ``device``: one of them, as `choose_device` returns it."""
    machines = int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return gpus(
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_properties(device).total_memory / GIB,
        torch.cuda.device_count() * max(1, machines),
    )


def check_fit(config: BaseConfig, machine: Machine, read: Callable[[str], Shape] = read_shape) -> Plan:
    """Checks that the models and engines of a run fit into the GPUs, and returns the plan. Warns if it expects the fit to be
    tight. ``machine``: GPUs that need not be here.

    Raises:
        ConfigError: a GPU is too small; the message has the figures and a remedy.
    """
    plan = make_plan(_job(config, machine, read), machine)
    worst = max(range(plan.devices), key=plan.certain_gib)
    certain, there = plan.certain_gib(worst), machine.memory_gib
    if certain > there:
        raise ConfigError(
            f"this run does not fit: GPU {worst} has {there:.2f} GiB ({machine.name}), and {certain:.2f} GiB are needed for "
            f"{holders(plan, worst)}, before any activations. {_remedy(plan, config)}"
        )
    peak = plan.fullest
    if plan.peak_on(peak) > there:
        log.warning(
            "GPU %d has %.2f GiB, and the plan of this run comes to %.2f GiB with activations and cache for prompts of %d "
            "tokens: it may run out of memory. `tandem plan` says when, and what to change",
            peak, there, plan.peak_on(peak), PROMPT_TOKENS,
        )  # fmt: skip
    return plan


def _job(config: BaseConfig, machine: Machine, read: Callable[[str], Shape]) -> Job:
    """The job of a run before its data is read."""
    written = getattr(config, "gconfig", None)
    longest = written.max_new_tokens if written is not None else max(1, config.max_length - PROMPT_TOKENS)  # type: ignore[attr-defined]
    return job_of(config, machine, Lengths(PROMPT_TOKENS, longest), read)


def fitting(config: BaseConfig, machine: Machine, read: Callable[[str], Shape] = read_shape) -> TrainEngineConfig:
    """The actor's configuration with open settings chosen for these GPUs: how often gradients are summed over ranks, chunks
    of logits, and the largest micro-batches that fit.

    The choice follows from the configuration and the size of the GPU, not from the memory that happens to be free. So every
    rank, `tandem plan` and a resumed run choose the same and cut batches alike.
    """
    actor, settings = config.actor, dict[str, Any]()
    if machine.kind == "cpu":
        return actor
    read = functools.cache(read)

    def planned(tokens: int) -> Plan:
        changed = replace(actor, **settings | {"max_tokens_per_micro_batch": tokens})
        job = _job(replace(config, actor=changed), machine, read)
        # Two full micro-batches on each rank: nobody knows how long the prompts are, and gradients lie between the two.
        each = 2 * -(-tokens // (job.lengths.prompt + job.trained * job.lengths.longest))
        full = each * max(model.ranks * model.mini_batches for model in job.models)
        return make_plan(replace(job, groups=max(job.groups, full)), machine)

    def fits(tokens: int) -> bool:
        return tokens == MICRO_BATCH_TOKENS or planned(tokens).fits

    if actor.gradient_sync is None:
        plan = planned(actor.micro_batch_tokens)
        model = plan.job.actor
        if model.fsdp and model.parts > 1 and not model.sync_each and not plan.fits:
            settings["gradient_sync"] = "micro_batch"

    if actor.logprob_chunk_tokens is None:
        model = planned(actor.micro_batch_tokens).job.actor
        rows = int(machine.memory_gib * GIB) // (LOGITS_SHARE * FLOAT32 * model.piece.vocab)
        settings["logprob_chunk_tokens"] = max(CHUNK_TOKENS, rows)
        if not planned(actor.micro_batch_tokens).fits:
            settings["logprob_chunk_tokens"] = CHUNK_TOKENS

    if actor.max_tokens_per_micro_batch is None:  # smaller ones need less
        settings["max_tokens_per_micro_batch"] = MICRO_BATCHES[bisect.bisect_left(MICRO_BATCHES, True, key=fits)]
    return replace(actor, **settings)


def holders(plan: Plan, device: int) -> str:
    """The holders of a device's memory at the worst instant, largest first, with certain bytes only."""
    instant = max(plan.instants, key=lambda one: plan.certain_at(one, device))
    held: dict[str, float] = {}
    for item in plan.certain_items(instant, device):
        held[item.role] = held.get(item.role, 0.0) + item.num_bytes / GIB
    rows = sorted(held.items(), key=lambda row: -row[1])
    return " + ".join(f"{role} {gib:.2f}" for role, gib in rows if gib >= 0.005) + f" while {instant.phase}"


def _remedy(plan: Plan, config: BaseConfig) -> str:
    """One sentence that says what would make the run fit, or what is largest."""
    generator = plan.job.generator
    shares = generator is not None and generator.foreign is not None and any(0 in seat.devices for seat in generator.seats)
    if not shares or not isinstance(config, TrainConfig) or config.memory_limit_gib is not None:
        return plan.advice
    if config.rollout.fleet.sleep is False:
        return "With rollout.fleet.sleep=true the server gives its memory back while training needs it"
    return (
        f"With memory_limit_gib={int(plan.usable_gib)} models and server give memory back in turns; a smaller "
        "rollout.fleet.memory_share is another way"
    )
