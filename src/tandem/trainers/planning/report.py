"""The plan as text and as plain data. Every figure has its unit, in the text beside it and in the data in its key."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.trainers.planning.memory import GIB, Instant
from tandem.trainers.planning.plan import RESERVE, Plan
from tandem.trainers.planning.remedy import Change

SMALL_GIB = 0.005
"""What rounds to nothing is left out of the tables."""


@dataclass(frozen=True)
class Report:
    """A plan with all that is said beside it."""

    title: str
    plan: Plan
    lengths: str
    arithmetic: str
    change: Change | None
    advice: str = ""
    """What to do where no change of the configuration helps."""

    def text(self) -> str:
        """For people."""
        plan = self.plan
        each = " each" if plan.machine.count > 1 else ""
        blocks = [
            [f"{self.title} on {plan.machine.name}, {plan.machine.memory_gib:.1f} GiB{each}", *_model(self)],
            [*_memory(plan)],
            [*_verdict(self)],
            [*_time(plan)],
            [*_disk(plan)],
            [self.arithmetic],
            ["Assumed:", *(f"  - {line}" for line in assumptions(self))],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def data(self) -> dict[str, Any]:
        """For programs; keys end in their unit."""
        plan = self.plan
        return {
            "machine": plan.machine.name,
            "sources": list(plan.machine.sources),
            "parameters": plan.job.actor.shape.parameters(plan.job.actor.head),
            "fits": plan.fits,
            "problems": list(plan.problems),
            "change": None
            if self.change is None
            else {"settings": self.change.settings, "peak_gib": round(self.change.plan.peak_gib, 4)},
            "memory": {
                "available_gib": round(plan.machine.memory_gib, 4),
                "peak_gib": round(plan.peak_gib, 4),
                "host_gib": round(plan.host_gib, 4),
                "worst": plan.worst.phase,
                "phases": {instant.phase: _items(instant) for instant in plan.instants},
            },
            "time": {
                "step_s": round(plan.step_s, 4),
                "generate_s": round(plan.generate_s, 4),
                "train_s": round(plan.train_s, 4),
                "publish_s": round(plan.publish_s, 4),
                "completion_tokens_per_s": round(plan.completion_tokens / max(plan.step_s, 1e-9), 2),
                "bottleneck": plan.bottleneck.name,
                "bound": plan.bottleneck.cost.bound,
                "phases": {
                    phase.name: {
                        "time_s": round(phase.seconds, 4),
                        "tokens": round(phase.tokens),
                        "spent_s": {name: round(seconds, 4) for name, seconds in phase.cost.parts},
                    }
                    for phase in plan.phases
                },
            },
            "disk": {"checkpoint_gib": round(plan.checkpoint_gib, 4), "kept_gib": _kept_gib(plan)},
            "lengths": {
                "prompt_tokens": plan.job.lengths.prompt,
                "completion_tokens": plan.job.lengths.completion,
                "longest_tokens": plan.job.lengths.longest,
            },
            "assumptions": list(assumptions(self)),
        }


def _items(instant: Instant) -> dict[str, float]:
    rows = {f"{i.role}: {i.what}{' (host)' if i.place == 'host' else ''}_gib": i.num_bytes / GIB for i in instant.items}
    return {name: round(gib, 4) for name, gib in rows.items()} | {"total_gib": round(instant.total() / GIB, 4)}


def _model(report: Report) -> Iterator[str]:
    for model in report.plan.job.models:
        shape = model.shape
        kind = "trained" if model.trained else "frozen"
        yield (
            f"{model.role}: {shape.parameters(model.head) / 1e6:,.1f} M parameters ({shape.kind}, {shape.layers} layers of "
            f"width {shape.hidden}, {shape.vocab} tokens of vocabulary), {kind}, {model.dtype}, {_ranks(model.ranks)}"
        )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


SAVED = ("weights to write", "copy that is saved")
COLUMNS = {
    "weights": ("parameters", "parameters, rounded", "gathered parameters", "shared weights", "kept versions"),
    "optimizer": ("optimizer",),
    "gradients": ("gradients", "gradient of the head", "gradient of the embedding", "norm of the gradients"),
    "activations": ("activations",),
    "logits": ("logits",),
    "KV cache": ("KV cache",),
    "staged": (
        "staged weights",
        "rounded weights",
        "one whole tensor",
        "weights before",
        "weights to write",
        "copy that is saved",
    ),
}
"""Heading → what is added up under it; the rest is under `other`."""


def _memory(plan: Plan) -> Iterator[str]:
    """A table by phase and kind, and who holds what at the worst instant."""
    heads = [*COLUMNS, "other", "total"]
    yield "Memory in GiB, by phase (* the worst instant)"
    yield f"  {'':<20}" + "".join(f"{head:>13}" for head in heads)
    for instant in plan.instants:
        found = dict.fromkeys(heads, 0.0)
        for item in instant.items:
            if item.place == "device":
                found[next((head for head, kinds in COLUMNS.items() if item.what in kinds), "other")] += item.num_bytes / GIB
        found["total"] = instant.total() / GIB
        cells = "".join(("" if gib < SMALL_GIB else f"{gib:.2f}").rjust(13) for gib in found.values())
        yield f"{'*' if instant is plan.worst else ' '} {instant.phase:<20}{cells}"
    yield f"At the worst instant, {plan.worst.phase}:"
    for item in sorted(plan.worst.items, key=lambda item: -item.num_bytes):
        if item.place == "device" and item.num_bytes >= SMALL_GIB * GIB:
            yield f"  {f'{item.role}: {item.what}':<42}{item.num_bytes / GIB:>8.2f} GiB"


def _verdict(report: Report) -> Iterator[str]:
    plan = report.plan
    if plan.fits:
        free = plan.machine.memory_gib - plan.peak_gib
        yield (
            f"It fits: {plan.peak_gib:.2f} GiB at the worst instant ({plan.worst.phase}), {free:.2f} GiB of "
            f"{plan.machine.memory_gib:.2f} GiB stay free."
        )
    else:
        yield f"It does not fit: {'; '.join(plan.problems)}."
        if report.change is not None:
            changed = report.change.plan
            yield (
                f"Nearest change that fits: {report.change.arguments()} ({changed.peak_gib:.2f} GiB, a step of "
                f"{changed.step_s:.3g} s)"
            )
        if report.advice:
            yield report.advice
    if plan.host_gib >= SMALL_GIB:
        yield f"Host memory beside the device: {plan.host_gib:.2f} GiB."


def _time(plan: Plan) -> Iterator[str]:
    rate = f"{plan.completion_tokens / max(plan.step_s, 1e-9):,.3g} completion tokens/s"
    yield f"Time of a step: {_seconds(plan.step_s)}, {rate}"
    everything = sum(phase.seconds for phase in plan.phases)
    for phase in plan.phases:
        rate = f"{phase.tokens / max(phase.seconds, 1e-9):,.3g} tokens/s" if phase.tokens else ""
        yield (
            f"  {phase.name:<18}{_seconds(phase.seconds):>10}{phase.seconds / max(everything, 1e-9):>7.0%}"
            f"  {rate:>18}  mostly {phase.cost.bound}"
        )
    if plan.job.generator is not None and plan.job.generator.foreign is not None:
        yield f"  generation is not in it: {plan.job.generator.foreign} servers' speed is not known here"
    if plan.job.asynchronous:
        yield "  asynchronous: generation and training go on side by side, so a step takes the longer of both"
    yield f"Bottleneck: {plan.bottleneck.name}, {plan.bottleneck.cost.bound}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds / 60:.3g} min"


def _kept_gib(plan: Plan) -> float | None:
    kept = plan.job.checkpoints
    return None if kept is None else round(plan.checkpoint_gib * kept, 4)


def _disk(plan: Plan) -> Iterator[str]:
    kept = _kept_gib(plan)
    more = "all are kept" if kept is None else f"the newest {plan.job.checkpoints} are kept: {kept:.2f} GiB"
    yield f"Disk: {plan.checkpoint_gib:.2f} GiB for each checkpoint (the models' folders); {more}."


def assumptions(report: Report) -> Iterator[str]:
    """What the figures rest on."""
    plan = report.plan
    yield report.lengths
    yield f"rates: {'; '.join(plan.machine.sources)}"
    yield f"{RESERVE:.0%} of the memory is left to others"
    if plan.machine.kind == "gpu" and not plan.machine.identity:
        yield "a device of the table: its peaks times shares that were measured elsewhere, see docs/planning.md"
    if plan.job.generator is not None:
        yield "every sequence has a gradient: groups without spread cost a forward pass only, and make it faster"
        if plan.job.generator.foreign is None and plan.job.actor.ranks > 1:
            others = _ranks(plan.job.actor.ranks - 1)
            yield f"the embedded engine is on the first rank alone; {others} more wait while it generates"
    if plan.machine.kind == "cpu" and plan.job.actor.ranks > 1:
        yield f"ranks exchange {plan.machine.link / 1e9:.2g} GB/s over gloo, which was not measured"
