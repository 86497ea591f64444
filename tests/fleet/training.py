"""Short training runs on a fleet, and a hand that kills one of its servers."""

import json
import os
import signal
import threading
from pathlib import Path

import psutil
from safetensors.torch import load_file

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train
from tests.fleet.fleets import until

REWARDS = Path(__file__).parents[1] / "trainers" / "small_rewards.py"
STEPS = 6


def items_of(model, root, *items):
    """What a short run on a tiny model is made with."""
    return [
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
        "tracking.plot_every_steps=null",
        f"reward={REWARDS}:even",
        "threads=1",
        *items,
    ]


def run(model, root, *items):
    """The summary of a short run, its metrics by step, and its samples."""
    summary = train(load_config(TrainConfig, None, items_of(model, root, *items)))
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
        victim = engines()[0]
        os.kill(victim.pid, signal.SIGKILL)
        killed.append(victim.pid)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread, killed


def engines():
    """Server and engine processes below this one, without their keepers, which have the same words behind their own."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
            if {"tandem.engines.inference.child", "serve"} & set(words) and not any("keeper.py" in word for word in words):
                found.append(process)
        except psutil.Error:
            continue
    return found
