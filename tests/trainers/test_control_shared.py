"""Rewards that come and go between models that share their trunk, and judges that write beside them."""

import gc
import json
import shutil

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.recipes import Change
from tandem.flow.plan import plan_run
from tandem.flow.sleep_plan import GIB, sleep_plan_here
from tandem.state.control import FOLDER, ask
from tandem.trainers.loop import train
from tests.tiny import tiny_model_folder
from tests.trainers.colocated import keys_of
from tests.trainers.test_control import MINE, folder_of, rows
from tests.trainers.test_sharing import adapted_judge
from tests.trainers.test_written_judges import judge_folder

NAMES = ("helpful", "harmless", "brief")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy, three reward models that are adapters on it, and a judge that writes."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_model_folder(folder).rename(folder / "policy")
    for seed, name in enumerate(NAMES, 1):
        adapted_judge(folder / "policy", folder / f"{name}-judge", seed)
    judge_folder(folder).rename(folder / "writes")
    return folder


def config_of(root, models, reward, *more):
    keys = [f"reward={reward}", "algorithm.kl.coefficient=0", "checkpoint.every_steps=1", "total_train_steps=4", *more]
    return load_config(TrainConfig, None, keys_of(root, models, (), *keys))


def tight(resolved):
    """A budget that holds the largest stage, and next to nothing else."""
    plan = sleep_plan_here(resolved.config, plan_run(resolved.config))
    return f"memory_limit_gib={1.01 * plan.least(plan.largest) / GIB}"


def term(models, name):
    return f"0.5*model(path={models}/{name}-judge, name={name})"


CHANGES = ("add harmless", "remove helpful", "weight helpful=0", "add brief", "remove harmless")
"""The first model has the shared weights in its memory, so it stays; the others come and go."""


def changed(root, models, *more):
    resolved = config_of(root, models, f"{term(models, 'helpful')} + 0*{MINE}:Engines", *more)
    gc.collect()  # the models of runs before
    train(resolved, until=1)
    folder = folder_of(resolved)
    for words in CHANGES:
        action, value = words.split()
        ask(folder, Change(f"reward.{action}", term(models, value) if action == "add" else value))
    gc.collect()
    train(resolved, until=3)
    return resolved, folder


@pytest.mark.slow
def test_models_borrow_from_one_that_stays_and_the_one_that_lends_cannot_go(models, tmp_path):
    resolved, folder = changed(tmp_path / "awake", models)
    answers = [json.loads(path.read_text()) for path in sorted((folder / FOLDER).glob("*.answer"))]
    assert [answer.get("step") for answer in answers] == [2, None, 2, 2, 2]
    assert "that of 'harmless' shares its weights" in answers[1]["refused"]
    first, *others = rows(folder)
    assert first["raw_rewards/Engines"] == 3  # policy, critic, helpful
    for row in others:
        assert {name for name in row if name.startswith("rewards/")} == {
            f"rewards/{n}" for n in ("helpful", "brief", "Engines")
        }
        assert row["rewards/helpful"] == 0 and row["rewards/brief"] != 0
        assert row["raw_rewards/Engines"] == 4  # the model that went is not in memory any more

    asleep = changed(
        tmp_path / "asleep", models, tight(config_of(tmp_path, models, resolved.config.reward, "memory_limit_gib=1"))
    )[1]
    assert rows(asleep) == rows(folder)
    assert (asleep / "weights.jsonl").read_text() == (folder / "weights.jsonl").read_text()
    assert json.loads((asleep / "metrics.jsonl").read_text().splitlines()[-1])["memory/moved_gib"] > 0

    shutil.rmtree(folder / "checkpoints" / "step_3")
    gc.collect()
    train(resolved, until=3)
    assert rows(folder) == rows(asleep)


def test_a_judge_that_writes_neither_lends_nor_borrows(models, tmp_path):
    writes = f"judge(model={models}/helpful-judge)"
    plan = plan_run(config_of(tmp_path, models, f"{writes} + {term(models, 'helpful')} + {term(models, 'brief')}").config)
    assert {one.name: one.trunk_of for one in plan.residents if one.trunk_of} == {"brief": "helpful"}
    writer = plan.resident("judge")
    assert writer.adapter is None and writer.engine.path == f"{models}/helpful-judge" and writer.ranks == (0,)


def test_a_judge_that_writes_sleeps_beside_models_that_share_their_weights(models, tmp_path):
    reward = f"judge(model={models}/writes, max_tokens=16) + {term(models, 'helpful')} + {term(models, 'brief')}"
    more = ("rollout.engine.kv_cache_gib=0.0003", "total_train_steps=2")
    limit = tight(config_of(tmp_path, models, reward, *more, "memory_limit_gib=1"))
    awake, asleep = (
        config_of(tmp_path / name, models, reward, *more, *keys) for name, keys in (("awake", ()), ("asleep", (limit,)))
    )
    found = [rows(train(resolved).folder) for resolved in (awake, asleep)]
    assert found[0] == found[1]
    assert [row["rewards/judge"] for row in found[0]] == [pytest.approx(6 / 9)] * 2
