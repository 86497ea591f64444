"""Shows the plan of a run as text, as a Mermaid flowchart and as a picture; computes which calls of a step wait for which.

A call waits for the last call that wrote a field or a state that it reads. A call that writes a state also waits for all
calls that have read this state since its last write. Fields alone would not be enough: publishing weights reads no field,
and must still come after the update.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from tandem.api.shared_files import aligned
from tandem.flow.plan import RunPlan
from tandem.flow.planned_models import Resident
from tandem.flow.stages import Stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CONTROLLER = "controller"
"""The pool of the script's own process, which makes batches, evaluates and saves."""

T = TypeVar("T")


class State(NamedTuple):
    """A state of a model that a stage may read or change, besides the fields of the batch."""

    memory: str
    """The resident whose memory holds the state."""

    what: str
    """One of `tandem.api.batch.ROLE_STATES`."""


def memory_of(residents: Iterable[Resident]) -> dict[str, str]:
    """Maps each resident to the resident whose memory holds it: the base of an actor with adapters is in the actor's memory,
    and a model with a shared trunk is in the memory of the model that owns the trunk."""
    memory: dict[str, str] = {}
    for resident in residents:
        lender = resident.base_of or resident.trunk_of
        memory[resident.name] = resident.name if lender is None else memory[lender]
    return memory


def pools_of(plan: RunPlan) -> dict[str, str]:
    """Maps each role to the pool in which its calls run, one at a time: the pool of its model, or the actor's pool if the
    role has no model."""
    memory = memory_of(plan.residents)
    pools = {}
    for role in plan.roles:
        kinds = {declared.kind for declared in role.calls.values()}
        in_controller = kinds <= {"collect", "keep"}
        pools[role.name] = CONTROLLER if in_controller else memory[role.models[0]] if role.models else "actor"
    return pools


class Order(Generic[T]):
    """Tells which earlier calls of a step a new call must wait for, because they read or write the same state of a model.
    The fields of the batch are not considered here."""

    def __init__(self, memory: Mapping[str, str]):
        self._memory = memory
        self._wrote: dict[State, T] = {}
        self._read: dict[State, list[T]] = {}

    def states(self, stage: Stage) -> tuple[set[State], set[State]]:
        """Returns (states that a stage reads, states that it writes). A stage that delivers weights writes only states of
        the receiving model, the last of `Stage.awake`."""
        awake = [self._memory.get(name, name) for name in stage.awake]
        # a delivery reads the trainer's weights and changes only the receiver's
        written = awake[-1:] if stage.declared.kind == "deliver" else awake
        reads = {State(name, what) for name in awake for what in stage.declared.reads_state}
        return reads, {State(name, what) for name in written for what in stage.declared.writes_state}

    def before(self, stage: Stage) -> list[T]:
        """Returns the earlier calls that this stage must wait for."""
        reads, writes = self.states(stage)
        # A reader waits for the last writer. A writer also waits for later readers, which would otherwise see its values.
        writers = [self._wrote[state] for state in sorted(reads | writes) if state in self._wrote]
        return writers + [call for state in sorted(writes) for call in self._read.get(state, ())]

    def add(self, stage: Stage, call: T) -> None:
        """Adds ``call``, which runs ``stage``; later stages may have to wait for it."""
        reads, writes = self.states(stage)
        for state in reads:
            self._read.setdefault(state, []).append(call)
        for state in writes:
            self._wrote[state] = call
            # this write waits for the older readers, so later calls need to wait only for the write
            self._read[state] = []


def edges(plan: RunPlan) -> Iterator[tuple[str, str, str]]:
    """Yields the edges of a step's graph: earlier stage, later stage, and the connecting field or ``model.state``."""
    order: Order[Stage] = Order(memory_of(plan.residents))
    adds: dict[str, str] = {}
    for stage in plan.stages:
        declared = stage.declared
        if stage.kind != "score":  # scores run inside the stage that collects the batch
            for name in (*declared.reads, *declared.may_read):
                if name in adds:
                    yield adds[name], stage.name, name
            reads, writes = order.states(stage)
            for earlier in dict.fromkeys(order.before(stage)):
                earlier_reads, earlier_writes = order.states(earlier)
                for state in sorted((reads | writes) & earlier_writes | writes & earlier_reads):
                    yield earlier.name, stage.name, ".".join(state)
            order.add(stage, stage)
            adds |= dict.fromkeys((*declared.adds, *declared.may_add), stage.name)


def text(plan: RunPlan) -> str:
    """Returns the plan as text: the models, and a line for each stage with its call, added fields, models and steps."""
    models = ", ".join(f"{resident.name} ({form(plan, resident)})" for resident in plan.residents)
    rows = [("stage", "call", "adds", "needs", "when")]
    for stage in plan.stages:
        needs, fields = ", ".join(stage.awake), ", ".join(stage.added)
        rows.append((stage.name, f"{stage.role}.{stage.call}", fields, needs, stage.when or "each step"))
    lines = list(aligned(rows))
    return "\n".join([f"Models: {models}.", *(f"  {line}" for line in lines)])


def form(plan: RunPlan, resident: Resident) -> str:
    """Describes a model in words: trained, frozen or generating; adapters, shared weights, ranks (if not all)."""
    if resident.base_of is not None:
        return f"the {resident.base_of} without its adapters"
    ranks, everyone = len(resident.ranks), max(len(other.ranks) for other in plan.residents)
    begin = f" from rank {resident.ranks[0]} on" if resident.ranks[0] else ""
    fewer = f", on {ranks} of {everyone} ranks{begin}" if ranks < everyone else ""
    adapters = "adapters, " if resident.engine is not None and resident.engine.lora.rank is not None else ""
    shared = f", on the weights of {resident.trunk_of}" if resident.trunk_of is not None else ""
    state = "generates" if resident.engine is None else "trained" if resident.trained else "frozen"
    return f"{adapters}{state}{shared}{fewer}"


def data(plan: RunPlan) -> dict[str, Any]:
    """Returns the plan as plain data: ``models``, ``stages`` in order, and ``edges`` (`tandem.flow.draw.edges`)."""
    models = [{"name": model.name, "form": form(plan, model), "ranks": list(model.ranks)} for model in plan.residents]
    pools = pools_of(plan)
    stages = [
        {
            "name": stage.name,
            "call": f"{stage.role}.{stage.call}",
            "kind": stage.kind,
            **{name: list(getattr(stage.declared, name)) for name in ("reads", "may_read", "adds", "may_add")},
            **{name: list(getattr(stage.declared, name)) for name in ("reads_state", "writes_state")},
            "awake": [*stage.awake],
            "pool": pools.get(stage.role, "controller"),
            "when": stage.when,
        }
        for stage in plan.stages
    ]
    ties = [{"before": before, "after": after, "by": by} for before, after, by in edges(plan)]
    return {"models": models, "stages": stages, "edges": ties}


def mermaid(plan: RunPlan) -> str:
    """Returns the plan as a Mermaid flowchart: stages top to bottom, fields on the arrows, dotted lines to models."""
    return "\n".join(["flowchart TD", *(f"    {line}" for line in _mermaid_lines(plan))])


def _mermaid_lines(plan: RunPlan) -> Iterator[str]:
    number = {id(stage): f"s{i}" for i, stage in enumerate(plan.stages)}  # a step may call a stage twice
    for stage in plan.stages:
        when = f"<br/>{stage.when}" if stage.when else ""
        yield f'{number[id(stage)]}["{stage.name}<br/><i>{stage.role}.{stage.call}</i>{when}"]'
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        fields = ", ".join(before.added)
        label = f'|"{fields}"| ' if fields else ""
        yield f"{number[id(before)]} -->{label}{number[id(after)]}"
    for resident in plan.residents:
        yield f'{resident.name}(["{resident.name}: {form(plan, resident)}"])'
        for stage in plan.stages:
            if resident.name in stage.awake:
                yield f"{resident.name} -.- {number[id(stage)]}"
    for stage, receiver in plan.weights_to:
        yield f'{number[id(stage)]} ==>|"weights"| {receiver}'


def picture(plan: RunPlan, path: Path) -> None:
    """Writes the plan as a PNG, whatever the file's extension: stages in order on the left, models on the right.

    Raises:
        OSError: the file cannot be written.
    """
    draw_plan(plan).savefig(path, dpi=120, format="png")


def draw_plan(plan: RunPlan) -> "Figure":
    """Draws the plan: a thin line from a stage to each model that it needs, a thick arrow where weights are delivered."""
    from matplotlib.figure import Figure  # noqa: PLC0415 — takes a second to import
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415

    height = len(plan.stages)
    figure = Figure(figsize=(10, 0.9 * height + 0.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(0, 10)
    axes.set_ylim(-height + 0.3, 0.7)
    middle = {r.name: -(height - 1) * (i + 0.5) / len(plan.residents) for i, r in enumerate(plan.residents)}
    for resident in plan.residents:
        _box(axes, FancyBboxPatch, 7.2, middle[resident.name], 2.6, f"{resident.name}\n{form(plan, resident)}", "#dceefb")
    for row, stage in enumerate(plan.stages):
        when = f"  ({stage.when})" if stage.when else ""
        _box(axes, FancyBboxPatch, 0.2, -row, 4.4, f"{stage.name}{when}\n{stage.role}.{stage.call}", "#f4f4f0")
        for name in stage.awake:
            axes.plot([4.6, 7.2], [-row, middle[name]], color="#7aa6c2", linewidth=1, zorder=0)
        if row + 1 < height:
            axes.annotate("", (2.4, -row - 0.68), (2.4, -row - 0.32), arrowprops={"arrowstyle": "->", "color": "#555555"})
            fields = ", ".join(stage.added)
            axes.text(2.55, -row - 0.5, fields, fontsize=8, color="#555555", verticalalignment="center")
    rows = {id(stage): row for row, stage in enumerate(plan.stages)}
    for stage, receiver in plan.weights_to:
        arrow = {"arrowstyle": "-|>", "color": "#c05a1a", "linewidth": 2.5}
        axes.annotate("", (7.2, middle[receiver]), (4.6, -rows[id(stage)]), arrowprops=arrow)
        between = (-rows[id(stage)] + middle[receiver]) / 2
        axes.text(5.9, between + 0.1, "weights", fontsize=8, color="#c05a1a", backgroundcolor="white")
    return figure


def _box(axes, patch, left: float, middle: float, width: float, words: str, color: str) -> None:  # type: ignore[no-untyped-def]
    axes.add_patch(patch((left, middle - 0.3), width, 0.6, boxstyle="round,pad=0.02", facecolor=color, edgecolor="#444444"))
    axes.text(left + width / 2, middle, words, fontsize=9, horizontalalignment="center", verticalalignment="center")
