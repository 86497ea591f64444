"""How a run ends before its end: Ctrl-C, and an engine process that is killed. Real commands in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks for processes in /proc")

REWARDS = Path(__file__).parent / "small_rewards.py"


def descendants(pid: int) -> dict[int, str]:
    """Number → command line of all processes below one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has just ended
    found, level = {}, {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= {child: command_line(child) for child in level}
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def is_engine(line: str) -> bool:
    """True for the engine's process, and not for its keeper, which has the same words behind its own."""
    return "tandem.engines.inference.child" in line and "keeper.py" not in line


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").exists() else set()


@pytest.fixture
def started(overrides, tmp_path):
    """Starts a run that never ends by itself, and waits until it has made a step; ended here if the test did not."""
    processes = []

    def start(*items):
        more = [f"reward={REWARDS}:slow_now_and_then", "total_train_steps=100000"]  # a function, so it has a worker
        keys = {item.partition("=")[0]: item for item in [*overrides, *more, *items]}
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", "train", *keys.values()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        deadline = time.monotonic() + 120
        while not any(path.stat().st_size for path in tmp_path.glob("*/*/metrics.jsonl")):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "no step within two minutes"
            time.sleep(0.1)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def left_of(children: dict[int, str]) -> dict[int, str]:
    """Those that still run; a number that was given to another program since does not count."""
    return {pid: line for pid, line in children.items() if line and command_line(pid) == line}


def status(tmp_path) -> dict:
    (info,) = tmp_path.glob("*/*/run.json")
    return json.loads(info.read_text())


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("placement", ["colocate", "decoupled"])
def test_ctrl_c_ends_a_run_within_seconds_and_leaves_nothing_but_its_folder(started, tmp_path, placement):
    memory = shared_memory()
    process = started(f"placement={placement}")
    children = descendants(process.pid)
    assert any(map(is_engine, children.values())) == (placement == "decoupled")
    assert children  # the reward's worker at least
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)

    assert time.monotonic() - began < 30
    assert process.returncode == 130, output
    assert "Interrupted." in output and str(tmp_path) in output
    assert "Traceback" not in output
    assert status(tmp_path)["status"] == "interrupted"
    assert left_of(children) == {}
    assert shared_memory() <= memory


@pytest.mark.slow
@pytest.mark.invariant
def test_a_killed_engine_process_ends_the_command_within_seconds_saying_so(started, tmp_path):
    process = started("placement=decoupled")
    children = descendants(process.pid)
    (engine,) = [pid for pid, line in children.items() if is_engine(line)]
    os.kill(engine, signal.SIGKILL)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)

    assert time.monotonic() - began < 20
    assert process.returncode == 1, output
    assert f"error: engine_died: its process {engine} was killed by SIGKILL" in output
    assert "Traceback" not in output.partition("error: engine_died")[2]
    assert status(tmp_path)["status"] == "failed"
    assert "SIGKILL" in status(tmp_path)["error"]
    assert left_of(children) == {}
