"""Shows the plan of a run: as lines of text, as a Mermaid flowchart, and as a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.api.lines import aligned
from tandem.flow.order import edges, pools_of
from tandem.flow.plan import Resident, RunPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def text(plan: RunPlan) -> str:
    """The models, and a line for each stage: what is called, what it adds, what it needs, and when it runs."""
    models = ", ".join(f"{resident.name} ({form(plan, resident)})" for resident in plan.residents)
    rows = [("stage", "call", "adds", "needs", "when")]
    for stage in plan.stages:
        needs, fields = ", ".join(stage.awake), ", ".join(stage.added)
        rows.append((stage.name, f"{stage.role}.{stage.call}", fields, needs, stage.when or "each step"))
    lines = list(aligned(rows))
    return "\n".join([f"Models: {models}.", *(f"  {line}" for line in lines)])


def form(plan: RunPlan, resident: Resident) -> str:
    """The form in which a model is there, in words, and its ranks if they are fewer than the actor's."""
    if resident.base_of is not None:
        return f"the {resident.base_of} without its adapters"
    ranks, everyone = len(resident.ranks), max(len(other.ranks) for other in plan.residents)
    begin = f" from rank {resident.ranks[0]} on" if resident.ranks[0] else ""
    fewer = f", on {ranks} of {everyone} ranks{begin}" if ranks < everyone else ""
    adapters = "adapters, " if resident.engine is not None and resident.engine.lora.rank is not None else ""
    shared = f", on the weights of {resident.trunk_of}" if resident.trunk_of is not None else ""
    what = "generates" if resident.engine is None else "trained" if resident.trained else "frozen"
    return f"{adapters}{what}{shared}{fewer}"


def data(plan: RunPlan) -> dict[str, Any]:
    """The same as plain data: ``models``, ``stages`` in order, and ``edges`` (`tandem.flow.order.edges`)."""
    models = [{"name": one.name, "form": form(plan, one), "ranks": list(one.ranks)} for one in plan.residents]
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
    """A Mermaid flowchart: stages from top to bottom, fields on the arrows between them, dotted lines to models."""
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
    """Writes the same as a PNG, whatever the file is called: stages in the left column in order, models in the right one.

    Raises:
        OSError: the file cannot be written.
    """
    draw_plan(plan).savefig(path, dpi=120, format="png")


def draw_plan(plan: RunPlan) -> "Figure":
    """The picture: a thin line from a stage to each model that it needs, a thick arrow where weights go."""
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
