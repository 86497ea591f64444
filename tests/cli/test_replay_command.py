"""A step of a deterministic run comes out the same again, or is shown to differ, and the run's folder is as it was."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.main import main
from tests.tiny import tiny_model_folder
from tests.zygote import Zygote

pytestmark = pytest.mark.slow
REWARDS = Path(__file__).parents[1] / "trainers/small_rewards.py"
MODULES = ("tandem.cli.main", "tandem.cli.replay", "tandem.state.replaying", "tandem.trainers.rl", "tandem.trainers.sft")


@pytest.fixture(scope="module")
def zygote():
    with Zygote(*MODULES) as zygote:
        yield zygote


@pytest.fixture(scope="module")
def tandem(zygote, tmp_path_factory):
    """Calls the command; (exit code, what it said)."""
    log = tmp_path_factory.mktemp("log") / "log"

    def call(*words):
        code = zygote.call("tests.cli.test_replay_command:exit_with", [[str(word) for word in words]], log)
        return code, log.read_text()

    return call


def exit_with(words):
    """In a process of its own."""
    try:
        code = main(words)
    except SystemExit as error:  # wrong usage
        code = error.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture(scope="module")
def root(tandem, tmp_path_factory):
    """A run `sft` of 4 steps, saved after the second and the fourth."""
    root = tmp_path_factory.mktemp("runs")
    sft = ["trial_name=sft", "total_train_steps=4", "batch_size=4", "train_dataset.size=20", "checkpoint.every_steps=2"]
    code, said = tandem("sft", *common(root, tiny_model_folder(root)), *sft)
    assert code == 0, said
    return root / "tandem"


@pytest.fixture(scope="module")
def rl(tandem, root):
    """Beside it a run `rl` of 3 steps, saved after each."""
    rl = ["trial_name=rl", "total_train_steps=3", "rollout.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=6"]
    rl += ["rollout.engine.kv_cache_gib=0.05", "rollout.dtype=float32", f"reward={REWARDS}:even", "checkpoint.every_steps=1"]
    rl += ["checkpoint.keep_last=null"]
    code, said = tandem("train", *common(root.parent, root.parent / "tiny-llama-0"), *rl)
    assert code == 0, said
    return root


def common(root, model):
    common = [f"run.root={root}", f"actor.path={model}", "actor.dtype=float32", "actor.optimizer.lr=0.01", "threads=1"]
    common += ["train_dataset.path=addition", "deterministic=true", "tracking.plot_every_steps=null"]
    return common


def contents(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def outcome(said):
    return json.loads(next(line for line in said.splitlines() if line.startswith('{"step"')))


def comes_out_the_same(tandem, folder, step, begun, samples=0):
    before = contents(folder)
    code, said = tandem("replay", folder, "--step", step, "--json")
    assert code == 0, said
    found = outcome(said)
    assert found["begun_from"] == begun and found["differences"] == [] and found["tensors"] > 10 and found["metrics"] >= 5
    assert found["samples"] == samples
    assert contents(folder) == before


def is_shown_to_differ(tandem, folder, step, key):
    before = contents(folder)
    code, said = tandem("replay", folder, "--step", step, key)
    assert code == 1, said
    assert f"Step {step}, run again from" in said and "DIFFERENT" in said
    assert "  tensors: " in said and "  metrics: " in said
    if folder.name == "sft" and "lr" in key:  # of many metrics the first few are told
        assert "lr 0.02 (was 0.01)" in said
    assert contents(folder) == before


@pytest.mark.invariant
def test_a_step_comes_out_the_same(tandem, root):
    comes_out_the_same(tandem, root / "sft", 4, "step_2")


@pytest.mark.invariant
def test_a_step_with_another_learning_rate_is_shown_to_differ(tandem, root):
    is_shown_to_differ(tandem, root / "sft", 3, "actor.optimizer.lr=0.02")


def test_without_a_checkpoint_before_it_everything_is_run_again(tandem, root):
    comes_out_the_same(tandem, root / "sft", 2, "the beginning")
    is_shown_to_differ(tandem, root / "sft", 1, "seed=7")


@pytest.mark.invariant
def test_reinforcement_learning_is_repeated_with_its_samples(tandem, rl):
    comes_out_the_same(tandem, rl / "rl", 3, "step_2", samples=4)
    comes_out_the_same(tandem, rl / "rl", 1, "the beginning", samples=4)
    is_shown_to_differ(tandem, rl / "rl", 1, "actor.optimizer.lr=0.02")  # the second has no spread to learn from


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["sft", "--step", "9"], "has no record of step 9 .*: steps 1 to 4 are there"),
        (["sft", "--step", "0"], "no record of step 0"),
        (["nothing", "--step", "1"], "is not the folder of a run"),
        (["sft", "--step", "2", "trial_name=x"], "trial_name=x cannot be changed in a replay"),
        (["sft", "--step", "2", "checkpoint.every_steps=1"], "checkpoint.every_steps=1 cannot be changed in a replay"),
        (["sft", "--step", "4", "total_train_steps=3"], "did not reach step 4: with the values that it was given"),
        (["sft", "--step", "4", "actor.path=nowhere"], "model 'nowhere' is neither a folder"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(tandem, root, words, reason):
    code, said = tandem("replay", root / words[0], *words[1:])
    assert code == 2, said
    assert re.search(reason, said)


def test_a_run_that_was_not_deterministic_is_refused_with_the_remedy(tandem, root, tmp_path):
    folder = tmp_path / "exp" / "other"
    shutil.copytree(root / "sft", folder)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("deterministic: true", "deterministic: false"))
    code, said = tandem("replay", folder, "--step", 2)
    assert code == 2 and "was not deterministic" in said and "Begin another run with deterministic=true" in said


def test_each_step_of_a_run_whose_values_were_changed_comes_out_the_same(tandem, root, tmp_path):
    folder = tmp_path / "exp" / "longer"
    shutil.copytree(root / "sft", folder)
    code, said = tandem("continue", folder, "total_train_steps=5", "actor.optimizer.lr=0.03", "--override")
    assert code == 0, said
    comes_out_the_same(tandem, folder, 4, "the beginning")
    comes_out_the_same(tandem, folder, 5, "step_4")
    shutil.rmtree(folder / "checkpoints/step_4")
    comes_out_the_same(tandem, folder, 5, "the beginning")  # the first steps under the learning rate of then
    is_shown_to_differ(tandem, folder, 5, "actor.optimizer.lr=0.03")
    info = json.loads((folder / "run.json").read_text())
    (time,) = info["resumed"]
    assert time["from"] == 4 and {"path": ["actor", "optimizer", "lr"], "value": 0.01} in time["before"]
    del time["from"], time["before"]  # of an older version: nobody knows where it began
    (folder / "run.json").write_text(json.dumps(info))
    code, said = tandem("replay", folder, "--step", 4)
    assert code == 2 and "was changed after step 4" in said and "actor.optimizer.lr: 0.01 → 0.03" in said
    assert tandem("replay", folder, "--step", 4, "actor.optimizer.lr=0.01", "total_train_steps=4")[0] == 0


def test_a_run_stops_after_a_step_and_goes_on_from_there(tandem, root, tmp_path):
    words = [
        "actor.optimizer.lr=0.01",
        "threads=1",
        "train_dataset.path=addition",
        "deterministic=true",
        "actor.dtype=float32",
    ]
    words += ["total_train_steps=4", "batch_size=4", "train_dataset.size=20", f"run.root={tmp_path}", "trial_name=half"]
    words += [f"actor.path={root.parent / 'tiny-llama-0'}"]
    code, said = tandem("sft", *words, "--until", 3)
    assert code == 0 and "Done: 3 steps." in said, said
    folder = tmp_path / "tandem" / "half"
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_3"]
    code, said = tandem("sft", *words)
    assert code == 0 and "Done: 4 steps." in said, said
    assert (folder / "weights.jsonl").read_text() == (root / "sft" / "weights.jsonl").read_text()
    assert tandem("sft", *words, "--until", 0)[0] == 2


def test_a_damaged_checkpoint_is_skipped_by_name_and_the_step_comes_out_the_same(tandem, rl, tmp_path):
    folder = tmp_path / "my runs" / "first (copy)"  # moved, to where no run could be begun
    shutil.copytree(rl / "rl", folder)
    path = folder / "checkpoints/step_2/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = contents(folder)
    code, said = tandem("replay", folder, "--step", 3)
    assert code == 0, said
    assert "step_2 is damaged: model.safetensors is not what was written" in said
    assert "Running steps 2 to 3 again, from step_1." in said and "Step 3, run again from step_1: the same" in said
    assert contents(folder) == before
    shutil.rmtree(folder / "checkpoints/step_1/state")
    code, said = tandem("replay", folder, "--step", 3)
    assert code == 0 and "step_1 has a model and no state" in said, said
    assert "Running steps 1 to 3 again, from the beginning." in said


def test_a_run_that_says_no_command_is_refused_with_the_remedy(tandem, root, tmp_path):
    folder = tmp_path / "exp" / "lost"
    shutil.copytree(root / "sft", folder)
    (folder / "run.json").unlink()
    code, said = tandem("replay", folder, "--step", 2)
    assert code == 2 and "does not say which command began it" in said and "Restore run.json" in said


def test_a_replay_on_other_ranks_is_the_same_step_and_leaves_nothing_behind(root, tmp_path):
    folder = tmp_path / "exp" / "supervised"
    shutil.copytree(root / "sft", folder)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("max_restarts: 0", "max_restarts: 1"))
    command = [sys.executable, "-m", "tandem", "replay", str(folder), "--step", "4", "--json", "actor.backend=fsdp:d2"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    found = json.loads(done.stdout)
    assert found["begun_from"] == "step_2" and found["tensors"] > 10 and found["metrics"] >= 5, done.stderr
    # the same bits are promised on the same ranks only; on others the same step, which may be rounded otherwise
    assert done.returncode == (1 if found["differences"] else 0), done.stderr
    numbers = re.findall(r"(\S+) \(was (\S+)\)", " ".join(found["differences"]))
    assert [float(now) for now, _ in numbers] == pytest.approx([float(then) for _, then in numbers], rel=1e-4)
    assert "Warning" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["exp"]
