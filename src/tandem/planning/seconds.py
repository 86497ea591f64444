"""Time of a step, by phase: matrix products at their measured rate, attention, passes over memory, and operations.

A phase's seconds are the sum of those parts, because eager torch does one after the other. Nothing here looks at a machine:
its rates come from `calibrate` or from the table of `devices`.
"""

from tandem.models.shape import BYTES
from tandem.planning import exchange
from tandem.planning.activations import ActivationSettings
from tandem.planning.batches import Step
from tandem.planning.cost import BETWEEN, HOST, MEMORY, RANKS, Cost, Phase, total
from tandem.planning.exchange import Moved
from tandem.planning.generating import decode, prefill, publishing
from tandem.planning.job import Job
from tandem.planning.layers import head, layers_backward, layers_forward
from tandem.planning.machine import Machine
from tandem.planning.memory import Batches, batches_of
from tandem.planning.planned_model import PlannedModel

SCORES = ("reference", "values", "proximal", "baseline", "teacher")
"""Passes without gradients, whose times are fitted together."""

SWITCH = "switch to "
"""Begin of the name of what is moved before a stage."""

SWITCH_FACTOR = 2.2
"""Measured over computed time of waking and putting to sleep on a CPU: judges build their engine, and what stages have freed
is given back besides. From two runs of benchmarks/switching.py, which had 1.9 and 2.8."""

STEP_BYTES = 28 + 28 + 8
"""Read and written for each parameter in one optimizer step: AdamW, the norm of the gradients, the clipping."""

ACCUMULATE_BYTES = 12
"""For each parameter and micro-batch after the first: the gradient is added to the sum."""

ZERO_BYTES = 24
"""Read and written besides by DeepSpeed for each parameter of a rank's part: its gradients move into a bucket, out of it and
into one flat tensor, and what was stepped is copied back. Counted in its code, not measured."""


def scoring(model: PlannedModel, step: Step, machine: Machine) -> Cost:
    """A pass without gradients over all micro-batches."""
    costs, shape, spread = [], model.piece, ActivationSettings.of(model)
    for batch in step.micro_batches:
        costs.append(layers_forward(shape, batch, model.dtype, machine, spread))
        if model.head != "scalar":
            costs.append(head(shape, batch, model.dtype, machine, backward=False, entropy=False, context=spread.context))
        costs.append(_talk(exchange.of_micro_batch(model, batch, machine, backward=False), machine))
    return _bounded(total(costs), machine) * step.times


def updating(model: PlannedModel, step: Step, machine: Machine, *, recompute: float | None = None) -> Cost:
    """One optimizer step: forward and backward passes, and AdamW."""
    costs, shape, spread = [], model.piece, ActivationSettings.of(model)
    options = {"entropy": model.entropy, "context": spread.context, "frozen": model.adapters is not None}
    for batch in step.micro_batches:
        costs.append(layers_forward(shape, batch, model.dtype, machine, spread))
        costs.append(layers_backward(shape, batch, model.dtype, machine, spread, recompute=recompute))
        if model.head != "scalar":
            costs += [
                head(shape, batch, model.dtype, machine, backward=backward, **options)  # type: ignore[arg-type]
                for backward in (False, True)
            ]
        costs.append(_talk(exchange.of_micro_batch(model, batch, machine, backward=True), machine))
    passes = total(costs) * step.times
    passes = _bounded(total([passes, _talk(exchange.of_step(model), machine)]), machine)
    return total([passes, optimizer(model, machine, max(1.0, step.count))])


def optimizer(model: PlannedModel, machine: Machine, micro_batches: float) -> Cost:
    """Sums of gradients, their norm, AdamW, and the rounded copy of the weights."""
    count, parts = model.masters, model.parts
    summed = parts if model.sync_each or model.layout.zero in (2, 3) else 1
    accumulated = ACCUMULATE_BYTES * (micro_batches - 1) / summed
    own = STEP_BYTES / parts
    if model.layout.zero is not None:
        own += ZERO_BYTES / parts + BYTES[model.dtype]
    elif not model.fsdp and model.dtype != "float32":
        own += 6 + 6 * micro_batches  # the copy, and the gradients that are widened
    if not model.offload:
        return Cost(((MEMORY, count * (own + accumulated) / machine.stream),))
    return Cost(((HOST, count * (own + accumulated) / machine.host_stream),))


def _talk(moved: Moved, machine: Machine) -> Cost:
    """Seconds of what ranks, and the host, exchange; nothing where there is nothing."""
    parts = ((RANKS, moved.beside / machine.link), (BETWEEN, moved.between / machine.link))
    parts += ((HOST, moved.host / machine.host_link),)
    return Cost(tuple((name, seconds) for name, seconds in parts if seconds))


def _bounded(cost: Cost, machine: Machine) -> Cost:
    """Seconds with overlapping communication, of which only the part counts that the computation does not cover."""
    parts = dict(cost.parts)
    if machine.overlaps and RANKS in parts:
        rest = sum(seconds for name, seconds in parts.items() if name not in (RANKS, BETWEEN, HOST))
        parts[RANKS] = max(0.0, parts[RANKS] - rest)
    return Cost(tuple(parts.items()))


def phases(job: Job, machine: Machine) -> tuple[Phase, ...]:
    """The phases of one step at the expected lengths, in order."""
    expected = batches_of(job, job.lengths.completion)
    at_once = machine.kind == "cpu" and job.asynchronous
    training = machine.using((0.5 if at_once else 1.0) / (job.actor.ranks if machine.kind == "cpu" else 1))
    generating = machine.using(0.5 if at_once else 1.0)
    found = [_fitted(phase, generating) for phase in _generating(job, generating)]
    found += [_fitted(phase, training, whole=job.generator is None) for phase in _training(job, expected, training)]
    found += _judging(job, machine)
    generator = job.generator
    if generator is not None and generator.foreign is None:
        found.append(_fitted(Phase("publish", publishing(job, generator, machine)), machine))
    if job.awake and job.sleeping is not None:
        for done in job.sleeping.steady():
            if done.stage.each_step and done.total:
                found.append(Phase(f"{SWITCH}{done.stage.name}", _switching(done.total, machine)))
    return tuple(found)


def _switching(moved: float, machine: Machine) -> Cost:
    """Waking and putting to sleep: on a CPU at the measured rate; on a GPU it goes to host memory or comes from there."""
    if machine.kind == "cpu":
        return Cost(((MEMORY, SWITCH_FACTOR * moved / machine.waking),))
    return Cost(((HOST, moved / machine.host_link),))


def _generating(job: Job, machine: Machine) -> list[Phase]:
    generator = job.generator
    if generator is None or generator.foreign is not None:
        return []
    if machine.kind == "cpu" and generator.engines > 1:
        machine = machine.using(1 / generator.engines)
    share = generator.on_device(machine) if machine.kind == "gpu" else 1
    begin, prompt_tokens = prefill(job, generator, machine)
    draw, tokens = decode(job, generator, machine)
    return [
        Phase("prefill", begin * share, prompt_tokens * generator.engines),
        Phase("decode", draw * share, tokens * generator.engines),
    ]


def _judging(job: Job, machine: Machine) -> list[Phase]:
    """Judges that write, at their longest answers and without what requests share of their prompts."""
    found, factors = [], machine.factors
    partners = [("partner", role) for role, writer in job.writers.items() if writer.in_episodes]
    for name, role in [*partners, *job.passes]:
        if role in job.writers:
            judging, engine = job.judging(job.writers[role]), job.writers[role].engine
            begin, _ = prefill(judging, engine, machine)
            draw, tokens = decode(judging, engine, machine)
            found.append(
                Phase(name, total([begin * factors.get("prefill", 1.0), draw * factors.get("decode", 1.0)]), tokens)
            )
    return found


def _training(job: Job, batches: Batches, machine: Machine) -> list[Phase]:
    found = []
    models = {model.role: model for model in job.models}
    for name, role in job.passes:
        if role in job.writers:
            continue
        model, step = models[role], batches.score[role]
        found.append(Phase(name, scoring(model, step, machine), step.tokens * model.layout.batches))
    for model in job.models:
        if model.trained:
            step = batches.update[model.role]
            times = model.mini_batches * model.epochs
            cost = updating(model, step, machine) * times
            found.append(Phase(f"update: {model.role}", cost, step.tokens * model.layout.batches * times))
    return found


def _fitted(phase: Phase, machine: Machine, *, whole: bool = False) -> Phase:
    """``whole``: its rows are data's, each by itself; generated ones share their prompts, and a process with an engine."""
    family = "update" if phase.name.startswith("update") else phase.name
    family = "score" if family in SCORES or family.startswith("score: ") else family
    family = f"{family} of rows" if whole else family
    return Phase(phase.name, phase.cost * machine.factors.get(family, 1.0), phase.tokens)
