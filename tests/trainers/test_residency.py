"""Models that take turns in one memory: the run is the one in which all of them stay awake, in less memory."""

import functools
import itertools
import json
import math
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.api.team import Team
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.planned_models import Resident
from tandem.flow.process import Process
from tandem.flow.residency import Residency
from tandem.flow.sleep_plan import GIB, Part, PartCost, SleepPlan, StageNeeds
from tandem.models.shape import read_shape
from tandem.planning.fit import Plan
from tandem.planning.job import job_of
from tandem.tracking.statistics import PhaseTimer
from tandem.trainers.lengths import known_lengths
from tandem.trainers.loop import train
from tests.trainers.colocated import CLOCK, JUDGES, judge_folder, keys_of, make_models, outcome, rows
from tests.trainers.planning import round_machine


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colocated")
    make_models(folder)
    return folder


def config_of(keys):
    return load_config(TrainConfig, None, keys)


def run(root, models, *more, order=JUDGES):
    return train(config_of(keys_of(root, models, order, *more)))


TIGHT = "memory_limit_gib=0.00088"
"""Of models of 152 to 230 kB: little more than actor and critic, which are saved together."""

EVALUATED = ("evaluate.every_steps=1", "evaluate.max_rows=2", "checkpoint.every_steps=1", "total_train_steps=3")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="plain"),
        pytest.param(EVALUATED, id="evaluated and saved", marks=[pytest.mark.slow, pytest.mark.invariant]),
        pytest.param(("actor.lora.rank=2",), id="adapters", marks=[pytest.mark.slow, pytest.mark.invariant]),
    ],
)
def test_a_run_whose_models_sleep_is_the_run_in_which_all_are_awake_to_the_bit(models, tmp_path, more):
    limit = "memory_limit_gib=0.0007" if "actor.lora.rank=2" in more else TIGHT
    awake = run(tmp_path / "awake", models, *more)
    for order in (JUDGES, JUDGES[::-1]):
        asleep = run(tmp_path / order[0], models, limit, *more, order=order)
        assert outcome(asleep.folder) == outcome(awake.folder)
        last = rows(asleep.folder)[-1]
        assert last["memory/moved_gib"] > 0 and last["time/switch_s"] > 0
    assert "memory/moved_gib" not in rows(awake.folder)[-1]


@pytest.mark.slow
@pytest.mark.invariant
def test_three_reward_models_that_take_turns_give_the_same_in_each_of_their_orders(tmp_path):
    names = (*JUDGES, "third")
    make_models(tmp_path, names)
    awake = outcome(run(tmp_path / "awake", tmp_path, order=names).folder)
    for order in itertools.permutations(names):
        asleep = run(tmp_path / "-".join(order), tmp_path, TIGHT, order=order).folder
        assert outcome(asleep) == awake and rows(asleep)[-1]["memory/moved_gib"] > 0


def test_groups_that_are_drawn_again_find_the_engine_awake(models, tmp_path):
    more = (
        "algorithm.filter=dynamic_sampling",
        "train_dataset.size=64",
        "gconfig.temperature=0.3",
        "gconfig.max_new_tokens=2",
        "total_train_steps=2",
    )
    awake, asleep = run(tmp_path / "awake", models, *more), run(tmp_path / "asleep", models, TIGHT, *more)
    assert outcome(asleep.folder) == outcome(awake.folder)
    assert rows(asleep.folder)[-1]["groups/without_spread"] == 0


def test_what_the_run_moves_is_what_the_plan_says(models, tmp_path):
    keys = ("memory_limit_gib=0.0006", "checkpoint.resumable=false")  # too little for the optimizers of actor and critic
    asleep = run(tmp_path, models, *keys, "total_train_steps=4")
    config, machine = asleep_config(tmp_path, models, *keys), round_machine()
    job = job_of(config, machine, known_lengths(config).lengths, functools.cache(read_shape))
    steady, last = [done for done in job.sleeping.steady() if done.stage.each_step], rows(asleep.folder)[-1]
    assert last["memory/moved_gib"] == pytest.approx(sum(done.total for done in steady) / GIB)
    moved = {name: gib for name, gib in last.items() if name.startswith("memory/moved_gib/") and gib}
    planned = {d.stage.name.replace(": ", "_").replace(" ", "_"): d.total / GIB for d in steady if d.total}
    assert moved == {f"memory/moved_gib/{name}": pytest.approx(gib) for name, gib in planned.items()}
    assert 0 < last["memory/moved_optimizer_gib"] < last["memory/moved_gib"]
    seconds = [value for name, value in last.items() if name.startswith("time/switch_s/")]
    assert sum(seconds) == pytest.approx(last["time/switch_s"])
    assert 0 < last["time/switch_optimizer_s"] < last["time/switch_s"]


class Moves:
    """A model of which this rank has so many bytes."""

    def __init__(self, num_bytes, seconds):
        self.num_bytes, self.seconds = num_bytes, seconds

    def offload(self, parts, scratch=None):
        return 0

    def onload(self, parts):
        time.sleep(self.seconds)
        return self.num_bytes


@pytest.mark.parametrize(("one_memory", "moved"), [(True, 2), (False, 1.5)])
def test_what_the_other_ranks_move_counts_too(tmp_path, one_memory, moved):
    def rank(num_bytes, seconds, gather):
        parts = {Part(name, "parameters"): PartCost(GIB, 0, GIB) for name in ("judge", "other")}
        stages = tuple(StageNeeds(part.resident, frozenset({part})) for part in parts)
        plan = SleepPlan(parts, stages, GIB, one_memory=one_memory)
        team = Team.alone()
        team.gather = gather
        made = Residency(plan, tmp_path, PhaseTimer(), lambda *_, **__: Moves(num_bytes, seconds), team)
        for name in ("judge", "other"):
            made.open(Resident(name), Process("cpu", 1))
        made.enter("judge")
        return made

    told = []
    rank(int(1.5 * GIB), 0.02, lambda own: [told.append(own) or own]).metrics()
    found = rank(GIB // 2, 0.0, lambda own: [own, *told]).metrics()
    assert found["memory/moved_gib"] == found["memory/moved_gib/judge"] == moved
    assert found["time/switch_s"] >= found["time/switch_s/judge"] >= 0.02


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_goes_on_under_another_limit_and_is_the_same(models, tmp_path):
    more = ("checkpoint.every_steps=1", "total_train_steps=3")
    whole = run(tmp_path / "whole", models, *more)
    keys = keys_of(tmp_path / "parts", models, JUDGES, *more)
    train(config_of(keys), until=1)
    train(config_of([*keys, TIGHT]), until=2)
    parts = train(config_of(keys))
    assert {name: outcome(parts.folder)[name] for name in ("saved", "metrics", "weights", "samples")} == {
        name: outcome(whole.folder)[name] for name in ("saved", "metrics", "weights", "samples")
    }


def asleep_config(root, models, *more):
    return config_of(keys_of(root, models, JUDGES, TIGHT, *more)).config


def test_a_budget_that_is_too_small_is_refused_before_there_is_a_run_folder(models, tmp_path):
    with pytest.raises(ConfigError, match=r"memory_limit_gib=0\.0001 cannot hold the stage"):
        run(tmp_path / "runs", models, "memory_limit_gib=0.0001")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.invariant
def test_a_script_whose_models_sleep_has_the_same_weights_and_metrics_to_the_bit(models, tmp_path):
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "rlhf.py"))
    more = ["critic.path=null", "evaluate.every_steps=1", "evaluate.max_rows=2", "checkpoint.every_steps=1"]
    more += ["experiment_name=tandem", "trial_name=trial"]
    found = []
    for name, limit in {"awake": "memory_limit_gib=null", "asleep": TIGHT}.items():
        script["main"](keys_of(tmp_path / name, models, JUDGES, *more, limit))
        folder = tmp_path / name / "tandem" / "trial"
        saved = {path.relative_to(folder): path.read_bytes() for path in folder.glob("checkpoints/**/*.safetensors")}
        lines = [{key: x for key, x in row.items() if not key.startswith(CLOCK)} for row in rows(folder)]
        found.append((saved, lines))
    assert len(found[0][0]) == 4 and len(found[0][1]) == 3  # actor and critic of two steps; three evaluations
    assert found[1] == found[0]


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_that_is_killed_between_sleep_and_wake_goes_on_as_if_nothing_had_been(zygote, models, tmp_path):
    more = (TIGHT, "checkpoint.every_steps=1", "total_train_steps=4")
    whole = run(tmp_path / "whole", models, *more)
    keys = keys_of(tmp_path / "killed", models, JUDGES, *more)
    status = zygote.call("tests.trainers.colocated:train_and_die", [keys, 16], tmp_path / "log")
    assert status == -signal.SIGKILL, (tmp_path / "log").read_text()
    folder = tmp_path / "killed" / "tandem" / "trial"
    assert list((folder / "checkpoints").iterdir())  # it had come to a checkpoint
    status = zygote.call("tests.trainers.colocated:train_and_die", [keys, 0], tmp_path / "log")
    assert status == 0, (tmp_path / "log").read_text()
    assert outcome(folder)["saved"] == outcome(whole.folder)["saved"]
    assert outcome(folder)["metrics"] == outcome(whole.folder)["metrics"]
    assert list((folder / "asleep").iterdir()) == []


BIG = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""52 MB; the judges have 79 and 105."""


def in_process(root: Path, models: Path, cap_mib: int, *more: str):
    command = [sys.executable, "-m", "tests.trainers.colocated", str(root), str(models), str(cap_mib), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def peak(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def planned_mib(keys) -> float:
    """The worst instant of the plan, with what the heap keeps beside the models in place of the interpreter."""
    config = config_of(keys).config
    machine = round_machine(process_gib=0.032)
    job = job_of(config, machine, known_lengths(config).lengths, functools.cache(read_shape))
    return Plan(job, machine).peak_gib() * 1024


def rlhf_keys(models: Path) -> tuple[str, ...]:
    """Two reward models, a safety model that is a cost, and a judge that writes."""
    scalar = " + ".join(f"0.5*model(path={models}/{name}-judge, name={name})" for name in (*JUDGES, "safety"))
    reward = f"reward={scalar} + 0.2*judge(model={models}/writer, max_tokens=16)"
    return (reward, "constraint.cost=safety", "rollout.engine.kv_cache_gib=0.01", "total_train_steps=2")


def make_rlhf_models(folder: Path, **size: int) -> Path:
    folder.mkdir()
    make_models(folder, (*JUDGES, "safety"), **size)
    judge_folder(folder, **size).rename(folder / "writer")
    return folder


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.timeout(1500)
def test_under_the_planned_peak_a_run_finishes_that_cannot_with_everything_awake(tmp_path):
    """PPO with a critic, a reference, two reward models, a safety model and a judge that writes, all with bases of their
    own: together they keep 0.6 GiB, of which 0.26 are awake at a time."""
    small, big = make_rlhf_models(tmp_path / "small"), make_rlhf_models(tmp_path / "models", **BIG)
    base = peak(in_process(tmp_path / "base", small, 0, *rlhf_keys(small)))  # of models that are next to nothing
    keys, limit = rlhf_keys(big), "memory_limit_gib=0.26"
    planned = planned_mib(keys_of(tmp_path, big, JUDGES, *keys, limit))
    cap = math.ceil(base["VmData"] + 1.1 * planned)

    measured = peak(in_process(tmp_path / "watched", big, 0, *keys, limit))
    asleep = in_process(tmp_path / "asleep", big, cap, *keys, limit)
    awake = in_process(tmp_path / "awake", big, cap, *keys)
    free = in_process(tmp_path / "free", big, 0, *keys)
    assert measured["RssAnon"] - base["RssAnon"] == pytest.approx(planned, rel=0.05)
    assert asleep.returncode == 0, asleep.stderr
    assert awake.returncode != 0 and "emory" in awake.stderr
    assert free.returncode == 0, free.stderr
    folders = [tmp_path / name / "tandem" / "trial" for name in ("asleep", "free")]
    assert outcome(folders[0]) == outcome(folders[1])
    assert rows(folders[0])[-1]["rewards/judge"] == pytest.approx(0.2 * 6 / 9)
