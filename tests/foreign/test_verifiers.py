"""verifiers against Tandem: both of its clients at `tandem serve`, and GRPO on a taskset of its.

Needs the environment of ``scripts/foreign_agents.sh``.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train
from tests.foreign.peers import ENVS, SCRIPTS
from tests.serve.served import Served
from tests.tiny import tiny_model_folder

BIN = ENVS / "verifiers/bin"
TASKSET = "tandem_addition"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (BIN / "vf-eval").exists(), reason="verifiers is not there; scripts/foreign_agents.sh makes it"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model"))


def environment():
    """Of a process of verifiers: its programs and the taskset are on the path; uv keeps what it downloads in ``HOME``."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(SCRIPTS), "HOME": str(ENVS / "home"), "HF_HUB_OFFLINE": "1"}


def evaluated(url, out, *more):
    """The episodes that vf-eval wrote."""
    words = [BIN / "vf-eval", TASKSET, "-m", "tiny", "-r", "2", "--no-push", "-o", out, "--client.base-url", f"{url}/v1"]
    words += [
        "--env.agent.runtime.type",
        "subprocess",
        "--env.agent.harness.id",
        "null",
        "--sampling.max-tokens",
        "16",
        *more,
    ]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    (file,) = out.rglob("traces.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_evaluation_client_runs_against_tandem_serve(folder, tmp_path):
    with Served(folder) as server:
        episodes = evaluated(server.url, tmp_path)
    assert len(episodes) == 8 and all(episode["ok"] for episode in episodes)


def test_the_training_client_gets_tokens_masks_and_log_probabilities(folder, tmp_path):
    with Served(folder) as server:
        more = ["--client.type", "train", "--client.renderer-model-name", str(folder)]
        episodes = evaluated(server.url, tmp_path, *more)
    assert len(episodes) == 8 and all(episode["ok"] for episode in episodes)
    for episode in episodes:
        context, reply = episode["traces"][0]["nodes"]
        assert not any(context["mask"]) and reply["sampled"]
        assert len(reply["logprobs"]) == sum(reply["mask"]) > 0
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in reply["logprobs"])


def test_three_steps_of_grpo_on_a_taskset(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    monkeypatch.setenv("HOME", str(ENVS / "home"))
    overrides = [
        "workflow=verifiers",
        f"workflow_args.taskset={TASKSET}",
        f"workflow_args.python={BIN / 'python'}",
        "train_dataset.path=seeds",
        "train_dataset.size=6",
        f"run.root={tmp_path}",
        f"actor.path={folder}",
        "actor.dtype=float32",
        "actor.optimizer.lr=0.01",
        "rollout.dtype=float32",
        "rollout.batch_size=2",
        "rollout.engine.kv_cache_gib=0.05",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=12",
        "evaluate.every_steps=null",
        "total_train_steps=3",
        "tracking.plot_every_steps=null",
        "threads=1",
    ]
    run = train(load_config(TrainConfig, None, overrides)).folder
    steps = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "reward/mean" in step]
    assert len(trained) == 3 and all(step["rollout/recorded/turns"] == 1 for step in trained)
