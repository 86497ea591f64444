"""Rewards of models, awaited in the middle of an episode: the model stays awake, and one that hangs costs a sample."""

import asyncio
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tandem.api.failures import InfrastructureFailure, WrongWorkflow
from tandem.api.workflow import Sample
from tandem.flow import draw, scoring
from tandem.flow.plan import plan_run
from tandem.flow.scoring import EpisodeScores, ScoreRole
from tandem.flow.sleep_plan import Part, sleep_plan_here
from tandem.trainers.loop import train
from tests.trainers.scoring import resolved, samples_of, steps


def test_a_score_that_hangs_in_an_episode_fails_its_sample_alone(overrides, models):
    keys = [f"workflow={models}/mine.py:Asks", "total_train_steps=1", "reward_timeout_s=0.5", "rollout.min_group_size=1"]
    summary = train(resolved(overrides, *keys, f"reward={models}/mine.py:SometimesHangs(path={models}/tiny-llama-1)"))
    last = steps(summary)[-1]
    assert last["samples/failed/reward_timeout"] == 4 and len(samples_of(summary)) == 12  # none is lost behind them
    assert [one.name for one in threading.enumerate()].count("score-in-episode") <= 3  # loops were interrupted


def test_scores_that_hang_again_and_again_in_episodes_end_the_run(overrides, models):
    keys = [f"workflow={models}/mine.py:Asks", "reward_timeout_s=0.1", "rollout.max_data_failures=99"]
    with pytest.raises(WrongWorkflow, match=r"mine.py:AlwaysHangs' took .* and (8|9|\d\d) calls of it hang in threads"):
        train(resolved(overrides, *keys, f"reward={models}/mine.py:AlwaysHangs(path={models}/tiny-llama-1)"))


def test_a_score_that_is_asked_while_the_run_closes_fails_at_once(monkeypatch):
    scores = EpisodeScores(SimpleNamespace(scores=[SimpleNamespace(name="helpful", in_episodes=True)]))
    scores.start({"helpful": ScoreRole.__new__(ScoreRole)}, "cpu")

    def closing():
        scores.close()
        return Future()

    monkeypatch.setattr(scoring, "Future", closing)
    with pytest.raises(InfrastructureFailure, match="'helpful' was asked for a score after its model was closed"):
        asyncio.run(asyncio.wait_for(scores.ask("helpful", Sample((), 0.0), {}), 5.0))


def test_an_episode_that_goes_on_by_a_reward_part_ends_the_run_unless_it_says_so(overrides, models):
    keys = [f"reward=gsm8k + model(path={models}/judge)", "total_train_steps=1"]
    with pytest.raises(WrongWorkflow, match="generated again, and model of the reward is added only when the episode has"):
        train(resolved(overrides, *keys, f"workflow={models}/mine.py:AsksAgain"))
    summary = train(resolved(overrides, *keys, f"workflow={models}/mine.py:TakesPart", "trial_name=part"))
    assert all(sample["rewards"]["model"] != 0 for sample in samples_of(summary))
    plain = train(resolved(overrides, "reward=gsm8k", f"workflow={models}/mine.py:AsksAgain", "trial_name=plain"))
    assert plain.steps == 2  # all of this reward is there at once


def test_a_reward_awaited_in_an_episode_is_that_of_the_stage_to_the_bit(overrides, models):
    keys = [
        f"reward=gsm8k + 0.5*model(path={models}/judge)",
        "total_train_steps=1",
        "actor.max_tokens_per_micro_batch=1",  # in the stage too each conversation is then computed by itself
        "deterministic=true",
    ]
    once = [*keys, "workflow=multi_turn", "workflow_args.max_turns=1", "trial_name=awaited"]
    plan = plan_run(resolved(overrides, *once).config)
    assert plan.stages[0].awake == ("engine", "model") and plan.stage("score: model") is None
    assert "needs" in draw.text(plan) and "episodes ask model" in draw.text(plan)
    awaited, staged = samples_of(train(resolved(overrides, *once))), samples_of(train(resolved(overrides, *keys)))
    assert [s["completion"] for s in awaited] == [s["completion"] for s in staged]
    assert [(s["reward"], s["rewards"]) for s in awaited] == [(s["reward"], s["rewards"]) for s in staged]
    assert len({s["rewards"]["model"] for s in awaited}) > 1


def test_a_workflow_asks_a_reward_model_by_name_and_goes_on(overrides, models):
    judge, other = f"model(path={models}/judge, name=helpful)", f"{models}/mine.py:Polite(path={models}/tiny-llama-1)"
    keys = [f"reward={judge} + {other}", f"workflow={models}/mine.py:Asks", "evaluate.every_steps=1", "evaluate.max_rows=2"]
    summary = train(resolved(overrides, *keys, "total_train_steps=1"))
    plan = plan_run(resolved(overrides, *keys).config)
    assert [one.name for one in plan.scores if one.in_episodes] == ["helpful"] and plan.stage("score: Polite") is not None
    row = steps(summary)[-1]
    assert row["first"] not in (0.0, row["rewards/helpful"]) and row["rewards/Polite"] < 0
    assert row["reward/mean"] == pytest.approx(row["rewards/helpful"] + row["rewards/Polite"], abs=1e-6)


@pytest.mark.slow
def test_a_model_that_episodes_ask_is_awake_meanwhile_under_a_memory_limit(overrides, models):
    keys = [f"reward=model(path={models}/judge, name=helpful)", f"workflow={models}/mine.py:Asks", "algorithm=ppo"]
    config = resolved(overrides, *keys, "memory_limit_gib=50").config
    needed = sleep_plan_here(config, plan_run(config))
    limit = f"memory_limit_gib={1.001 * needed.least(needed.largest) / 2**30:.6f}"
    tight = resolved(overrides, *keys, "deterministic=true", limit, "trial_name=tight")
    slept, free = train(tight), train(resolved(overrides, *keys, "deterministic=true"))
    generate = sleep_plan_here(tight.config, plan_run(tight.config)).stage("generate")
    assert Part("helpful", "parameters") in generate.awake and steps(slept)[-1]["memory/moved_gib"] > 0
    assert [said["reward"] for said in samples_of(slept, 2)] == [said["reward"] for said in samples_of(free, 2)]
