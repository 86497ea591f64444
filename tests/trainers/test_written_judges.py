"""Judges that write in the run itself: the same questions and the same reading as over HTTP, in an engine that sleeps."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from tandem.api.engines import InferenceEngine
from tandem.api.failures import EngineDied, WeightsChanged
from tandem.api.team import Team
from tandem.api.workflow import Group, Sample
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.flow.plan import plan_run
from tandem.flow.sleep_plan import GIB, sleep_plan_here
from tandem.flow.writing import WritingModel, WritingRole
from tandem.trainers.loop import train
from tests.trainers.colocated import judge_folder

CLOCK = ("time", "tokens_per_s/", "memory/")


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return judge_folder(tmp_path_factory.mktemp("judge"))


def config_of(overrides, *more):
    keys = [*overrides, "deterministic=true", "tracking.trajectories_per_step=99", "rollout.verify.every_steps=null", *more]
    return load_config(TrainConfig, None, list({key.partition("=")[0]: key for key in keys}.values()))


def group_of(*completions):
    asked = {"role": "user", "content": "What is the sum of the two numbers? Answer with just the number. 3 + 4"}
    samples = (
        Sample((), 0.0, completion_text=text, messages=(asked, {"role": "assistant", "content": text}))
        for text in completions
    )
    return Group(tuple(samples), data={"messages": [asked], "answer": "7"})


@pytest.fixture
def role_of(overrides, judge):
    """Makes the role of a judge as a run has it, with an engine of its own."""
    made = []

    def make(kind="judge", **knobs):
        spelled = "".join(f", {name}={value!r}" for name, value in knobs.items())
        plan = plan_run(config_of(overrides, f"reward={kind}(model={judge}{spelled})").config)
        settings = EmbeddedEngineConfig(kv_cache_gib=0.05, threads=1)
        model = WritingModel(Path(judge), settings, torch.float32, "cpu", threads=1, member=True)
        made.append(model)
        return WritingRole(plan.scores[0], model, Team.alone())

    yield make
    for model in made:
        model.close()


def test_the_samples_of_a_group_share_the_beginning_of_their_prompt(role_of):
    role, group, ids = role_of(), group_of("7", "It is seven.", "three", "Let me think: 3 + 4 = 7."), []
    for sample in group.samples:
        asked = role.written.reward.prompt_of(sample.messages, sample.completion_text, "7")
        message = [{"role": "user", "content": asked}]
        rendered = role.engine.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids.append(role.engine.tokenizer(rendered, add_special_tokens=False)["input_ids"])
    common = next(i for i, column in enumerate(zip(*ids, strict=False)) if len(set(column)) > 1)
    (judged,) = role.score([group])
    assert [one.value for one in judged] == [pytest.approx(6 / 9)] * 4
    assert [one.words for one in judged] == ["Score: 7"] * 4
    figures = role.engine.engine().statistics()
    assert figures["shared_prompt_tokens"] >= 3 * common > 300
    assert figures["prefill_tokens"] + figures["shared_prompt_tokens"] == sum(map(len, ids))


def test_several_votes_read_their_prompt_once(role_of):
    role = role_of(votes=3)
    ((one,),) = role.score([group_of("7")])
    figures = role.engine.engine().statistics()
    assert (
        one.words.split("\n---\n") == ["Score: 7"] * 3 and figures["shared_prompt_tokens"] == 2 * figures["prefill_tokens"]
    )


def test_a_judge_that_compares_shows_each_pair_in_both_orders(tmp_path, overrides):
    folder = judge_folder(tmp_path, says="Verdict: A")
    plan = plan_run(config_of(overrides, f"reward=compare(model={folder})").config)
    settings = EmbeddedEngineConfig(kv_cache_gib=0.05, threads=1)
    model = WritingModel(Path(folder), settings, torch.float32, "cpu", threads=1, member=True)
    judged, alone = WritingRole(plan.scores[0], model, Team.alone()).score([group_of("7", "8", "9"), group_of("7")])
    model.close()
    assert [one.value for one in judged] == [0.5] * 3  # who favours a place favours nobody
    assert judged[0].words.count("\nVerdict: A") == 4 and "As reply B, against sample 2:" in judged[0].words
    assert alone[0].value.reason == "nobody_to_compare"


class Silent(InferenceEngine):
    """An engine that takes every request and never answers, or one that is gone."""

    def __init__(self, died):
        self.died = died

    async def agenerate(self, request):
        if self.died:
            raise EngineDied("its thread raised")
        await asyncio.sleep(3600)

    def pause(self):
        pass

    def resume(self):
        pass

    def close(self):
        pass


Silent.__abstractmethods__ = frozenset()


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize(("died", "reason"), [(False, "judge_timeout"), (True, "judge_died")])
def test_a_judge_that_hangs_or_dies_is_a_named_failure_and_the_next_step_has_another(role_of, died, reason):
    role = role_of(patience_s=0.3)
    role.engine.lend(Silent(died))
    (judged,) = role.score([group_of("7", "8")])
    assert [one.value.reason for one in judged] == [reason] * 2
    role.written.client.patience_s = 60.0
    assert role.score([group_of("7")])[0][0].value == pytest.approx(6 / 9)


def test_a_judgement_that_takes_too_long_ends_at_its_deadline_and_the_engine_goes_on(role_of):
    role = role_of(patience_s=1e-9)
    assert role.score([group_of("7")])[0][0].value.reason == "judge_timeout"
    role.written.client.patience_s = 60.0
    assert role.score([group_of("7")])[0][0].value == pytest.approx(6 / 9)


def test_a_judge_whose_file_changed_while_it_slept_does_not_wake(tmp_path, overrides):
    folder = judge_folder(tmp_path)
    model = WritingModel(Path(folder), EmbeddedEngineConfig(threads=1), torch.float32, "cpu", threads=1, member=True)
    assert model.onload(("parameters",)) > 0
    model.offload(("parameters",))
    judge_folder(tmp_path, says="Score: 1")
    with pytest.raises(WeightsChanged, match="other weights"):
        model.onload(("parameters",))


def rows(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(CLOCK)} for line in lines]


def words(folder, step):
    lines = (folder / "trajectories" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line)["judges"] for line in lines]


def tight(overrides, *more):
    """A budget that holds the largest stage, and next to nothing else."""
    config = config_of(overrides, *more, "memory_limit_gib=1").config
    plan = sleep_plan_here(config, plan_run(config))
    return f"memory_limit_gib={1.01 * plan.least(plan.largest) / GIB}"


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_judged_by_a_model_it_holds_is_the_same_whether_it_sleeps_or_not(overrides, judge, tmp_path):
    reward = f"reward=0.5*judge(model={judge}, votes=2, max_tokens=16) + {Path(__file__).parent}/small_rewards.py:many"
    more = (reward, "evaluate.every_steps=1", "evaluate.max_rows=2", "rollout.engine.kv_cache_gib=0.0003")
    awake = train(config_of(overrides, *more)).folder
    asleep = train(config_of(overrides, *more, f"run.root={tmp_path / 'tight'}", tight(overrides, *more))).folder
    steps = [row for row in rows(awake) if "reward/mean" in row]
    assert [row["rewards/judge"] for row in steps] == [pytest.approx(0.5 * 6 / 9)] * 3
    assert all("eval/reward" in row for row in rows(awake))
    assert {one["judge"] for one in words(awake, 1)} == {"Score: 7\n---\nScore: 7"}
    moved = [json.loads(line)["memory/moved_gib"] for line in (asleep / "metrics.jsonl").read_text().splitlines()[1:]]
    assert len(moved) == 3 and min(moved) > 0
    assert rows(asleep) == rows(awake) and words(asleep, 3) == words(awake, 3)
    assert (asleep / "weights.jsonl").read_text() == (awake / "weights.jsonl").read_text()


def test_a_judge_is_asked_only_about_samples_whose_gate_is_open(overrides, judge):
    small = Path(__file__).parent / "small_rewards.py"
    reward = f"reward=0*{small}:even + judge(model={judge}, max_tokens=16, clip=[0, 0.5], gate='even > 0.5')"
    folder = train(config_of(overrides, reward, "total_train_steps=1")).folder
    samples = [json.loads(line) for line in (folder / "trajectories" / "step_1.jsonl").read_text().splitlines()]
    asked = [sample for sample in samples if sample["judges"]]
    assert asked == [sample for sample in samples if sample["raw_rewards"]["even"] > 0.5] and 0 < len(asked) < len(samples)
    assert {sample["reward"] for sample in asked} == {0.5}
    assert {sample["raw_rewards"]["judge"] for sample in asked} == {6 / 9}


def test_a_judge_that_compares_is_not_asked_in_evaluation_which_needs_another_term(tmp_path, overrides):
    compare = f"compare(model={judge_folder(tmp_path, says='Verdict: A')}, max_tokens=32)"
    more = ("evaluate.every_steps=1", "evaluate.max_rows=2", "total_train_steps=1")
    with pytest.raises(ConfigError, match="evaluation judges them one by one"):
        train(config_of(overrides, f"reward={compare}", *more), dry_run=True)
    many = f"{Path(__file__).parent}/small_rewards.py:many"
    first, second = rows(train(config_of(overrides, f"reward={compare} + {many}", *more)).folder)
    assert first["eval/reward"] >= 1 and second["rewards/compare"] == 0.5


def test_a_run_trains_on_the_places_that_a_judge_gives_the_samples_of_a_prompt(tmp_path, overrides):
    judge = judge_folder(tmp_path, says="Order: 3>1,2")
    more = ("gconfig.n_samples=3", "total_train_steps=1", "evaluate.every_steps=null")
    folder = train(config_of(overrides, f"reward=rank(model={judge}, votes=1, max_tokens=24)", *more)).folder
    samples = [json.loads(line) for line in (folder / "trajectories" / "step_1.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows(folder) if "reward/mean" in row]
    assert row["rewards/rank"] == 0.5 and row["grad_norm"] > 0
    for group in {sample["group"] for sample in samples}:
        places = {sample["judges"]["rank"]: sample["reward"] for sample in samples if sample["group"] == group}
        assert sorted(places.values()) == [0, 0.5, 1]
        assert all("Order: 3>1,2" in said for said in places)


@pytest.mark.parametrize(("key", "words"), [("algorithm=remax", "greedy baseline"), ("gconfig.n_samples=1", "at least 2")])
def test_a_judge_that_compares_needs_several_samples_of_a_prompt(overrides, judge, key, words):
    with pytest.raises(ConfigError, match=words):
        train(config_of(overrides, f"reward=compare(model={judge})", key), dry_run=True)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ("model=nowhere", "nowhere"),
        ("model={judge}, token_env=KEY", "needs no token"),
        ("model={judge}, patience_s=0", "patience_s must be above 0"),
        ("question=Why", "model"),
    ],
)
def test_a_judge_that_cannot_be_had_is_refused_at_start(overrides, judge, knobs, words):
    with pytest.raises(ConfigError, match=words):
        train(config_of(overrides, f"reward=judge({knobs.format(judge=judge)})"), dry_run=True)
