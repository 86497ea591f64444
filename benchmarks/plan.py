"""The memory that `tandem plan` says against runs on this machine: ten configurations, as a table for docs/planning.md.

    python benchmarks/plan.py --out plan.jsonl               # measure the ten, print the table
    python benchmarks/plan.py --out plan.jsonl --write-docs  # and put it into docs/planning.md
    python benchmarks/plan.py --out plan.jsonl --cells 1,6   # only these
    python benchmarks/plan.py --out plan.jsonl --table       # measure nothing more
    python benchmarks/plan.py --list

Each cell that is measured is a line of the file, so the same command goes on after an interruption. What a process
takes before it holds a model (`PROCESS_GIB` in `tandem.planning.machine`) was fitted to five of them, and not to the others.
Reach: peak memory within 10 % in those five. Random models of two sizes with the built-in model's tokenizer, and the
built-in model itself; completions of exactly `gconfig.max_new_tokens`; a reward that differs within groups
(`plan_cells.py`). About 20 minutes on two cores.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
from plan_cells import CELLS, REWARD, Cell, arguments

from tandem.cli.planning import make_report
from tandem.cli.profile import PLAN
from tandem.planning.machine import this_machine

MEMORY_WITHIN = 0.10
MEASURES = 2
"""Counts up when what is measured changes: a line with another number is measured anew."""

POLL_S = 0.1
RUN_TIMEOUT_S = 600.0
PAGE = Path(__file__).resolve().parents[1] / "docs/planning.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def predicted(cell: Cell, folder: Path) -> dict[str, float]:
    """The memory that `tandem plan` says."""
    parser = argparse.ArgumentParser()
    PLAN.add_arguments(parser)
    data = make_report(parser.parse_args([*arguments(cell, folder), "--for", cell.command])).data()
    return {"peak_gib": data["memory"]["peak_gib"]}


def measured(cell: Cell, folder: Path) -> dict[str, float]:
    """The `Peak` of the run's processes.

    Raises:
        RuntimeError: it failed, or took longer than `RUN_TIMEOUT_S`.
    """
    started = [sys.executable, "-m", "tandem"]
    if cell.ranks > 1:
        started = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={cell.ranks}", "-m", "tandem"]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if cell.ranks > 1 else {})
    shutil.rmtree(folder / "runs", ignore_errors=True)
    command = [*started, cell.command, *arguments(cell, folder)]
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment, start_new_session=True)
    peak = Peak()
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while process.poll() is None:
            peak.look(tree(process.pid, launcher=cell.ranks > 1))
            if time.monotonic() > deadline:
                raise RuntimeError(f"{cell.name} had not ended after {RUN_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    if process.returncode:
        raise RuntimeError(f"{cell.name} ended with {process.returncode}")
    return {"peak_gib": peak.num_bytes / 2**30}


class Peak:
    """The most memory of any instant: the largest resident sizes so far of the processes that were there, added up."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._before: set[int] = set()

    def look(self, pids: Iterable[int]) -> None:
        """One that was not there before may have only just been forked, with its parent's pages: it does not count yet."""
        there = set(pids)
        self.num_bytes = max(self.num_bytes, sum(high_water(one) for one in there & self._before))
        self._before = there


def tree(pid: int, *, launcher: bool) -> Iterator[int]:
    """The processes of a run; without torchrun's own."""
    try:
        here = psutil.Process(pid)
        yield from ([] if launcher else [pid])
        yield from (child.pid for child in here.children(recursive=True))
    except psutil.NoSuchProcess:
        return


def high_water(pid: int) -> int:
    """Largest resident size so far, bytes; 0 once the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM:")), 0)


def read_results(file: Path | None) -> dict[str, dict[str, Any]]:
    """Name of a cell → the newest line of it that was measured with the keys that it has now; a torn line counts as none."""
    found: dict[str, dict[str, Any]] = {}
    cells = {cell.name: cell for cell in CELLS}
    for line in file.read_text().splitlines() if file is not None and file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        cell = cells.get(row["name"])
        known = row.get("measures") == MEASURES
        if cell is not None and known and row["keys"] == [cell.command, cell.model, *cell.keys]:
            found[cell.name] = row
    return found


def append(file: Path | None, row: dict[str, Any]) -> None:
    """One more line, which is on the disk when this returns."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())


def off(plan: dict[str, float], real: dict[str, float]) -> float:
    """The error of the prediction against what was measured."""
    return plan["peak_gib"] / real["peak_gib"] - 1


def table(plans: dict[str, dict[str, float]], results: dict[str, dict[str, Any]]) -> str:
    """Markdown; a figure that is further off than it may be is bold."""
    lines = ["| | configuration | predicted | measured | off |", "|---|---|---|---|---|"]
    for number, cell in enumerate(CELLS, 1):
        if cell.name not in results:
            lines.append(f"| {number} | {cell.name} | not measured: {cell.missing or 'not yet'} | | |")
            continue
        plan, real = plans[cell.name], results[cell.name]["measured"]
        error = f"{off(plan, real):+.0%}" if is_near(plan, real) else f"**{off(plan, real):+.0%}**"
        seen = " (fitted)" if cell.fitted else ""
        lines.append(f"| {number}{seen} | {cell.name} | {plan['peak_gib']:.2f} GiB | {real['peak_gib']:.2f} GiB | {error} |")
    return "\n".join(lines)


def write_docs(text: str, page: Path = PAGE) -> None:
    """Puts ``text`` between the two marks of the page.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page.name} has no line {BEGIN} and {END} behind it")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def said(plans: dict[str, dict[str, float]], results: dict[str, dict[str, Any]]) -> str:
    """The table with what it was made by."""
    machine = this_machine()
    dates = sorted({row["date"] for row in results.values()})
    unseen = [cell for cell in CELLS if not cell.fitted and cell.name in results]
    good = [cell for cell in unseen if is_near(plans[cell.name], results[cell.name]["measured"])]
    return "\n".join(
        (
            f"`python benchmarks/plan.py --out plan.jsonl --write-docs`, {' and '.join(dates)}, {machine.name}, "
            f"{machine.memory_gib:.1f} GiB.",
            f"Of the {len(unseen)} measured rows that nothing was fitted to, {len(good)} are within 10 %.",
            "",
            table(plans, results),
        )
    )


def is_near(plan: dict[str, float], real: dict[str, float]) -> bool:
    """Within reach."""
    return abs(off(plan, real)) <= MEMORY_WITHIN


def main() -> None:
    """Measures what is missing, prints the table; exit code 1 where a cell that was not fitted is further off than it
    may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the measurements, one JSON object a line")
    parser.add_argument("--cells", help="numbers from 1 on, separated by commas (default: all)")
    parser.add_argument("--table", action="store_true", help="measure nothing: predictions and table of what is in --out")
    parser.add_argument("--write-docs", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    numbered = dict(enumerate(CELLS, 1))
    if given.list:
        print("\n".join(f"{number:>3} {cell.name}{' (fitted)' if cell.fitted else ''}" for number, cell in numbered.items()))
        return
    wanted = [numbered[int(n)] for n in given.cells.split(",")] if given.cells else list(CELLS)
    results = read_results(given.out)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "spread.py").write_text(REWARD)
        for cell in () if given.table else wanted:
            if cell.name not in results and cell.missing is None:
                results[cell.name] = measure_cell(cell, folder)
                append(given.out, results[cell.name])
        plans = {cell.name: predicted(cell, folder) for cell in CELLS if cell.name in results}
    text = said(plans, results)
    print(text)
    if given.write_docs:
        write_docs(text)
    far = [
        c for c in CELLS if not c.fitted and c.name in results and not is_near(plans[c.name], results[c.name]["measured"])
    ]
    sys.exit(1 if far else 0)


def measure_cell(cell: Cell, folder: Path) -> dict[str, Any]:
    """The line of one cell."""
    began = time.perf_counter()
    real = measured(cell, folder)
    keys = [cell.command, cell.model, *cell.keys]
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {
        "name": cell.name,
        "measures": MEASURES,
        "keys": keys,
        "date": date,
        "took_s": time.perf_counter() - began,
        "measured": real,
    }


if __name__ == "__main__":
    main()
