"""Training on a fleet is training: the same weights as on one engine, also through faults, and its ledger adds up."""

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.rl import train
from tests.fleet.fleets import rows, until
from tests.tiny import tiny_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.invariant]

REWARDS = Path(__file__).parents[1] / "trainers" / "small_rewards.py"
STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"))


def run(model, root, *items):
    """The summary of a short run, its metrics by step, and its samples."""
    config = [
        f"run.root={root}",
        f"actor.path={model}",
        "actor.optimizer.lr=0.01",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "rollout.batch_size=4",
        "rollout.engine.kv_cache_gib=0.05",
        "rollout.engine.threads=1",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=16",
        "train_dataset.path=addition",
        "evaluate.every_steps=null",
        "tracking.trajectories_per_step=16",
        f"total_train_steps={STEPS}",
        f"reward={REWARDS}:even",
        "threads=1",
        *items,
    ]
    summary = train(load_config(TrainConfig, None, config))
    metrics = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted((summary.folder / "trajectories").iterdir())
    return summary, metrics, [json.loads(line) for file in files for line in file.read_text().splitlines()]


def difference(one, other):
    a, b = (load_file(summary.checkpoint / "model.safetensors") for summary in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def killer(root, after_steps):
    """Kills one engine process once the run below ``root`` has made so many steps; says which."""
    killed = []

    def kill():
        until(lambda: any(len(file.read_text().splitlines()) >= after_steps for file in root.rglob("metrics.jsonl")), 400)
        victim = _engines()[0]
        os.kill(victim.pid, signal.SIGKILL)
        killed.append(victim.pid)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread, killed


def _engines():
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if {"tandem.engines.inference.child", "serve"} & set(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def one_engine(model, tmp_path_factory):
    return run(model, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("backend", ["embedded:d2", "embedded:d1+tandem:d1", "tandem:d2"])
def test_a_fleet_of_two_trains_the_same_weights_as_one_engine(model, tmp_path, one_engine, backend):
    one, metrics, samples = one_engine
    two, its_metrics, its_samples = run(model, tmp_path, f"rollout.backend={backend}")

    texts = [[sample["completion"] for sample in run] for run in (samples, its_samples)]
    assert texts[0] == texts[1]
    assert difference(one, two) <= 1e-4
    assert [row["reward/mean"] for row in metrics] == [row["reward/mean"] for row in its_metrics]
    last = its_metrics[-1]
    assert (last["fleet/healthy"], last["fleet/servers"], last["fleet/moved"], last["fleet/fenced"]) == (2, 2, 0, 0)
    assert len({row["server"] for row in rows(two.folder / "fleet.jsonl")}) == 2
    assert not _engines()


@pytest.mark.parametrize("eta", [1, 4])
def test_asynchronous_training_goes_on_while_a_server_is_killed_and_nothing_is_lost(model, tmp_path, eta):
    thread, killed = killer(tmp_path, 5)
    summary, metrics, _ = run(
        model,
        tmp_path,
        "rollout.backend=embedded:d2",
        "async_training=true",
        f"rollout.max_head_offpolicyness={eta}",
        "gconfig.max_new_tokens=96",
        "total_train_steps=30",
    )
    thread.join(60)
    assert len(killed) == 1
    table = rows(summary.folder / "fleet.jsonl")
    assert [row["from"] for row in table if row["to"] == "fenced"] != []
    assert metrics[-1]["episodes/trained"] == 30 * 4
    assert not [name for name in metrics[-1] if name.startswith("episodes/dropped")]
    assert all(row["staleness/max"] <= eta for row in metrics)
    assert not _engines()
