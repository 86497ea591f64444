"""`benchmarks/plan.py`: results that survive an interruption, and the table on the page."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL = {"peak_gib": 2.0}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "plan", raising=False)
    yield importlib.import_module("plan")
    for name in ("plan", "plan_cells"):
        sys.modules.pop(name, None)


def row(cell, **changes):
    return {
        "name": cell.name,
        "measures": sys.modules["plan"].MEASURES,
        "keys": [cell.command, cell.model, *cell.keys],
        "date": "2026-01-01",
        "measured": REAL,
    } | changes


def test_what_was_measured_is_not_measured_again_unless_its_keys_are_others(bench, tmp_path):
    file, (first, second, *_) = tmp_path / "out.jsonl", bench.CELLS
    bench.append(file, row(first))
    bench.append(file, row(second, keys=["train"]))
    bench.append(file, row(second, measures=None))
    with file.open("a") as out:
        out.write(json.dumps(row(second))[:40])  # cut off in the middle

    assert list(bench.read_results(file)) == [first.name]
    assert bench.read_results(tmp_path / "none") == {} == bench.read_results(None)


def test_half_of_the_ten_is_fitted_and_every_backend_and_kind_is_among_them(bench):
    keys = " ".join(key for cell in bench.CELLS for key in cell.keys)

    assert len(bench.CELLS) == 10 == len({cell.name for cell in bench.CELLS})
    assert sum(cell.fitted for cell in bench.CELLS) == 5
    assert all(word in keys for word in ("lora", "algorithm=ppo", "fsdp:d2", "deepspeed", "async", "checkpointing", "kl"))
    assert {cell.model for cell in bench.CELLS} == {"small", "medium", "smollm2-135m"}


def test_the_table_marks_what_is_out_of_reach_and_what_is_missing(bench):
    fitted, unseen = bench.CELLS[0], bench.CELLS[5]
    results = {cell.name: row(cell) for cell in (fitted, unseen)}
    plans = {fitted.name: REAL, unseen.name: {"peak_gib": 2.4}}

    lines = bench.table(plans, results).splitlines()

    assert lines[2] == "| 1 (fitted) | GRPO, small | 2.00 GiB | 2.00 GiB | +0% |"
    assert lines[7].endswith("| **+20%** |") and "not yet" in lines[3]
    assert bench.is_near(REAL, REAL) and not bench.is_near(plans[unseen.name], REAL)


def test_the_page_has_the_place_of_the_table(bench, tmp_path):
    page = tmp_path / "planning.md"
    page.write_text(bench.PAGE.read_text())
    bench.write_docs("| new |", page)

    before, _, rest = bench.PAGE.read_text().partition(bench.BEGIN)
    _, _, after = rest.partition(bench.END)
    assert page.read_text() == f"{before}{bench.BEGIN}\n| new |\n{bench.END}{after}"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no line"):
        bench.write_docs("| new |", page)


def test_processes_that_were_not_there_together_do_not_add_up(bench):
    peak, here = bench.Peak(), os.getpid()
    for _ in range(3):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], **pipes) as other:
            other.stdout.readline()  # it has grown to what it will be
            peak.look([here, other.pid])
            peak.look([here, other.pid])
            both, half = bench.high_water(here) + bench.high_water(other.pid), bench.high_water(other.pid) // 2
            other.communicate(b"\n")

    assert 0 < bench.high_water(here) < peak.num_bytes <= both + half


def test_a_process_that_has_only_just_been_forked_holds_nothing_of_its_own(bench):
    peak = bench.Peak()

    peak.look([os.getpid()])
    assert peak.num_bytes == 0
    peak.look([os.getpid()])
    assert peak.num_bytes > 0
