"""The loop: equal in script and trainer, reproducible, synchronous and asynchronous, and clear when something is wrong."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.api.failures import EngineDied
from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.trainers.loop import train

ROOT = Path(__file__).resolve().parents[2]
REWARDS = Path(__file__).parent / "small_rewards.py"


STEP_METRICS = [
    "reward/mean",
    "reward/std",
    "loss",
    "grad_norm",
    "lr",
    "entropy",
    "kl/rollout_proximal",
    "clip_fraction",
    "groups/without_spread",
    "completion_length/mean",
    "staleness/mean",
    "staleness/max",
    "time/step_s",
    "time/generate_s",
    "time/train_s",
    "time/update_weights_s",
    "time/overlap",
    "tokens_per_s/generate",
    "tokens_per_s/train",
    "episodes/trained",
    "memory/peak_gib",
    "gap/mean",
    "gap/max",
]


def run(overrides: list[str], *more: str):
    """Trains; the last of two equal keys counts."""
    keys = {item.partition("=")[0]: item for item in [*overrides, *more]}
    return train(load_config(TrainConfig, None, list(keys.values())))


def weights(summary) -> dict[str, torch.Tensor]:
    return load_file(summary.checkpoint / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows(summary) -> list[dict]:
    lines = (summary.folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]  # step 0 is the first evaluation


def test_a_run_leaves_a_hugging_face_folder_curves_samples_and_metrics(overrides):
    summary = run(
        overrides,
        "evaluate.every_steps=2",
        "checkpoint.every_steps=2",
        "tracking.plot_every_steps=10",
        "total_train_steps=3",
    )

    assert AutoModelForCausalLM.from_pretrained(summary.checkpoint).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(summary.checkpoint).chat_template
    for name in (
        "config.yaml",
        "run.json",
        "log.txt",
        "reward.png",
        "curves.png",
        "checkpoints/step_2",
        "checkpoints/step_3",
    ):
        assert (summary.folder / name).exists(), name
    assert json.loads((summary.folder / "run.json").read_text())["status"] == "finished"
    assert set(summary.evaluations) == {0, 2, 3}
    sample = json.loads((summary.folder / "trajectories/step_2.jsonl").read_text().splitlines()[0])
    assert {"prompt", "completion", "reward", "versions"} <= set(sample)
    last = rows(summary)[-1]
    for name in STEP_METRICS:
        assert last[name] is not None, name
    assert last["gap/max"] < 1e-3
    assert last["episodes/trained"] == 12


def test_two_deterministic_runs_are_equal_and_another_seed_is_not(overrides, model):
    keys = ["deterministic=true", "total_train_steps=2"]
    first = weights(run(overrides, *keys, "trial_name=a"))
    second = weights(run(overrides, *keys, "trial_name=b"))
    other = weights(run(overrides, *keys, "trial_name=c", "seed=1"))

    assert same(first, second)
    assert not same(first, other)
    assert not same(first, load_file(model / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("script", ["addition_grpo.py", "gsm8k_grpo.py"])
def test_a_script_and_the_trainer_give_the_same_weights(overrides, tmp_path, script, monkeypatch):
    config = ROOT / "examples" / script.replace(".py", ".yaml")
    items = [*overrides, "deterministic=true", "evaluate.every_steps=null"]
    items += [] if script.startswith("addition") else ["system_prompt=null"]
    trained = train(load_config(TrainConfig, config, [*items, "trial_name=trainer"]))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *items, "trial_name=script"],
        check=True,
        env=environment,
        timeout=240,
    )

    by_script = load_file(trained.folder.parent / "script/checkpoints/step_3/model.safetensors")
    assert same(by_script, weights(trained))


@pytest.mark.parametrize(
    ("keys", "needed"),
    [(["algorithm.kl.coefficient=0.1"], r"reference \(reference.compute_logprobs\)"), (["algorithm=ppo"], "values")],
)
def test_a_script_refuses_a_configuration_whose_passes_its_loop_does_not_make(overrides, tmp_path, keys, needed):
    script = runpy.run_path(str(ROOT / "examples/addition_grpo.py"))
    with pytest.raises(ConfigError, match=f"does not make: .*{needed}.* use `tandem train`"):
        script["main"]([*overrides, *keys])
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.slow
@pytest.mark.invariant
def test_asynchronous_training_stays_within_the_staleness_bound_and_meets_it(overrides):
    summary = run(
        overrides,
        "async_training=true",
        "rollout.max_head_offpolicyness=2",
        f"reward={REWARDS}:slow_now_and_then",
        "total_train_steps=8",
        "evaluate.every_steps=4",
    )
    metrics = rows(summary)

    assert max(row["staleness/max"] for row in metrics) in (1, 2)
    assert metrics[-1]["episodes/trained"] == 32
    assert set(summary.evaluations) == {0, 4, 8}


@pytest.mark.slow
@pytest.mark.invariant
def test_a_trajectory_that_an_update_overtakes_has_both_versions_and_digests(overrides):
    summary = run(
        overrides,
        "async_training=true",
        "rollout.max_head_offpolicyness=2",
        "rollout.max_concurrent=1",
        "gconfig.max_new_tokens=300",
        "total_train_steps=4",
        "tracking.trajectories_per_step=16",
    )
    pieces = []
    for file in (summary.folder / "trajectories").iterdir():
        for line in file.read_text().splitlines():
            pieces += [part for part in json.loads(line)["versions"] if len(part) > 1]
    assert pieces
    assert all(len({part.get("digest") for part in trajectory}) == len(trajectory) for trajectory in pieces)


def test_groups_without_spread_change_nothing_and_say_so(overrides, model, caplog):
    summary = run(overrides, f"reward={REWARDS}:constant")

    assert same(weights(summary), load_file(model / "model.safetensors"))
    assert rows(summary)[-1]["groups/without_spread"] == 1
    assert "changes nothing" in (summary.folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("reward", "reason"), [("raises", "reward_raised"), ("not_a_number", "reward_not_finite"), ("hangs", "reward_timeout")]
)
def test_a_reward_that_fails_ends_the_run_by_name_and_never_counts_as_zero(overrides, reward, reason, tmp_path):
    with pytest.raises(TandemError, match=reason):
        run(overrides, f"reward={REWARDS}:{reward}", "rollout.max_data_failures=4", "reward_timeout_s=1")
    (info,) = tmp_path.glob("*/*/run.json")
    assert json.loads(info.read_text())["status"] == "failed"


def test_prompts_longer_than_the_context_are_dropped_with_a_reason(overrides, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    lines = [{"question": "How many? " * (400 if i % 2 else 1), "answer": "1"} for i in range(16)]
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    summary = run(overrides, f"train_dataset.path={data}", "rollout.engine.max_model_len=128", "total_train_steps=2")
    assert rows(summary)[-1]["episodes/dropped/prompt_too_long"] >= 1


def test_a_context_that_holds_no_prompt_at_all_is_said_to_be_too_small(overrides):
    with pytest.raises(ConfigError, match="leaves room for an answer in the context of 12"):
        run(overrides, "rollout.engine.max_model_len=12", "rollout.max_data_failures=8")


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("workflow=rlvrr", "rlvr"),
        ("reward=mathh", "math"),
        ("algorithm=grpoo", "grpo"),
        ("train_dataset.path=/nowhere/at/all", "nowhere"),
        ("actor.path=/nowhere/model", "nowhere"),
    ],
)
def test_names_that_do_not_exist_are_refused_with_what_there_is(overrides, item, words):
    with pytest.raises(ConfigError, match=words):
        run(overrides, item)


def test_a_folder_that_holds_a_run_is_refused_with_the_way_on(overrides):
    run(overrides, "total_train_steps=1")
    with pytest.raises(ConfigError, match="trial_name"):
        run(overrides, "total_train_steps=1")


@pytest.mark.slow
@pytest.mark.invariant
def test_an_engine_process_that_is_killed_ends_the_run_within_seconds(overrides, monkeypatch):
    started = []
    original = EmbeddedProcess.start.__func__

    def start(cls, *args, **kwargs):
        engine = original(cls, *args, **kwargs)
        started.append(engine)
        return engine

    monkeypatch.setattr(EmbeddedProcess, "start", classmethod(start))
    killed_at = []

    def kill():
        while not started or started[0].statistics().get("generated_tokens", 0) < 50:
            time.sleep(0.05)
        killed_at.append(time.monotonic())
        os.kill(started[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(EngineDied):
        run(overrides, "placement=decoupled", "total_train_steps=500", f"reward={REWARDS}:slow_now_and_then")
    assert killed_at and time.monotonic() - killed_at[0] < 20


@pytest.mark.parametrize(
    "items",
    [
        ["algorithm=dapo"],
        ["algorithm=dr_grpo"],
        ["algorithm=rloo"],
        ["algorithm=reinforce"],
        ["algorithm.kl.coefficient=0.1"],
        ["algorithm.kl.coefficient=0.1", "algorithm.kl.where=reward"],
        ["algorithm.entropy_coefficient=0.01", "actor.mini_batches=2", "actor.epochs_per_batch=2"],
        ["rollout.oversample=1.5"],
        ["async_training=true", "algorithm=dapo", "rollout.on_expiry=drop"],
        pytest.param(
            ["async_training=true", "rollout.engine.keep_kv_on_update=true", "rollout.on_expiry=wait"],
            marks=[pytest.mark.slow, pytest.mark.invariant],
        ),
    ],
    ids=lambda items: " ".join(items),
)
def test_every_preset_and_option_trains(overrides, model, items):
    summary = run(overrides, "total_train_steps=2", *items)
    assert summary.steps == 2
    assert not same(weights(summary), load_file(model / "model.safetensors"))


def test_dry_run_says_what_a_step_is_and_makes_nothing(overrides, tmp_path, capsys):
    train(load_config(TrainConfig, None, overrides), dry_run=True)
    said = capsys.readouterr().out
    assert "4 prompts × 4 samples = 16 sequences" in said and "default\n" not in said
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.slow
@pytest.mark.invariant
def test_the_multi_turn_example_trains_and_shows_a_sample_token_by_token(overrides, capfd):
    command = [sys.executable, str(ROOT / "examples/multi_turn.py"), *overrides, "reward=exact_number"]
    command = list({item.partition("=")[0]: item for item in command}.values())
    done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
    assert "<|im_start|>assistant\n[" in done.stdout  # what the model said, and nothing else, is trained on
    assert done.stdout.count("[") == done.stdout.count("]") >= 1


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize(
    ("starter", "backend"),
    [
        (["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"], "fsdp:d2"),
        ([], "fsdp:d1t2"),
        ([], "fsdp:d1c2"),
        pytest.param(
            [],
            "deepspeed:zero3:d2",
            marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed, an extra, is not installed"),
        ),
    ],
)
def test_two_ranks_train_as_one(overrides, starter, backend):
    """Whether torchrun starts them, or the command itself; whatever they divide. A frozen model scores, too, and evaluation
    comes in between."""
    small = Path(__file__).parent
    (model,) = (item.partition("=")[2] for item in overrides if item.startswith("actor.path="))
    keys = [
        "deterministic=true",
        "actor.optimizer.lr=0.1",
        "actor.optimizer.eps=0.1",
        "evaluate.every_steps=2",
        "evaluate.max_rows=2",
        f"reward={small}/small_rewards.py:even + 0.01*{small}/small_scores.py:Likely(path={model})",
    ]
    alone = run(overrides, *keys, "trial_name=one")
    items = [*overrides, *keys, "trial_name=two", f"actor.backend={backend}"]
    items = list({item.partition("=")[0]: item for item in items}.values())
    command = [sys.executable, "-m", *starter, "tandem", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *items], timeout=240, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    one = weights(alone)
    two = load_file(alone.folder.parent / "two/checkpoints/step_3/model.safetensors")
    start = load_file(Path(next(i for i in items if i.startswith("actor.path=")).partition("=")[2]) / "model.safetensors")
    moved = sum(float((one[name] - start[name]).square().sum()) for name in one) ** 0.5
    apart = sum(float((one[name] - two[name]).square().sum()) for name in one) ** 0.5
    assert moved > 0
    assert apart <= 1e-3 * moved


def test_requests_that_give_way_in_a_full_cache_are_counted(overrides):
    small = ["rollout.engine.kv_cache_gib=0.0001", f"gconfig.stop_token_ids={list(range(3, 300, 12))}"]
    folder = run(
        overrides,
        *small,
        "gconfig.max_new_tokens=48",
        "rollout.batch_size=8",
        "actor.optimizer.lr=1e-5",
        "actor.optimizer.lr=1e-5",
        "actor.optimizer.lr=1e-5",
    ).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert 0 < sum(row["rollout/preempted"] for row in rows) < 60
