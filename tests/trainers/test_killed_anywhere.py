"""A hundred kills at instants that nobody chose, a third of them meant for recovery: the run ends as if nobody had.

A chain is one run that is killed again and again. Its instants are drawn from its seed, evenly over the time of a whole run,
and the process is killed from outside; each failure tells them. A run that ends before its next kill is compared and
begun anew, until the chain has its kills. After each kill, all processes that the run had started end by themselves.
"""

import contextlib
import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.killing import INSTANTS
from tests.trainers.preferring import keys_of
from tests.trainers.test_program_runs import played  # noqa: F401  a fixture
from tests.trainers.test_resume import (
    SAVED_EACH_STEP,
    Runs,
    assert_each_prompt_once,
    assert_same,
    ledger,
    newest,
    plain,
    weights,
)
from tests.zygote import gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = 6
"""Of a chain: two at random, and one while the run recovers from them; and again."""

CHAINS = {"rl": 9, "sft": 7, "asynchronous": 2, "agents": 1, "preference": 1}
"""Seeds of each kind; the first of the synchronous ones runs in CI."""

OF_RECOVERY = {
    "rl": [name for name in INSTANTS if "recovery" in name],
    "sft": ["when recovery looks for a checkpoint", "when recovery has read the state", "between two parts of recovery"],
}
STALENESS, BATCH = 2, 4

ENDS_S = 15.0
"""Seconds that the processes of a killed run have to end."""

HIT: dict[tuple[str, int], int] = {}
"""Chain → kills that a run died of which was not finished."""

IN_RECOVERY: dict[tuple[str, int], int] = {}
"""Chain → how many of them were at a named instant of recovery."""


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """Kind → the run that nobody kills, made once, and how long it took."""
    return {}, tmp_path_factory.mktemp("wholes")


@pytest.fixture
def nothing_left(zygote):
    """A function that fails if a process lives on which a run had started before it was killed: orphans are the zygote's."""

    def check(_: Path) -> None:
        deadline = time.monotonic() + ENDS_S
        while left := [process for process in psutil.Process(zygote.pid).children(recursive=True) if not gone(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)

    return check


@pytest.fixture
def rl_items(overrides):
    items = [*overrides, *SAVED_EACH_STEP, "total_train_steps=4", "evaluate.every_steps=2", "evaluate.max_rows=4"]
    return [*items, "tracking.trajectories_per_step=1", "rollout.verify.every_steps=3"]


@pytest.fixture
def sft_items(model):
    items = [f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.01", "train_dataset.path=addition"]
    items += ["train_dataset.size=20", "total_train_steps=8", "batch_size=8", "threads=1", *SAVED_EACH_STEP]
    return [*items, "valid_dataset.path=addition", "evaluate.every_steps=3", "evaluate.max_rows=4"]


@pytest.fixture
def asynchronous_items(overrides):
    items = [item for item in overrides if not item.startswith("total_train_steps")]
    items += ["async_training=true", f"rollout.max_head_offpolicyness={STALENESS}", f"rollout.batch_size={BATCH}"]
    return [*items, "checkpoint.every_steps=1", "total_train_epochs=1", "train_dataset.size=28"]


def seeds(kind: str, in_ci: bool = True) -> list:
    first = pytest.mark.invariant if in_ci else ()
    return [pytest.param(seed, marks=first if seed == 0 else ()) for seed in range(CHAINS[kind])]


class Chain:
    """One run, its kills, and the story that a failure tells."""

    def __init__(self, kind: str, seed: int, runs: Runs, seconds: float, compare: Callable[[Path], None]):
        self.name, self.runs, self.seconds, self.compare = (kind, seed), runs, seconds, compare
        self.random = random.Random(f"{kind} {seed}")
        self.story = [f"{kind}, seed {seed}, instants up to {seconds:.2f} s"]
        self.folder, self.log = runs.folder("killed"), runs.root / "killed.log"

    def go(self, recovery: list[str], after_kill: Callable[[Path], None] = lambda _: None) -> None:
        """Kills it `KILLS` times, and lets it end."""
        HIT[self.name] = IN_RECOVERY[self.name] = hits = 0
        with self.told():
            while hits < KILLS:
                instant = self.random.choice(recovery) if hits % 3 == 2 and self.has_checkpoint() else None
                hit = self.killed(instant)
                hits += hit
                IN_RECOVERY[self.name] += hit and instant is not None
                after_kill(self.folder)
                if self.is_finished():
                    self.compare(self.folder)
                    shutil.rmtree(self.folder)
                    self.story.append("ended, the same, and began anew")
            HIT[self.name] = hits
            self.runs.go("killed")
            self.compare(self.folder)

    def killed(self, instant: str | None) -> bool:
        """Trains up to an instant of recovery, or a random one. Whether that killed a run that was not finished."""
        seconds = None if instant else self.random.uniform(0.0, self.seconds)
        self.story.append(instant or f"{seconds:.3f} s")
        items = [*self.runs.items, "trial_name=killed"]
        arguments = [self.runs.kind, items, instant]
        status = self.runs.zygote.call("tests.trainers.killing:train", arguments, self.log, kill_after=seconds)
        allowed = (-signal.SIGKILL,) if instant else (0, -signal.SIGKILL)
        assert status in allowed, f"status {status}: {self.log.read_text()}"
        assert status != 0 or self.is_finished()
        return status == -signal.SIGKILL and not self.is_finished()

    def is_finished(self) -> bool:
        record = self.folder / "run.json"
        return record.exists() and json.loads(record.read_text())["status"] == "finished"

    def has_checkpoint(self) -> bool:
        return any(self.folder.glob("checkpoints/step_*"))

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            error.add_note(f"killed: {'; '.join(self.story)}")
            raise


def whole_of(kind: str, runs: Runs, wholes) -> tuple[Path, float]:
    """The run that nobody kills, and the seconds that it took."""
    known, root = wholes
    if kind not in known:
        began = time.monotonic()
        runs.go("whole")
        known[kind] = shutil.copytree(runs.folder("whole"), root / kind), time.monotonic() - began
    return known[kind]


def ends_the_same(whole: Path, steps: int, begun: Path) -> Callable[[Path], None]:
    initial = load_file(begun / "model.safetensors")

    def compare(folder: Path) -> None:
        assert_same(whole, folder, steps)
        if (whole / "ledger.sqlite").exists():
            assert ledger(whole) == ledger(folder)
        ended = weights(folder, steps)
        assert not all(torch.equal(tensor, ended[name]) for name, tensor in initial.items())

    return compare


@pytest.mark.parametrize("seed", seeds("rl"))
def test_any_instants_of_training_and_of_recovery_may_be_the_last(
    zygote, rl_items, model, wholes, tmp_path, nothing_left, seed
):
    runs = Runs(zygote, tmp_path, "rl", rl_items)
    whole, seconds = whole_of("rl", runs, wholes)
    Chain("rl", seed, runs, seconds, ends_the_same(whole, 4, model)).go(OF_RECOVERY["rl"], nothing_left)


@pytest.mark.parametrize("seed", seeds("sft"))
def test_any_instants_of_what_learns_from_rows_may_be_the_last(zygote, sft_items, model, wholes, tmp_path, seed):
    runs = Runs(zygote, tmp_path, "sft", sft_items)
    whole, seconds = whole_of("sft", runs, wholes)
    Chain("sft", seed, runs, seconds, ends_the_same(whole, 8, model)).go(OF_RECOVERY["sft"])


@pytest.mark.parametrize("seed", seeds("agents", in_ci=False))
def test_any_instants_of_agents_may_be_the_last(zygote, played, model, wholes, tmp_path, nothing_left, seed):  # noqa: F811
    runs = Runs(zygote, tmp_path, "rl", [*played, "total_train_steps=4"])
    whole, seconds = whole_of("agents", runs, wholes)
    Chain("agents", seed, runs, seconds, ends_the_same(whole, 4, model)).go(OF_RECOVERY["rl"], nothing_left)


@pytest.mark.parametrize("seed", seeds("preference", in_ci=False))
def test_any_instants_of_what_learns_from_pairs_may_be_the_last(zygote, model, wholes, tmp_path, nothing_left, seed):
    runs = Runs(zygote, tmp_path, "preference", keys_of(tmp_path / "data", model, "checkpoint.keep_last=2"))
    whole, seconds = whole_of("preference", runs, wholes)
    Chain("preference", seed, runs, seconds, ends_the_same(whole, 3, model)).go(OF_RECOVERY["sft"], nothing_left)


@pytest.mark.parametrize("seed", seeds("asynchronous", in_ci=False))
def test_any_instants_of_an_asynchronous_run_may_be_the_last(
    zygote, asynchronous_items, wholes, tmp_path, nothing_left, seed
):
    runs = Runs(zygote, tmp_path, "rl", asynchronous_items)
    _, seconds = whole_of("asynchronous", runs, wholes)

    def within_budget(folder: Path) -> None:
        """What was begun and not consumed at a checkpoint is no more than the gate lets begin."""
        nothing_left(folder)
        for path in folder.glob("checkpoints/step_*"):
            begun = plain(folder, int(path.name[5:]))["rollout"]["pool"]["again"]
            assert len(begun) <= (STALENESS + 1) * BATCH, path

    chain = Chain("asynchronous", seed, runs, seconds, assert_each_prompt_once)
    chain.go(OF_RECOVERY["rl"], within_budget)
    assert newest(runs.folder("killed")) == 7


def test_a_hundred_kills_hit_runs_that_were_not_finished():
    if len(HIT) < sum(CHAINS.values()):
        pytest.skip("only where all chains of this file ran before it")
    assert all(hits >= KILLS for hits in HIT.values()) and sum(HIT.values()) >= 100
    assert sum(IN_RECOVERY.values()) >= len(HIT), IN_RECOVERY
