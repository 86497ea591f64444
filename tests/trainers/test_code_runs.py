"""Runs that are rewarded for code: on a tiny model, and one that is killed again and again."""

import contextlib
import json
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.data.dataset import load_dataset
from tandem.sandbox.choose import choose_sandbox
from tandem.trainers.loop import train
from tests.sandbox.machine import descendants
from tests.trainers.test_resume import SAVED_EACH_STEP, Runs, assert_same, ledger, metrics, weights
from tests.zygote import Zygote, gone


@pytest.fixture(autouse=True)
def sandbox_works():
    try:
        choose_sandbox().close()
    except ConfigError as error:
        pytest.skip(f"no sandbox works on this machine: {error}")


@pytest.fixture
def code(overrides):
    changed = ("train_dataset.path", "valid_dataset.path", "reward")
    others = [item for item in overrides if not item.startswith(changed)]
    return [*others, "train_dataset.path=functions", "valid_dataset.path=functions", "reward=code(seconds=5)"]


def test_a_run_is_rewarded_for_code_and_counts_why_answers_fail(code):
    summary = train(load_config(TrainConfig, None, [*code, "total_train_steps=2"]))
    text = (summary.folder / "metrics.jsonl").read_text()
    assert '"code/passed_cases": 0.0' in text and '"samples/failed' not in text


KILLS = 4
"""Of the run below, at instants that its seed draws over the time of a whole run."""


class Watched:
    """The sandboxes of a run in a process of its own, looked for 20 times a second by whoever waits for it."""

    def __init__(self, zygote: Zygote):
        self._zygote = zygote
        self.last: set[int] = set()
        self.ever: set[int] = set()

    def killed(self, items: list[str], log: Path, seconds: float) -> int:
        """Trains for so many seconds; returns the status. `last` has the sandboxes that were there at the end."""
        self.last = set()
        with ThreadPoolExecutor(1) as thread:
            arguments = ["rl", items, None]
            call = thread.submit(self._zygote.call, "tests.trainers.killing:train", arguments, log, kill_after=seconds)
            while not call.done():
                if below := {pid for pid in descendants(self._zygote.pid) if _is_sandbox(pid)}:
                    self.last = below
                    self.ever |= below
                time.sleep(0.05)
        return call.result()


def _is_sandbox(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"tandem.sandbox.guest" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@pytest.fixture
def varied(code, tmp_path):
    """A run whose answers differ in their reward: an answer ends the last comment of a right program, and fails if it has
    more lines."""
    preamble = "import time\n\ndef double(x):\n    time.sleep(0.02)\n    return 2 * x\n\n# "
    cases = ["assert double(1) == 2", "assert double(3) == 6"]
    tests = {"names": ["double"], "preamble": preamble, "cases": cases}
    rows = [{"question": f"Say {number}.", "program_tests": tests} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    others = [item for item in code if not item.startswith(("train_dataset.path", "valid_dataset.path"))]
    items = [*others, f"train_dataset.path={tmp_path / 'rows.jsonl'}", f"valid_dataset.path={tmp_path / 'rows.jsonl'}"]
    return [*items, *SAVED_EACH_STEP, "gconfig.max_new_tokens=32", "total_train_steps=3", "tracking.trajectories_per_step=1"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_at_random_instants_ends_the_same_and_no_sandbox_outlives_it(zygote, varied, model, tmp_path):
    runs = Runs(zygote, tmp_path, "rl", varied)
    zygote.call("time:sleep", [0], tmp_path / "warm.log")
    began = time.monotonic()
    runs.go("whole")
    whole, seconds = runs.folder("whole"), time.monotonic() - began
    instants, watched = random.Random(18), Watched(zygote)
    items, story, hits = [*runs.items, "trial_name=killed"], [], 0
    folder, log = runs.folder("killed"), tmp_path / "killed.log"
    while hits < KILLS:
        instant, began = instants.uniform(0.2, 1.0) * seconds, time.monotonic()
        status = watched.killed(items, log, instant)
        story.append((instant, status, len(watched.last)))
        assert status in (0, -signal.SIGKILL), (story, log.read_text())
        hits += status == -signal.SIGKILL and bool(watched.last)
        left = [pid for pid in watched.ever if not gone(pid, within_s=20)]
        assert left == [], (story, [_command(pid) for pid in left])
        if status == 0:
            seconds = min(seconds, time.monotonic() - began)
            _is_the_same(whole, folder)
            shutil.rmtree(folder)  # the next kill hits a run that begins anew
    runs.go("killed")
    _is_the_same(whole, folder)
    rewards = {row["reward/mean"] for row in metrics(folder)}
    begun, ended = load_file(model / "model.safetensors"), weights(folder, 3)
    assert len(rewards) > 1 and not all(torch.equal(tensor, ended[name]) for name, tensor in begun.items()), rewards


def _is_the_same(whole: Path, killed: Path) -> None:
    assert_same(whole, killed, 3)
    assert ledger(whole) == ledger(killed)


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return "gone"


def test_the_control_gives_each_question_the_tests_of_another():
    real, control = (load_dataset(DatasetConfig(path=name, size=60)).rows for name in ("functions", "functions_shuffled"))
    assert [row["messages"] for row in control] == [row["messages"] for row in real]
    assert sum(one["program_tests"] != row["program_tests"] for one, row in zip(control, real, strict=True)) > 50
    tests = [sorted(str(row["program_tests"]) for row in rows) for rows in (real, control)]
    assert tests[0] == tests[1]
