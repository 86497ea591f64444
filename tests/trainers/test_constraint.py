"""A term of the reward that is a cost: a Lagrange multiplier keeps its mean at or below a limit."""

import json
from pathlib import Path

import pytest
import torch

from tandem.algorithms.shaping import lagrangian, next_multiplier
from tandem.api.batch import pack
from tandem.api.failures import BatchError
from tandem.cli.main import main
from tandem.config.algorithm import ConstraintConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.plan import plan_run
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.constraint import Constraint
from tandem.trainers.loop import train

REWARDS = Path(__file__).parent / "small_rewards.py"
BOTH = f"reward={REWARDS}:useful + {REWARDS}:harmful"
STEPS = "model(path=nowhere, name=harmful, steps='e', aggregate=none)"
LIMIT = ["constraint.cost=harmful", "constraint.limit=0.1"]


def resolved(overrides, *more):
    items = {item.partition("=")[0]: item for item in [*overrides, "deterministic=true", BOTH, *LIMIT, *more]}
    return load_config(TrainConfig, None, list(items.values()))


def steps(summary):
    return [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]


def samples_of(summary, step):
    return [json.loads(line) for line in (summary.folder / f"trajectories/step_{step}.jsonl").read_text().splitlines()]


def batch_of(costs, rewards=None, **more):
    rows = []
    for i, cost in enumerate(costs):
        row = {"input_ids": [1, 2], "loss_mask": [False, True], "reward": (rewards or costs)[i], "sample_id": i}
        rows.append(row | {"in_statistics": True, "rewards/harmful": cost} | {k: v[i] for k, v in more.items()})
    return pack(rows)


def test_the_multiplier_moves_by_the_mean_cost_above_the_limit_within_bounds():
    rule = {"limit": 0.1, "step_size": 0.5, "low": 0.0, "high": 2.0}
    assert next_multiplier(1.0, 0.3, **rule) == pytest.approx(1.1)
    assert next_multiplier(1.0, 0.0, **rule) == pytest.approx(0.95)
    assert next_multiplier(0.01, 0.0, **rule) == 0.0 and next_multiplier(1.95, 1.0, **rule) == 2.0
    found = lagrangian(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), 3.0)
    assert found.tolist() == [0.25, -1.25]


def test_samples_outside_statistics_do_not_count_and_those_without_cost_cost_nothing():
    rests = iter([False, True, False, False])
    config = ConstraintConfig(cost="harmful", limit=0.5, step_size=1.0, multiplier=1.0)
    constraint = Constraint(config, resting=lambda: next(rests))
    batch = batch_of([1.0, 0.0, float("nan"), 9.0], [1.0, 2.0, 4.0, 0.0], in_statistics=[True, True, True, False])
    assert constraint.follow(batch) == {"constraint/cost": 0.5, "constraint/multiplier": 1.0}
    assert constraint.penalise(batch)["reward"].tolist() == [0.0, 1.0, 2.0, -4.5]
    assert batch["reward"].tolist() == [1.0, 2.0, 4.0, 0.0]
    assert constraint.follow(batch_of([1.0, 1.0]))["constraint/multiplier"] == 1.0
    assert constraint.follow(batch_of([1.0, 1.0]))["constraint/multiplier"] == 1.5
    assert "constraint/cost" not in constraint.follow(batch_of([float("nan")]))


def test_replayed_samples_are_penalised_and_do_not_move_the_multiplier_again(overrides):
    constraint = Constraint(ConstraintConfig(cost="harmful", limit=0.5, step_size=1.0, multiplier=1.0))
    batch = batch_of([1.0, 0.0, 1.0], replayed=[False, False, True])
    assert constraint.follow(batch) == {"constraint/cost": 0.5, "constraint/multiplier": 1.0}
    assert constraint.penalise(batch)["reward"].tolist() == [0.0, 0.0, 0.0]
    replay = ["rollout.replay.groups=2", "algorithm.correction.weight=truncate", "tracking.trajectories_per_step=99"]
    summary = train(resolved(overrides, *replay, "total_train_steps=4"))
    found = steps(summary)
    assert sum(row["replay/groups"] for row in found) > 0
    for row in found:  # records are of new samples
        costs = [one["rewards"]["harmful"] for one in samples_of(summary, row["step"])]
        assert row["constraint/cost"] == pytest.approx(sum(costs) / len(costs), abs=1e-6)


def test_a_cost_is_not_discounted_by_the_turns_before_it(overrides):
    """No answer is right, so a sample that is not cut off has another turn. Costs are eighths."""
    turns = ["workflow=multi_turn(max_turns=3, turn_discount=0.01)", f"reward={REWARDS}:never_right + {REWARDS}:harmful"]
    summary = train(resolved(overrides, *turns, "total_train_steps=1", "tracking.trajectories_per_step=99"))
    parts = [one["rewards"] for one in samples_of(summary, 1)]
    assert all(one["harmful"] * 8 % 1 == 0 for one in parts)
    assert any(one["harmful"] > 0 > one["never_right"] > -0.01 for one in parts)


def test_trajectories_of_a_sample_cost_once_and_token_rewards_are_scaled_too():
    constraint = Constraint(ConstraintConfig(cost="harmful", step_size=0.0))
    batch = batch_of([1.0, 1.0, 0.0], sample_id=[0, 0, 1], token_rewards=[[0.0, 2.0]] * 3)
    assert constraint.follow(batch)["constraint/cost"] == 0.5
    assert constraint.penalise(batch)["token_rewards"].tolist() == [0.0, 1.0] * 3


def test_a_batch_without_the_cost_is_refused_by_name():
    with pytest.raises(BatchError, match=r"constraint.cost=rude: no sample .* there are harmful"):
        Constraint(ConstraintConfig(cost="rude")).follow(batch_of([1.0]))


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("more", [["algorithm=grpo"], ["algorithm=ppo", "critic.warmup_steps=1"], ["async_training=true"]])
def test_the_cost_is_measured_and_not_rewarded_and_the_multiplier_follows_it(overrides, more):
    more = [*more, *(["deterministic=false", "algorithm.correction.weight=truncate"] if "async" in more[0] else [])]
    summary = train(resolved(overrides, *more, "tracking.trajectories_per_step=99"))
    multiplier, rests = 1.0, "algorithm=ppo" in more
    for row in steps(summary):
        said = samples_of(summary, row["step"])
        assert row["reward/mean"] == pytest.approx(row["rewards/useful"], abs=1e-6)
        assert row["constraint/cost"] == pytest.approx(sum(one["rewards"]["harmful"] for one in said) / len(said), abs=1e-6)
        if not (rests and row["step"] == 1):  # while the critic warms up
            multiplier += 0.1 * (row["constraint/cost"] - 0.1)
        assert row["constraint/multiplier"] == pytest.approx(multiplier, abs=1e-6)
    assert multiplier != 1.0


def test_a_cost_may_be_the_score_of_a_model_and_another_data_set_may_have_none(overrides, model, tmp_path):
    config = load_config(TrainConfig, None, [f"actor.path={model}", "actor.dtype=float32", "train_dataset.path=addition"])
    judge = SpreadEngine(config.config.actor, 1, head="scalar")
    judge.load_weights((name, torch.randn_like(x) if x.shape[0] == 1 else x) for name, x in judge.weights())
    judge.save(tmp_path / "judge")
    load_tokenizer(model).save_pretrained(tmp_path / "judge")
    for name in ("a", "b"):
        rows = [{"question": f"{i} and {name}?", "answer": "1"} for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cost = f"2*model(path={tmp_path}/judge, name=safety, center=1)"
    sources = f"[{{path: {tmp_path}/a.jsonl, reward: '{REWARDS}:even + {cost}'}}, {{path: {tmp_path}/b.jsonl}}]"
    data = [f"train_dataset.sources={sources}", f"reward={REWARDS}:even", "constraint.cost=safety"]
    keys = [item for item in overrides if not item.startswith("train_dataset.path")]
    summary = train(resolved(keys, *data, "tracking.trajectories_per_step=99"))
    found = steps(summary)
    said = [one["rewards"].get("safety") for one in samples_of(summary, 1)]
    costs = [cost for cost in said if cost is not None]
    assert 0 < len(costs) < len(said)
    assert found[0]["constraint/cost"] == pytest.approx(sum(costs) / len(costs), abs=1e-5)
    assert found[0]["reward/mean"] >= 0  # even is a share; the cost is nowhere in it


def test_a_batch_may_be_of_rows_alone_whose_recipe_has_no_such_cost(overrides, tmp_path):
    rows = [{"prompt": f"{i}?", "answer": "1", "task": "free" if i < 4 else "held"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipes = f"reward={{by: task, recipes: {{free: '{REWARDS}:useful', held: '{REWARDS}:useful + {REWARDS}:harmful'}}}}"
    keys = [f"train_dataset.path={tmp_path}/rows.jsonl", recipes, "rollout.batch_size=1", "total_train_steps=8"]
    found = steps(train(resolved(overrides, *keys)))
    there = ["constraint/cost" in row for row in found]
    assert sum(there) == 4 and all(("rewards/harmful" in row) == has for row, has in zip(found, there, strict=True))
    before = 1.0
    for row, has in zip(found, there, strict=True):
        assert (row["constraint/multiplier"] != before) == has  # λ rests where nothing costs
        before = row["constraint/multiplier"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:4])))
    with pytest.raises(ConfigError, match=r"constraint.cost=harmful: no row of train_dataset is judged by a reward with"):
        train(resolved(overrides, *keys, "trial_name=none"), dry_run=True)


def test_without_a_multiplier_the_run_is_the_one_without_a_constraint_to_the_bit(overrides):
    free = ["constraint.step_size=0", "constraint.multiplier=0"]
    one = train(resolved(overrides, *free, "checkpoint.at_end=true"))
    plain = [item for item in overrides if not item.startswith("reward=")]
    other = [*plain, f"reward={REWARDS}:useful", "deterministic=true", "trial_name=other", "checkpoint.at_end=true"]
    two = train(load_config(TrainConfig, None, other))
    assert (one.checkpoint / "model.safetensors").read_bytes() == (two.checkpoint / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["constraint.cost=harmfull"], r"constraint.cost=harmfull is no term of reward=.*did you mean 'harmful'\?"),
        ([f"reward={REWARDS}:useful + 0*{REWARDS}:harmful"], "its weight in the reward is 0"),
        ([f"reward={REWARDS}:useful - {REWARDS}:harmful"], "its weight in the reward is -1"),
        ([f"reward={REWARDS}:harmful"], "add a term to be maximised"),
        ([f"reward={REWARDS}:useful + {REWARDS}:harmful(normalise=group)"], "normalise takes away the mean"),
        (["algorithm=ppo", f"reward={REWARDS}:useful + {STEPS}"], "aggregate=none .* a cost is one number"),
        (["constraint.multiplier=20"], "constraint.multiplier must be a number, at least 0, at most 10, got 20"),
        (["constraint.step_size=-1"], "constraint.step_size must be a number, at least 0"),
        (["constraint.cost=null"], "constraint.limit=0.1 is not used because no term of the reward is a cost"),
        (["algorithm.filter=dynamic_sampling"], "contradicts algorithm.filter=dynamic_sampling"),
        (["algorithm=gdpo"], "contradicts algorithm.advantage=gdpo"),
        (["algorithm=ttrl"], "contradicts algorithm.labels=majority"),
    ],
)
def test_a_constraint_that_cannot_hold_is_refused_before_the_run(overrides, keys, words):
    with pytest.raises(ConfigError, match=words):
        train(resolved(overrides, *keys), dry_run=True)


def test_the_graph_shows_where_the_multiplier_follows_and_where_it_weighs(overrides, model, tmp_path, capsys):
    plan = plan_run(resolved(overrides).config)
    names = [stage.name for stage in plan.stages]
    assert names[names.index("multiplier") :][:3] == ["multiplier", "penalty", "advantages"]
    free = plan_run(resolved(overrides, "constraint.cost=null", "constraint.limit=0").config)
    assert not {"multiplier", "penalty"} & {stage.name for stage in free.stages}
    file = tmp_path / "run.yaml"
    file.write_text(f"actor: {{path: {model}}}\ntrain_dataset: {{path: addition}}\n")
    assert main(["graph", str(file), BOTH, *LIMIT]) == 0
    shown = capsys.readouterr().out
    assert "constraint.follow" in shown and "constraint.penalise" in shown


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.timeout(120)
def test_the_constraint_holds_the_cost_below_its_limit_where_the_free_run_breaks_it(overrides):
    """The control is free: its multiplier is 0 and stays so. Both learn; what harms is worth more to the free run."""
    keys = ["total_train_steps=25", "gconfig.n_samples=8", "checkpoint.at_end=false"]
    held = steps(train(resolved(overrides, *keys)))[-8:]
    free = ["constraint.multiplier=0", "constraint.step_size=0", "trial_name=free"]
    broken = steps(train(resolved(overrides, *keys, *free)))[-8:]

    def mean(rows, name):
        return sum(row[name] for row in rows) / len(rows)

    assert mean(held, "constraint/cost") <= 0.1 < 0.8 < mean(broken, "constraint/cost")
    assert 0.5 < mean(held, "reward/mean") < mean(broken, "reward/mean")
