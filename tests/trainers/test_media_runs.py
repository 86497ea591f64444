"""Runs of a model that sees: the same to the bit over a kill, with pictures in later turns, and learning from replies."""

import json
from pathlib import Path

import pytest

from tandem.cli.main import main
from tests.tiny_media import tiny_media_model
from tests.trainers.test_resume import SAVED_EACH_STEP, Runs, assert_same, ledger

PICTURES = Path(__file__).parent / "pictures.py"


@pytest.fixture(scope="session")
def seeing(tmp_path_factory, request):
    return tiny_media_model(tmp_path_factory.mktemp("models"), getattr(request, "param", "idefics3"))


@pytest.fixture
def items(overrides, seeing, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MEDIA", str(tmp_path / "media"))
    own = [
        f"actor.path={seeing}",
        f"reward={PICTURES}:brightness",
        f"train_dataset.path={PICTURES}:rows",
        "valid_dataset.path=null",
        "tracking.trajectories_per_step=16",
    ]
    return list({item.partition("=")[0]: item for item in [*overrides, *own]}.values())


def steps(tmp_path, name):
    (folder,) = tmp_path.glob(f"*/{name}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], folder


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize(
    ("seeing", "more"),
    [
        ("idefics3", []),
        ("idefics3", ["reference.path=null", "actor.freeze=[vision]", "rollout.backend=embedded"]),
        ("qwen3_vl", []),
    ],
    indirect=["seeing"],
)
def test_a_run_with_pictures_is_the_same_to_the_bit_after_kills(zygote, items, tmp_path, more):
    runs = Runs(zygote, tmp_path, "rl", [*items, *SAVED_EACH_STEP, "rollout.verify.every_steps=1", *more])
    runs.go("whole")
    runs.go("killed", "after the optimizer step", 2)
    runs.go("killed")
    whole = runs.folder("whole")
    assert_same(whole, runs.folder("killed"), 3)
    assert ledger(whole) == ledger(runs.folder("killed"))
    rows, _ = steps(tmp_path, "whole")
    assert all(row["gap/max"] < 1e-3 and row["grad_norm"] > 0 for row in rows), "the engine and the trainer see the same"


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize(
    "more", [[], ["async_training=true", "rollout.max_head_offpolicyness=1"]], ids=["in turns", "async"]
)
def test_a_world_shows_pictures_in_later_turns_and_turns_only_append(items, tmp_path, more):
    world = ["workflow=environment", f"environment={PICTURES}:Gallery", "workflow_args.max_turns=3", "trial_name=world"]
    kept = [item for item in items if not item.startswith("reward=")]
    assert main(["train", *kept, *world, "algorithm.advantage=reinforce", "algorithm.whitening=batch", *more]) == 0
    rows, folder = steps(tmp_path, "world")
    assert {row["turns"] for row in rows} == {3.0} and all(row["gap/max"] < 1e-3 for row in rows[:1])
    samples = [json.loads(line) for file in folder.glob("trajectories/*.jsonl") for line in file.read_text().splitlines()]
    assert all(len(sample["versions"]) == 1 for sample in samples), "one trajectory each: nothing was rendered anew"
    pictures = [
        [p for m in sample["messages"] for p in m["content"] if isinstance(p, dict) and "medium" in p] for sample in samples
    ]
    assert min(map(len, pictures)) >= 2, "an empty reply is no action, and the world answers it with words"
    assert sum(len(found) >= 3 for found in pictures) > len(pictures) / 2


def test_replies_about_pictures_are_learnt(items, tmp_path):
    kept = [item for item in items if item.partition("=")[0] in ("run.root", "actor.path", "actor.dtype", "threads")]
    own = [f"train_dataset.path={PICTURES}:chats", "batch_size=6", "total_train_steps=6", "actor.optimizer.lr=0.01"]
    assert main(["sft", *kept, *own, "trial_name=learnt"]) == 0
    rows, folder = steps(tmp_path, "learnt")
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert main(["generate", str(folder / "checkpoints" / "step_6"), "which?", "--max-new-tokens", "4"]) == 0
