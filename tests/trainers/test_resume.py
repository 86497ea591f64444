"""A run that is killed and repeated is the run that nobody killed, to the bit."""

import json
import signal
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.killing import INSTANTS
from tests.zygote import Zygote

MODULES = ("tests.trainers.killing", "tandem.trainers.rl", "tandem.trainers.sft", "tandem.trainers.preference")
CLOCK = ("time", "tokens_per_s/", "memory/", "time/")

SAVED_EACH_STEP = ["deterministic=true", "checkpoint.every_steps=1", "checkpoint.keep_last=2"]
OF_LOOP = [name for name in INSTANTS if "recovery" not in name]
OF_RECOVERY = [name for name in INSTANTS if "recovery" in name]


@pytest.fixture(scope="module")
def zygote():
    with Zygote(*MODULES) as zygote:
        yield zygote


class Runs:
    """Runs of one test below one root."""

    def __init__(self, zygote: Zygote, root: Path, kind: str, items: list[str]):
        self.zygote, self.root, self.kind = zygote, root, kind
        self.items = list({item.partition("=")[0]: item for item in [*items, f"run.root={root}"]}.values())

    def folder(self, trial: str) -> Path:
        return self.root / "tandem" / trial

    def go(self, trial: str, instant: str | None = None, nth: int = 1, *more: str) -> int:
        log = self.root / f"{trial}.log"
        items = list({item.partition("=")[0]: item for item in [*self.items, f"trial_name={trial}", *more]}.values())
        status = self.zygote.call("tests.trainers.killing:train", [self.kind, items, instant, nth], log)
        assert status == (0 if instant is None else -signal.SIGKILL), f"{instant}: {log.read_text()}"
        return status


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = load_file(folder / f"checkpoints/step_{step}/model.safetensors")
    for path in sorted((folder / f"checkpoints/step_{step}/state").glob("tensors-*.safetensors")):
        found |= load_file(path)
    return found


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]


def ledger(folder: Path) -> list[tuple]:
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        query = "SELECT epoch, place, trained, reason, step FROM prompts JOIN commits USING (number) ORDER BY epoch, place"
        return list(db.execute(query))


def plain(folder: Path, step: int) -> dict:
    return json.loads((folder / f"checkpoints/step_{step}/state/state.json").read_text())


def assert_same(one: Path, two: Path, step: int) -> None:
    first, second = weights(one, step), weights(two, step)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert metrics(one) == metrics(two)
    assert plain(one, step) == plain(two, step)


@pytest.fixture
def rl(zygote, overrides, tmp_path):
    items = [*overrides, *SAVED_EACH_STEP, "total_train_steps=4", "evaluate.every_steps=2", "evaluate.max_rows=4"]
    items += ["tracking.plot_every_steps=1000", "tracking.trajectories_per_step=1", "rollout.verify.every_steps=3"]
    return Runs(zygote, tmp_path, "rl", items)


def test_a_run_that_is_killed_again_and_again_ends_as_if_nobody_had(rl, model):
    rl.go("whole")
    kills = [
        ("before the optimizer step", 1),
        ("when a save begins", 1),
        ("after the optimizer step", 2),
        ("between two parts of recovery", 3),
        ("between state and manifest", 1),
        ("after the rename", 1),
        ("before evaluation", 1),
        ("when recovery delivers the weights", 1),
        ("between prepared and committed weights", 2),
        ("after the line of metrics", 1),
    ]
    for instant, nth in kills:
        rl.go("killed", instant, nth)
    rl.go("killed")

    whole, killed = rl.folder("whole"), rl.folder("killed")
    assert_same(whole, killed, 4)
    assert ledger(whole) == ledger(killed) and len(ledger(killed)) == 16
    begun = load_file(model / "model.safetensors")
    assert not all(torch.equal(begun[name], tensor) for name, tensor in weights(killed, 4).items() if name in begun)
    info = json.loads((killed / "run.json").read_text())
    assert info["status"] == "finished" and len(info["resumed"]) == len(kills)
