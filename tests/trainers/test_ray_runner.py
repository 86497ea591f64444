"""Roles in workers of Ray: the same step, the same bits, checkpoints for either runner; a death is mended or named."""

import contextlib
import json
import os
import re
import runpy
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tandem.api.failures import RankFailed, WorkerDied
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig
from tandem.flow.plan import plan_run
from tandem.flow.pool import part_of, pools_by_role
from tandem.trainers import distill, loop
from tandem.trainers.script import open_training
from tests.trainers.calling import calling_model_folder

TOOLS, REWARDS = Path(__file__).with_name("calling.py"), Path(__file__).with_name("small_rewards.py")
KL = ("algorithm.kl.coefficient=0.1",)
PPO = ("algorithm=ppo", *KL, "reference.backend=fsdp:d1")


@pytest.fixture(scope="module")
def ray():
    """A cluster of our own, which leaves no process behind."""
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'tandem-rl[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))))
        settings = {
            "worker_niceness": 0
        }  # as `tandem.flow.ray_head` has it: on a busy machine workers do not start otherwise
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            _system_config=settings,
        )
        yield ray
        ray.shutdown()
    assert not [child.name() for child in psutil.Process().children(recursive=True) if child.name().startswith("ray")]


def there(ray):
    """The environment of a command on the cluster of the tests."""
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def items_of(overrides, runner, trial, *more):
    given = [*overrides, "deterministic=true", "gconfig.max_new_tokens=6", f"runner={runner}", f"trial_name={trial}", *more]
    return list({item.partition("=")[0]: item for item in given}.values())


def trained(overrides, runner, trial, *more, module=loop, kind=TrainConfig, **how):
    """The digests of all weights after each step, and the metrics that are no measurements."""
    found = module.train(load_config(kind, None, items_of(overrides, runner, trial, *more)), **how)
    weights = {}
    for line in (found.folder / "weights.jsonl").read_text().splitlines():
        weights[json.loads(line)["step"]] = json.loads(line)["tensors"]
    measured = ("time/", "tokens_per_s/", "memory/", "remote/", "threads/")
    return weights, {name: value for name, value in found.metrics.items() if not name.startswith(measured)}


def cases(models):
    return {
        "grpo": ["actor.mini_batches=2"],
        "ppo": [*PPO, "critic.warmup_steps=1", "rollout.verify.every_steps=1", "evaluate.every_steps=1"],
        "refreshed": [*KL, "reference.refresh_every_steps=1", "placement=decoupled"],
        "adapter": [*KL, "actor.lora.rank=4"],
        "judge": [f"reward=0.5*model(path={models / 'judge'}, name=judge) + {REWARDS}:even"],
        "tools": [
            *("workflow=tools", f"workflow_args.tools=[{TOOLS}:double,{TOOLS}:halve]", "workflow_args.max_turns=3"),
            *(f"gconfig.stop_token_ids={list(range(3, 300, 8))}", "gconfig.max_new_tokens=24", "rollout.batch_size=2"),
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", ["grpo", "ppo", "refreshed", "adapter", "judge", "tools"])
def test_roles_in_workers_of_ray_train_to_the_bits_of_a_local_run(ray, overrides, models, case, tmp_path):
    more = cases(models)[case]
    if case == "tools":
        more = [f"actor.path={calling_model_folder(tmp_path)}", *more]
    weights, metrics = trained(overrides, "local", "local", *more)
    theirs, their_metrics = trained(overrides, "ray", "ray", *more)
    assert weights == theirs and len(weights) == 3 and weights[1] != weights[3]
    assert metrics == pytest.approx(their_metrics, nan_ok=True, rel=0, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_episodes_in_rollout_workers_make_the_samples_of_one_process_to_the_bit(ray, overrides, models, workers, tmp_path):
    more = [f"actor.path={calling_model_folder(tmp_path)}", *cases(models)["tools"], "rollout.batch_size=4"]
    weights, metrics = trained(overrides, "local", "local", *more)
    theirs, their_metrics = trained(overrides, "ray", "workers", *more, f"rollout.workers={workers}")
    assert weights == theirs and len(weights) == 3
    assert metrics == pytest.approx(their_metrics, nan_ok=True, rel=0, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["KILL", "STOP"])
def test_the_episodes_of_a_rollout_worker_that_dies_begin_again_in_another_one(ray, overrides, models, number, tmp_path):
    keys = ["total_train_steps=6", "rollout.workers=2", "recover.silent_after_s=3", "gconfig.max_new_tokens=48"]
    whole, metrics = trained(overrides, "local", "whole", keys[0], keys[-1])
    with started(items_of(overrides, "ray", "mended", *keys), env=there(ray)) as (run, folder):
        begun(folder, 1, run)
        first = processes(folder, "rollout")
        os.kill(first[0], number)
        killed, seconds = time.time(), None
        while run.poll() is None and seconds is None:
            time.sleep(0.02)
            if "rollout worker 1 died" in (folder / "log.txt").read_text():
                seconds = time.time() - killed
        said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said
    assert seconds is not None and seconds < (5 if number == signal.SIGKILL else 9)
    assert [one["tensors"] for one in lines_of(folder / "weights.jsonl")] == list(whole.values())
    last = lines_of(folder / "metrics.jsonl")[-1]
    assert last["episodes/trained"] == metrics["episodes/trained"] and "recover/restarts" not in last


def agent(models, tmp_path):
    """The keys of an agent with tools in two rollout workers, beside a server that the run starts."""
    keys = [f"actor.path={calling_model_folder(tmp_path)}", *cases(models)["tools"], "rollout.batch_size=4"]
    return [*keys, "deterministic=false", "rollout.backend=tandem:d1"]


@pytest.mark.slow
def test_rollout_workers_beside_a_server_make_the_samples_of_one_process(ray, overrides, models, tmp_path):
    first, runs = load_file(Path(calling_model_folder(tmp_path)) / "model.safetensors"), []
    for runner, more in (("local", ()), ("ray", ("rollout.workers=2",))):
        items = items_of(overrides, runner, runner, *agent(models, tmp_path), *more)
        runs.append(loop.train(load_config(TrainConfig, None, items)))
    local, theirs = (load_file(run.folder / "checkpoints/step_3/model.safetensors") for run in runs)
    assert distance(local, theirs) <= 1e-3 * distance(first, local)  # a server may compute a sample beside different others
    assert ledger_of(runs[0].folder) == ledger_of(runs[1].folder) and len(ledger_of(runs[0].folder)) == 3 * 4
    calls = [run.metrics["tools/calls"] for run in runs]
    assert calls[0] == calls[1] > 0 and runs[1].metrics["fleet/healthy"] == 1


@pytest.mark.slow
def test_async_rollout_workers_beside_a_server_train_each_prompt_once_when_one_dies(ray, overrides, models, tmp_path):
    keys = ["async_training=true", "rollout.max_head_offpolicyness=2", "rollout.workers=2", "total_train_steps=8"]
    with started(items_of(overrides, "ray", "async", *agent(models, tmp_path), *keys), env=there(ray)) as (run, folder):
        begun(folder, 2, run)
        own = psutil.Process(run.pid).children(recursive=True)
        os.kill(processes(folder, "rollout")[0], signal.SIGKILL)
        said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert "rollout worker 1 died" in (folder / "log.txt").read_text()
    last = lines_of(folder / "metrics.jsonl")[-1]
    assert last["remote/replaced"] == 1 and "recover/restarts" not in last and last["staleness/max"] > 0
    assert len(ledger_of(folder)) == last["episodes/trained"] == 8 * 4
    assert not psutil.wait_procs(own, timeout=20)[1]


@pytest.mark.slow
def test_a_controller_that_is_launched_on_ray_has_its_pools_on_the_same_ray(ray, overrides):
    whole, _ = trained(overrides, "local", "whole")
    keys = items_of(overrides, "ray", "launched", "rollout.workers=1")
    with started(keys, "launch", "ray", env=there(ray)) as (run, folder):
        begun(folder, 1, run)
        names = [one.name() for one in psutil.Process().children(recursive=True)]
        said, _ = run.communicate(timeout=100)
    assert run.returncode == 0 and names.count("gcs_server") == 1, said
    assert {one["step"]: one["tensors"] for one in lines_of(folder / "weights.jsonl")} == whole


@pytest.mark.slow
def test_a_student_and_its_teacher_in_workers_of_ray_are_a_local_pair_to_the_bit(ray, overrides, models):
    own = ("reward=", "gconfig.n_samples=")
    keys = [f"teacher.path={models / 'tiny-llama-1'}", *(key for key in overrides if not key.startswith(own))]
    local, theirs = (trained(keys, name, name, module=distill, kind=DistillConfig)[0] for name in ("local", "ray"))
    assert local == theirs


@pytest.mark.slow
@pytest.mark.parametrize(("example", "keys"), [("gsm8k_grpo", KL), ("addition_grpo", ())])
def test_a_script_with_a_loop_of_its_own_trains_on_ray_to_the_bits_of_a_local_run(ray, overrides, example, keys, tmp_path):
    script = runpy.run_path(f"examples/{example}.py")
    for runner in ("local", "ray"):
        script["main"]([*items_of(overrides, runner, runner, *keys), "gconfig.n_samples=4"])
    local, theirs = (next(tmp_path.glob(f"*/{runner}")) for runner in ("local", "ray"))
    saved = [next(one.glob("checkpoints/step_*/*.safetensors")) for one in (local, theirs)]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    metrics = [lines_of(one / "metrics.jsonl")[-1] for one in (local, theirs)]
    assert metrics[0].keys() == metrics[1].keys() and metrics[0]["loss"] == metrics[1]["loss"]


@pytest.mark.slow
def test_a_script_hears_of_a_worker_that_dies(ray, overrides):
    config = load_config(TrainConfig, None, items_of(overrides, "ray", "script", *KL, "reference.backend=fsdp:d1")).config
    with open_training(config) as (_, session):
        pools = session.pools.pools
        batch = session.rollout.prepare_batch(session.loader, session.workflow)
        os.kill(pools["reference"].processes[0], signal.SIGKILL)
        assert "reference_logprobs" in session.reference.compute_logprobs(batch)
        os.kill(pools["actor"].processes[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"the worker of actor \(rank 0 of 1\) died"):
            session.actor.compute_proximal(batch)
        with pytest.raises(AttributeError, match=r"where a script can use only: .*; not 'engine'"):
            assert session.actor.engine


@pytest.mark.slow
def test_a_reward_that_changes_on_the_way_changes_on_ray_too(ray, overrides, tmp_path):
    mine, found = Path(__file__).with_name("changing.py"), []
    for runner in ("local", "ray"):
        given = f"folder='{tmp_path}/tandem/{runner}', call=20, action='reward.add', value='5*{REWARDS}:short', name='even'"
        found.append(trained(overrides, runner, runner, f"reward={mine}:Asks({given})", "total_train_steps=4"))
    assert found[0][0] == found[1][0]
    assert found[0][1]["reward_weights/short"] == found[1][1]["reward_weights/short"] == 5.0


@pytest.mark.slow
def test_a_run_goes_on_under_the_other_runner(ray, overrides):
    whole, _ = trained(overrides, "local", "whole", *PPO)
    for first, then in (("ray", "local"), ("local", "ray")):
        trained(overrides, first, first, *PPO, until=2)
        assert trained(overrides, then, first, *PPO)[0] == whole


@pytest.mark.slow
def test_a_dead_worker_of_a_frozen_model_is_replaced_and_another_one_ends_the_run(ray, overrides):
    whole, _ = trained(overrides, "local", "whole", *PPO)
    config = load_config(TrainConfig, None, items_of(overrides, "ray", "killed", *PPO)).config
    with open_training(config) as (_, session):
        pools, replaced = session.pools.pools, []
        for step in (1, 2, 3):
            if step == 2:
                os.kill(pools["reference"].processes[0], signal.SIGKILL)
            batch, metrics = session.step()
            session.end_step()
            replaced.append(metrics["remote/replaced"])
            assert session.models.digests(session.team) == whole[step]
        assert replaced == [0.0, 1.0, 1.0] and batch["reference_logprobs"].shape == batch["input_ids"].shape
        os.kill(pools["critic"].processes[0], signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"the worker of critic \(rank 0 of 1\) died"):
            session.step()


def ledger_of(folder):
    """Epoch and place of the prompts that a run has trained on."""
    with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        return ledger.execute("select epoch, place from prompts where trained order by epoch, place").fetchall()


def distance(one, other):
    return sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5


def lines_of(file):
    """The lines of a file of JSON."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def begun(folder, step, command):
    """Waits until the run has logged this step; says what it printed where it ends before."""
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert command.poll() is None, command.communicate()[0]
        time.sleep(0.05)


@contextlib.contextmanager
def started(items, *words, **how):
    """`tandem train` (or ``words``) with these, in a process group of its own, and its run folder."""
    given = dict(item.split("=", 1) for item in items)
    command = [sys.executable, "-m", "tandem", *(words or ["train"]), *items]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True} | how
    with subprocess.Popen(command, **how) as run:
        try:
            yield run, Path(given["run.root"]) / "tandem" / given["trial_name"]
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)


def processes(folder, pool):
    """The newest processes of a pool, as the run's log has them."""
    found = re.findall(rf"pool {pool}: process\(es\) ([\d, ]+)", (folder / "log.txt").read_text())
    return [int(number) for number in found[-1].split(", ")]


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("pools", [["critic", "actor"], ["actor", "critic"]], ids="-".join)
def test_when_workers_with_state_die_the_others_go_on_from_the_checkpoint(ray, overrides, pools):
    """The first dies in the step after the first checkpoint; the second is stopped, and so silent, after a later one."""
    keys = [
        *PPO,
        "rollout.verify.every_steps=1",
        "evaluate.every_steps=2",
        "checkpoint.every_steps=2",
        "total_train_steps=6",
    ]
    whole, metrics = trained(overrides, "local", "whole", *keys)
    again = ("recover.max_restarts=2", "recover.silent_after_s=8")
    with started(items_of(overrides, "ray", "mended", *keys, *again), env=there(ray)) as (run, folder):
        lived = {}
        for step, pool, number in ((3, pools[0], signal.SIGKILL), (5, pools[1], signal.SIGSTOP)):
            begun(folder, step, run)
            lived[pool] = processes(folder, pool)
            os.kill(lived[pool][0], number)
        said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    weights = {}
    for line in (folder / "weights.jsonl").read_text().splitlines():
        weights[json.loads(line)["step"]] = json.loads(line)["tensors"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert weights == whole and [line["step"] for line in lines] == list(range(7))
    assert lines[-1]["recover/restarts"] == lines[-1]["remote/replaced"] == 2
    assert {name: lines[-1][name] for name in ("loss", "episodes/trained")} == {
        name: metrics[name] for name in ("loss", "episodes/trained")
    }
    assert not (set(lived["critic"] + lived["actor"]) & set(processes(folder, "critic") + processes(folder, "actor")))
    assert len(re.findall("pool reference: process", (folder / "log.txt").read_text())) == 1
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)], ids=["1-KILL", "0-STOP"])
def test_when_one_of_two_ranks_dies_all_pools_go_on_from_the_checkpoint(ray, overrides, rank, number):
    keys = [*PPO, "actor.backend=fsdp:d2", "critic.backend=fsdp:d1", "checkpoint.every_steps=2", "total_train_steps=5"]
    whole, metrics = trained(overrides, "ray", "whole", *keys)
    again = ("recover.max_restarts=1", "recover.silent_after_s=6")
    with started(items_of(overrides, "ray", "mended", *keys, *again), env=there(ray)) as (run, folder):
        begun(folder, 3, run)
        first = {pool: processes(folder, pool) for pool in ("actor", "critic")}
        os.kill(first["actor"][rank], number)
        said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    lines = lines_of(folder / "metrics.jsonl")
    assert {one["step"]: one["tensors"] for one in lines_of(folder / "weights.jsonl")} == whole
    assert [line["step"] for line in lines] == list(range(1, 6)) and lines[-1]["recover/restarts"] == 1
    assert lines[-1]["episodes/trained"] == metrics["episodes/trained"]
    assert not set(first["actor"]) & set(processes(folder, "actor")) and first["critic"] == processes(folder, "critic")


@pytest.mark.slow
def test_a_death_before_a_checkpoint_begins_anew_and_one_too_many_ends_the_run(ray, overrides):
    whole, _ = trained(overrides, "local", "whole", "total_train_steps=4")
    keys = ["checkpoint.every_steps=3", "total_train_steps=4", "recover.max_restarts=1"]
    with started(items_of(overrides, "ray", "early", *keys), env=there(ray)) as (run, folder):
        begun(folder, 1, run)
        first = processes(folder, "actor")[0]
        os.kill(first, signal.SIGKILL)
        while processes(folder, "actor")[0] == first:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
        begun(folder, 3, run)
        os.kill(processes(folder, "actor")[0], signal.SIGKILL)
        said, _ = run.communicate(timeout=120)
    assert run.returncode == 1 and "the worker of actor (rank 0 of 1) died, and the run with it" in said
    told = [json.loads(line) for line in (folder / "weights.jsonl").read_text().splitlines()]
    assert [one["tensors"] for one in told if one["step"] == 3] == [whole[3]]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[:3] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_a_run_saves_after_TERM_to_its_group_and_its_ray_ends_after_it(ray, overrides, number):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    keys = ["total_train_steps=200", "checkpoint.every_steps=100"]
    with started(items_of(overrides, "ray", "termed", *keys), env=env) as (run, folder):
        begun(folder, 1, run)
        theirs = psutil.Process(run.pid).children(recursive=True)
        assert {"raylet", "gcs_server"} <= {one.name() for one in theirs}
        os.killpg(run.pid, number)
        said, _ = run.communicate(timeout=90)
    _, left = psutil.wait_procs(theirs, timeout=20)
    assert not left
    if number == signal.SIGTERM:
        info = json.loads((folder / "run.json").read_text())
        assert run.returncode == 130 and info["status"] == "interrupted" and info["steps"] == saved(folder), said


def saved(folder):
    """The step of the newest checkpoint."""
    return max(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_what_cannot_be_on_ray_is_refused_before_there_is_a_run_folder(ray, overrides, tmp_path):
    for keys, words in (
        (["memory_limit_gib=1"], "memory_limit_gib"),
        (["rollout.balance=auto", "async_training=true"], "rollout.balance"),
    ):
        with pytest.raises(ConfigError, match=f"runner=ray does not go with {words}"):
            trained(overrides, "ray", "refused", "deterministic=false", *keys)
    assert not (tmp_path / "tandem" / "refused").exists()


def test_models_that_share_a_memory_or_take_over_weights_are_in_one_pool(overrides):
    plan = plan_run(load_config(TrainConfig, None, items_of(overrides, "ray", "planned", *PPO)).config)
    pools = pools_by_role(plan)
    assert {pools[name] for name in ("actor", "publisher")} == {"actor"} and "rollout" not in pools
    assert pools["reference"] == "reference" and pools["critic"] == "critic"
    refreshed = items_of(overrides, "ray", "planned", *KL, "reference.refresh_every_steps=1", "reference.backend=fsdp:d1")
    plan = plan_run(load_config(TrainConfig, None, refreshed).config)
    assert pools_by_role(plan)["reference"] == "actor"
    assert [one.name for one in part_of(plan, "actor").residents] == ["actor", "reference"]
