"""A judge that fails for most samples ends the run by name, and a policy cannot escape it by answers that hang it."""

import json
import time
from pathlib import Path

import pytest

from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train
from tests.rewards.asked import server
from tests.trainers.colocated import outcome

REWARDS = Path(__file__).parent / "small_rewards.py"
JUDGED = (f"reward={REWARDS}:hangs_on_most", "reward_timeout_s=0.3", "gconfig.n_samples=4", "rollout.batch_size=2")


def run(overrides, *more):
    items = {item.partition("=")[0]: item for item in (*overrides, *more)}
    return train(load_config(TrainConfig, None, list(items.values())))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.invariant
def test_answers_that_hang_the_judge_are_not_trained_on_and_end_the_run(overrides, tmp_path):
    with pytest.raises(TandemError, match=r"3 episodes in a row.*reward_timeout: \d of 4 samples failed, .* took longer"):
        run(overrides, *JUDGED, "rollout.max_data_failures=3")
    (info,) = tmp_path.glob("*/*/run.json")
    assert json.loads(info.read_text())["status"] == "failed"
    log = (info.parent / "log.txt").read_text()
    assert log.count("a sample failed and is missing in its group (reward_timeout") == 1


@pytest.mark.slow
@pytest.mark.invariant
def test_also_where_a_single_judged_sample_is_allowed_to_make_a_group(overrides, tmp_path):
    items = ["rollout.min_group_size=1", "rollout.max_data_failures=8", "total_train_steps=100"]
    with pytest.raises(TandemError, match="8 episodes in a row were dropped, or lost most of their samples"):
        run(overrides, *JUDGED, *items)
    (folder,) = tmp_path.glob("*/*")
    steps = rows(folder)
    assert steps and steps[-1]["groups/size"] < 2.5
    assert steps[-1]["samples/failed/reward_timeout"] > 4 * steps[-1]["episodes/trained"] / 2


def test_a_judge_that_fails_now_and_then_is_counted_and_the_run_goes_on(overrides):
    items = [f"reward={REWARDS}:fails_now_and_then", "gconfig.n_samples=8", "rollout.max_data_failures=30"]
    last = rows(run(overrides, *items).folder)[-1]
    trained, dropped = last["episodes/trained"], last.get("episodes/dropped/reward_raised", 0)
    assert trained == 2 * 4
    assert 0 < last["samples/failed/reward_raised"] < 8 * (trained + dropped) / 2


def test_workers_that_no_reward_has_are_refused_and_the_wait_for_judges_is_shown(overrides):
    with pytest.raises(ConfigError, match="reward_workers=3 is not used: reward=gsm8k runs inside the run"):
        run(overrides, "reward=gsm8k", "reward_workers=3")
    with pytest.raises(ConfigError, match=r"reward_workers=5 is not used: reward=math\(workers=3\) sets its number of"):
        run(overrides, "reward=math(workers=3)", "reward_workers=5")
    for row in rows(run(overrides, "reward_workers=1", f"reward={REWARDS}:slow_now_and_then").folder):
        assert 0 < row["time/judge_s"] <= row["time/judge_max_s"] < row["time/step_s"]


@pytest.mark.slow
@pytest.mark.invariant
def test_a_reward_server_that_answers_500_for_a_while_costs_a_run_nothing_but_time(overrides, tmp_path):
    """The same weights, rewards and metrics as of the run whose server was well."""
    came, outage_s = [], 0.0

    def score(body):
        came.append(time.monotonic())
        if came[-1] - came[0] < outage_s:
            return 500, {"error": "busy"}
        results = [{"question": n, "score": len(q["completion"]) / 9} for n, q in enumerate(body["questions"])]
        return 200, {"results": results}

    outcomes = []
    for outage_s in (0.0, 1.5):
        came.clear()
        with server(score) as (url, _):
            items = [f"reward=remote(url={url}, patience_s=60)", "deterministic=true", f"run.root={tmp_path}/{outage_s}"]
            folder = run(overrides, *items, "total_train_steps=2", "tracking.trajectories_per_step=99").folder
        assert not any(key.startswith("samples/failed") for row in rows(folder) for key in row)
        assert (came[-1] - came[0] > 1.5) >= bool(outage_s)
        outcomes.append(outcome(folder))
    assert outcomes[0] == outcomes[1]
