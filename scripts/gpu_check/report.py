"""The page of results."""

import time
from collections.abc import Sequence

from scripts.gpu_check import cuda_only
from scripts.gpu_check.place import Findings, Place
from tandem.state.machine import machine, versions

TITLES = {"placement": "Placement", "equalities": "Equalities", "speeds": "Speeds", "learning": "Learning"}


def page(findings: Findings, place: Place, model: str, left: Sequence[str] = ()) -> str:
    """Markdown: where and when, then a table a section. ``left``: the checks that are still to come."""
    here, size = machine(), "small sizes (`--quick`)" if place.quick else "full sizes"
    gpu = cuda_only.described(place.device)
    device = f"{gpu['gpu']}, {gpu['gpu_memory_gib']} GiB, CUDA {gpu['cuda']}" if gpu else f"CPU: {here['cpu']}"
    used = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    lines = [
        "# Results on a GPU" if gpu else "# Results of the GPU check on a CPU",
        "",
        "<!-- Made by `python -m scripts.gpu_check`. -->",
        "",
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {device}; {here['cores']} cores, {here['memory_gib']} GiB; {used}. "
        f"Model: {model}, {size}. {findings.failed} checks failed.",
    ]
    if left:
        lines += ["", f"Not run yet: {', '.join(left)}."]
    if findings.not_run:
        lines += ["", f"Not run, because the time was over: {', '.join(findings.not_run)}."]
    for section, found in findings.sections.items():
        lines += ["", f"## {TITLES[section]}", "", "| what | found | must be | |", "|---|---|---|---|"]
        marks = {True: "yes", False: "**NO**", None: ""}
        lines += [
            f"| {_cell(line.what)} | {_cell(line.found)} | {_cell(line.limit)} | {marks[line.good]} |" for line in found
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
