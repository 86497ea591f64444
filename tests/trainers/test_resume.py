"""A run that is killed and repeated is the run that nobody killed, to the bit."""

import json
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.trainers.killing import INSTANTS
from tests.zygote import Zygote

CLOCK = ("time", "tokens_per_s/", "memory/", "time/")

SAVED_EACH_STEP = [
    "deterministic=true",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=2",
    "tracking.plot_every_steps=null",
]
OF_LOOP = [name for name in INSTANTS if "recovery" not in name]
OF_SAVES_WAITED_FOR = [(name, "false") for name, (module, *_) in INSTANTS.items() if module == "tandem.state.checkpoint"]
OF_RECOVERY = [name for name in INSTANTS if "recovery" in name]


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
    items += ["tracking.trajectories_per_step=1", "rollout.verify.every_steps=3"]
    return Runs(zygote, tmp_path, "rl", items)


@pytest.fixture
def whole(rl, wholes):
    """The folder of the run of `rl` that nobody kills; made once for all tests."""
    if not (wholes / "run.json").exists():
        rl.go("whole")
        shutil.copytree(rl.folder("whole"), wholes, dirs_exist_ok=True)
    return wholes


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_that_is_killed_again_and_again_ends_as_if_nobody_had(rl, model, whole):
    kills = [
        ("when a save begins", 1),
        ("after the optimizer step", 2),
        ("between two parts of recovery", 3),
        ("after the rename", 1),
        ("when recovery delivers the weights", 1),
        ("between prepared and committed weights", 2),
        ("before evaluation", 1),
        ("when a save was handed to its thread", 1),
    ]
    for instant, nth in kills:
        rl.go("killed", instant, nth)
    rl.go("killed")

    killed = rl.folder("killed")
    assert_same(whole, killed, 4)
    assert ledger(whole) == ledger(killed) and len(ledger(killed)) == 16
    begun = load_file(model / "model.safetensors")
    assert not all(torch.equal(begun[name], tensor) for name, tensor in weights(killed, 4).items() if name in begun)
    info = json.loads((killed / "run.json").read_text())
    assert info["status"] == "finished" and len(info["resumed"]) == len(kills)


def resumed_is_whole(runs: Runs, steps: int, *kills: tuple[str, int]) -> None:
    runs.go("whole")
    for instant, nth in kills:
        runs.go("killed", instant, nth)
    runs.go("killed")
    assert_same(runs.folder("whole"), runs.folder("killed"), steps)


@pytest.mark.slow
def test_a_run_whose_engine_has_a_process_of_its_own_goes_on_too(zygote, overrides, tmp_path):
    runs = Runs(zygote, tmp_path, "rl", [*overrides, *SAVED_EACH_STEP, "placement=decoupled"])
    resumed_is_whole(runs, 3, ("after the optimizer step", 2))


@pytest.mark.slow
@pytest.mark.invariant
def test_everything_that_a_run_can_remember_comes_back(zygote, overrides, tmp_path):
    items = [*overrides, *SAVED_EACH_STEP, "algorithm=ppo", "algorithm.kl.coefficient=0.1", "algorithm.kl.target=0.01"]
    items += ["reference.refresh_every_steps=2", "curriculum.round_rows=6", "rollout.replay.groups=1"]
    items += ["actor.dtype=bfloat16"]
    items += ["rollout.replay.max_uses=2", "rollout.verify.every_steps=2", "total_train_steps=4", "gconfig.n_samples=2"]
    items += ["actor.optimizer.schedule=cosine", "actor.optimizer.warmup_steps=2", "critic.warmup_steps=1"]
    rewards = Path(__file__).parent / "small_rewards.py"
    items += [f"reward={rewards}:even + {rewards}:harmful", "constraint.cost=harmful", "constraint.limit=0.1"]
    runs = Runs(zygote, tmp_path, "rl", items)
    resumed_is_whole(runs, 4, ("after the line of metrics", 3))
    state = plain(runs.folder("killed"), 4)
    assert state["actor"]["version"] == 4 and state["reference"]["refreshed"] == 4 and state["critic"]["updates"] == 4
    assert state["rollout"]["replay"]["reused"] > 0 and state["loader"]["epoch"] > 0
    assert state["constraint"]["multiplier"] not in (0.0, 1.0)  # it moved, and ended the same as in the whole run


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("sft", marks=pytest.mark.invariant), "preference", "reward"])
def test_what_learns_from_rows_goes_on_too(zygote, model, tmp_path, kind):
    data = "addition" if kind == "sft" else "addition_pairs"
    items = [f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.01", f"train_dataset.path={data}"]
    items += ["train_dataset.size=20", "total_train_steps=6", "batch_size=8", "threads=1", *SAVED_EACH_STEP]
    items += ["checkpoint.every_steps=2", f"valid_dataset.path={data}", "evaluate.every_steps=3", "evaluate.max_rows=4"]
    items += ["checkpoint.asynchronous=false"]
    runs = Runs(zygote, tmp_path, kind, items)
    kills = [("after the optimizer step", 4), ("between manifest and rename", 1), ("between two parts of recovery", 2)]
    resumed_is_whole(runs, 6, *kills)


@pytest.mark.parametrize("older", [False, True])
def test_a_run_is_continued_by_its_folder_alone(zygote, model, tmp_path, older):
    """``older``: the run was begun by a version with keys that are gone."""
    items = [f"actor.path={model}", "actor.dtype=float32", "train_dataset.path=addition", "train_dataset.size=20"]
    items += ["total_train_steps=3", "batch_size=8", "threads=1", *SAVED_EACH_STEP]
    items += ["checkpoint.asynchronous=false"]  # else training may have ended a step more when the save is killed
    runs = Runs(zygote, tmp_path, "sft", items)
    runs.go("whole")
    runs.go("killed", "after the rename", 2)
    if older:
        file = runs.folder("killed") / "config.yaml"
        saved = yaml.safe_load(file.read_text())
        saved["actor"]["optimizer"]["max_consecutive_skips"] = 5
        saved["actor"]["context_parallel"] = "auto"
        saved["valid_dataset"] |= {"media": None, "media_folders": []}
        file.write_text(yaml.safe_dump(saved))
    log = tmp_path / "continued.log"
    assert zygote.call("tandem.cli.main:main", [["continue", str(runs.folder("killed"))]], log) == 0
    said = log.read_text()
    assert f"Going on with {runs.folder('killed')}: 2 steps done; was killed" in said and "Done: 3 steps." in said
    assert_same(runs.folder("whole"), runs.folder("killed"), 3)
    assert said.count("is no key any more") == older
    assert ("actor.optimizer.max_consecutive_skips=5" in said) == older
    assert (runs.folder("whole") / "config.yaml").read_text().replace("whole", "killed") == (
        runs.folder("killed") / "config.yaml"
    ).read_text()


def test_a_run_without_a_checkpoint_begins_anew_and_a_damaged_one_is_skipped_by_name(rl, whole):
    rl.go("killed", "between state and manifest", 1)
    rl.go("killed", "after the rename", 3)
    assert "was interrupted before its first checkpoint: it begins anew at step 0" in (rl.root / "killed.log").read_text()
    assert len((rl.folder("killed") / "metrics.lost-1.jsonl").read_text().splitlines()) == 2  # step 0 and step 1

    path = rl.folder("killed") / "checkpoints/step_3/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    rl.go("killed")
    said = (rl.root / "killed.log").read_text()
    assert "step_3 is torn: model.safetensors" in said and "it is skipped" in said
    assert_same(whole, rl.folder("killed"), 4)
    assert ledger(whole) == ledger(rl.folder("killed"))
    assert (rl.folder("killed") / "checkpoints/step_3.skipped").is_dir()


@pytest.mark.slow
def test_a_finished_run_made_longer_is_the_longer_run(rl, whole):
    rl.items = [item for item in rl.items if "total_train_steps" not in item]
    items = [*rl.items, "trial_name=longer"]
    log = rl.root / "longer.log"
    for steps, override in ((2, False), (4, True)):
        more = [*items, f"total_train_steps={steps}"]
        assert rl.zygote.call("tests.trainers.killing:train", ["rl", more, None, 1, override], log) == 0, log.read_text()
    first, second = weights(whole, 4), weights(rl.folder("longer"), 4)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.slow
@pytest.mark.invariant
def test_an_asynchronous_run_trains_each_prompt_once_over_kills_and_keeps_its_bound(zygote, overrides, tmp_path):
    items = [
        *overrides,
        "async_training=true",
        "rollout.max_head_offpolicyness=2",
        "checkpoint.every_steps=1",
    ]
    items += ["total_train_steps=null", "total_train_epochs=1", "train_dataset.size=28", "rollout.batch_size=4"]
    runs = Runs(zygote, tmp_path, "rl", [item for item in items if item != "total_train_steps=3"])
    kills = [("after the optimizer step", 3), ("before publishing", 3), ("after the rename", 2)]
    for instant, nth in kills:
        runs.go("killed", instant, nth)
    began_again = len(plain(runs.folder("killed"), newest(runs.folder("killed")))["rollout"]["pool"]["again"])
    runs.go("killed")

    assert began_again > 0  # the kills did hit episodes that were under way
    counts = [row.get("episodes/begun_again", 0) for row in metrics(runs.folder("killed"))]
    assert counts == sorted(counts) and counts[-1] >= began_again
    assert f"{began_again} episodes that were under way" in (runs.folder("killed") / "log.txt").read_text()
    assert_each_prompt_once(runs.folder("killed"))


def assert_each_prompt_once(folder: Path) -> None:
    """Checks an asynchronous run of seven steps of four prompts, at most two versions behind."""
    found = ledger(folder)
    ended = [(epoch, place) for epoch, place, *_ in found]
    state = plain(folder, 7)
    loader, again = state["loader"], {tuple(prompt) for prompt in state["rollout"]["pool"]["again"]}
    assert len(ended) == len(set(ended)) == 28  # no prompt twice
    assert again.isdisjoint(ended) and len(again) + len(ended) == loader["epoch"] * 28 + loader["position"]  # and none lost
    assert {(0, place) for place in range(28)} <= {*ended, *again}
    assert all(trained or reason for _, _, trained, reason, _ in found)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert max(row["staleness/max"] for row in rows) <= 2
    assert rows[-1]["episodes/trained"] + sum(v for n, v in rows[-1].items() if n.startswith("episodes/dropped/")) == 28


def newest(folder: Path) -> int:
    return max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize(("instant", "asynchronous"), [*((name, "true") for name in INSTANTS), *OF_SAVES_WAITED_FOR])
def test_each_named_instant_may_be_the_last(rl, whole, instant, asynchronous):
    rl.items.append(f"checkpoint.asynchronous={asynchronous}")
    first = () if instant in OF_LOOP else (("after the line of metrics", 4),)
    resumed = [*first, (instant, 1 if instant in OF_RECOVERY else 2)]
    for name, nth in resumed:
        rl.go("killed", name, nth)
    rl.go("killed")
    assert_same(whole, rl.folder("killed"), 4)
    assert ledger(whole) == ledger(rl.folder("killed"))


@pytest.mark.slow
def test_distillation_goes_on_too(zygote, overrides, model, tmp_path):
    items = [item for item in overrides if not item.startswith(("reward=", "gconfig.n_samples"))]
    runs = Runs(zygote, tmp_path, "distill", [*items, *SAVED_EACH_STEP, f"teacher.path={model}", "total_train_steps=4"])
    resumed_is_whole(runs, 4, ("after publishing", 3))
