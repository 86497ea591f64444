"""The wall clock may jump: nothing depends on it. Every deadline and every age is of a clock that only goes forward."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import tandem
from tests.fleet.fleets import rows, until
from tests.fleet.training import items_of
from tests.tiny import tiny_model_folder
from tests.zygote import gone

SOURCE = Path(tandem.__file__).parent
FOLDER = Path(__file__).parent / "wall_clock"

WALL_CLOCKS = {
    *("time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "clock_gettime", "clock_gettime_ns"),
    *("now", "utcnow", "today", "st_mtime", "st_ctime", "st_atime", "getmtime", "getctime", "getatime"),
}
"""Names under which Python gives the time of day, or that of a file."""

FOR_PEOPLE = {
    "cli/launch.py:_ranks": "when a rank failed, to name the first of several machines",
    "launch/launchers/__init__.py:write_end": "the same, as it is written down",
    "launch/local.py:watch": "the same",
    "view/columns.py:_unpack": "the age of an unpacked file in the cache, of which older ones make room",
    "cli/fleet.py:show": "how long ago, for `tandem fleet list`; never negative",
    "cli/profile.py:_run": "the name of a profile's folder",
    "engines/inference/fleet/roster.py:_write": "the time of a row of fleet.jsonl",
    "engines/inference/serve/routes.py:__init__": "`created` of OpenAI's protocol",
    "engines/inference/serve/service.py:EngineService": "`created` of OpenAI's protocol",
    "evaluation/validation.py:_measured": "the time of a row of evaluations.jsonl",
    "flow/pool.py:run": "where a stage lies in the timeline of a step",
    "protocol/dialects/openai_chat.py:_frame": "`created` of OpenAI's protocol",
    "protocol/dialects/responses.py:_frame": "`created_at` of OpenAI's protocol",
    "rollout/program.py:_program": "when the time of a program is over, for the program, whose clock is another",
    "state/control.py:ask": "the order in which people asked for changes, as the names of their requests",
    "state/control.py:record": "the time of a row of control.jsonl",
    "state/existing.py:silent_s": "for how long a run on another machine has written nothing, for `tandem runs`",
    "state/machine.py:now": "when a run began and ended",
    "tracking/profile.py:_use": "where a stage lies in torch's trace, which has the time of day",
    "tracking/prometheus.py:log": "when the last step was logged",
    "tracking/statistics.py:__call__": "where a stage lies in the timeline of a step",
    "tracking/tracker.py:log": "the time of a row of metrics.jsonl",
}
"""All places that ask for it, and what they tell people. They decide nothing of a run."""


def places(tree, inside=""):
    """Names of the functions (or classes) that a wall clock is asked in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCKS and _is_clock(node):
            yield inside
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            yield from (f"{inside} imports {name.name}" for name in node.names if name.name != "timedelta")  # a length
        named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from places(node, node.name if named else inside)


def _is_clock(node):
    """``time.time``, ``datetime.datetime.now``, ``path.stat().st_mtime``; not somebody's own ``now``."""
    owner = ast.unparse(node.value)
    return node.attr.startswith(("st_", "get")) or owner.split(".")[-1] in ("time", "datetime", "date")


def test_the_time_of_day_is_asked_only_to_tell_people():
    found = {
        f"{file.relative_to(SOURCE)}:{place}"
        for file in SOURCE.rglob("*.py")
        for place in places(ast.parse(file.read_text()))
    }
    assert found == FOR_PEOPLE.keys()


def test_the_search_finds_what_it_is_for():
    code = """
from datetime import datetime
def a(): return time.time()
def b(): return datetime.datetime.now() + path.stat().st_mtime + os.path.getmtime(path)
def c(): return time.monotonic() + time.perf_counter() + self.now() + loop.time()
"""
    assert list(places(ast.parse(code))) == [" imports datetime", "a", *["b"] * 3]


JUMPS = {4: "controller 3600", 8: "controller -3600", 12: "server 3600", 16: "server -3600"}
"""After so many steps: whose clock is off, by how many seconds."""


@pytest.mark.slow
def test_the_clocks_of_the_run_and_its_servers_jump_by_an_hour_and_nobody_minds(tmp_path):
    steps, clock = 20, tmp_path / "clock"
    clock.write_text("")
    items = items_of(
        tiny_model_folder(tmp_path),
        tmp_path / "runs",
        "rollout.backend=tandem:d2",
        "async_training=true",
        "rollout.max_head_offpolicyness=2",
        "gconfig.max_new_tokens=96",
        f"total_train_steps={steps}",
    )
    path = os.pathsep.join([str(FOLDER), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tandem", "train", *items],
        env=os.environ | {"PYTHONPATH": path, "WALL_CLOCK": str(clock)},
    )
    try:
        folder = tmp_path / "runs" / "tandem" / "trial"
        metrics = folder / "metrics.jsonl"

        def made(count):
            return process.poll() is not None or (metrics.exists() and len(rows(metrics)) >= count)

        for count, offset in JUMPS.items():
            until(lambda count=count: made(count), 240)
            temporary = clock.with_suffix(".new")
            temporary.write_text(f"{offset}\n")
            temporary.replace(clock)
        family = psutil.Process(process.pid).children(recursive=True)
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()

    read = {tuple(line.split()[::2]) for line in Path(f"{clock}.read").read_text().splitlines()}
    assert {f"{who} {seconds}" for who, seconds in read} == set(JUMPS.values())
    table = rows(metrics)
    times = [row["time"] for row in table]
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) > 3500
    assert min(b - a for a, b in zip(times, times[1:], strict=False)) < -7000
    last = table[-1]
    assert (last["fleet/healthy"], last["fleet/fenced"], last["fleet/moved"], last["fleet/restarts"]) == (2, 0, 0, 0)
    assert last["episodes/trained"] == 4 * steps
    assert not [name for name in last if name.startswith("episodes/dropped")]
    assert all(row["staleness/max"] <= 2 for row in table)
    assert json.loads((folder / "run.json").read_text())["seconds"] < 600
    assert all(gone(one) for one in family)
