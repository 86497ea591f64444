"""Rewards that need a model, from a user's file: no line of the trainers knows them."""

import asyncio
import json
import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.api.batch import pack
from tandem.api.failures import InfrastructureFailure, UserCodeFailed, WrongWorkflow
from tandem.api.samples import Sample
from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.terms import read_terms
from tandem.engines.train.build import build_train_engine
from tandem.flow import draw, episode_scores
from tandem.flow.episode_scores import EpisodeScores
from tandem.flow.plan import plan_run
from tandem.flow.residents import open_reader
from tandem.flow.scoring import ScoreRole
from tandem.flow.sleep_plan import Part
from tandem.flow.state_parts import sleep_plan_here
from tandem.models.tokenizer import load_tokenizer
from tandem.rewards.build import build_reward
from tandem.roles.reward_model import RewardModel
from tandem.rollout.failure_budget import NoBatch
from tandem.trainers.rl import train
from tests.tiny import tiny_model_folder

SCORES = '''
import torch
from tandem.api.batch import sum_by_sequence
from tandem.api.failures import DataFailure
from tandem.api.scoring import FrozenModel, Score
from tandem.rollout.workflows import RLVRWorkflow

class StayClose(Score):
    """A teacher as a penalty: how much more probable the policy finds its answer than the teacher does."""

    def __init__(self, path):
        self.model = FrozenModel(path)

    def read(self, sample, row, reader):
        return reader.trajectory(sample)

    def score(self, batch, model):
        gap = batch["rollout_logprobs"] - model.forward(batch).logprobs
        return -sum_by_sequence(batch, gap * batch["loss_mask"])

class Polite(Score):
    """A frozen judge: how probable it finds a yes after the answer."""

    def __init__(self, path):
        self.model = FrozenModel(path)

    def read(self, sample, row, reader):
        return reader.text(f"{sample.completion_text} Polite? a")

    def score(self, batch, model):
        return model.forward(batch).logprobs[batch["cu_seqlens"][1:] - 1]

class Constant(Polite):
    def score(self, batch, model):
        return torch.ones(len(batch["cu_seqlens"]) - 1)

class NotFinite(Polite):
    def score(self, batch, model):
        values = torch.arange(len(batch["cu_seqlens"]) - 1).float()
        return torch.where(values % 4 == 0, values / 0, values)

class WrongShape(Polite):
    def score(self, batch, model):
        return torch.ones(1, 2)

class Forgotten(Polite):
    def score(self, batch, model):
        import time
        try:
            time.sleep(3600)
        except Exception:
            pass

class SometimesHangs(Polite):
    name, calls = "helpful", 0

    def read(self, sample, row, reader):
        import time
        self.calls += 1
        if self.calls % 20 == 3:
            time.sleep(3600)  # cannot be interrupted
        while self.calls % 20 == 4:
            pass
        return reader.text("yes")

class AlwaysHangs(SometimesHangs):
    calls = 3

    def read(self, sample, row, reader):
        self.calls = 2
        super().read(sample, row, reader)

class Unreadable(Polite):
    def read(self, sample, row, reader):
        raise DataFailure("nothing_to_judge")

class NoModel(Polite):
    def __init__(self, path):
        pass

class NoPath(Polite):
    def __init__(self, path):
        self.model = FrozenModel(None)

class Garbled(Polite):
    def read(self, sample, row, reader):
        return {"input_ids": [1, 2]}

class Even(Polite):
    name = "even"

class Spoils(RLVRWorkflow):
    reads_scores = True

    async def finish_group(self, samples, data):
        from dataclasses import replace
        return tuple(replace(sample, reward=float("nan")) for sample in samples)

class Hangs(RLVRWorkflow):
    reads_scores = True

    async def finish_group(self, samples, data):
        import asyncio
        await asyncio.sleep(3600)

class AsksAgain(RLVRWorkflow):
    """Writes a second answer when the reward of the first one is there."""

    async def arun_episode(self, engine, data):
        for _ in range(2):
            chat = self.start(data)
            await self.reply(engine, chat)
            result = await self.judge(chat, data)
        return chat.sample(result.value, **result.details())

class NeedsAll(AsksAgain):
    reads_reward = "midway"

class Asks(RLVRWorkflow):
    """Asks the model `helpful` by name after a first answer, and then answers again."""

    def __init__(self, helpful, **rest):
        super().__init__(**rest)
        self.helpful = helpful

    async def arun_episode(self, engine, data):
        chat = self.start(data)
        await self.reply(engine, chat)
        first = await self.judge(chat, data, self.helpful)
        chat.say("Again.")
        await self.reply(engine, chat)
        result = await self.judge(chat, data)
        return chat.sample(result.value, rewards=result.rewards, metrics={"first": first.value})

class TakesPart(AsksAgain):
    reads_reward = "partly"

class Misspelt(AsksAgain):
    reads_reward = "partially"

class Ranks(RLVRWorkflow):
    """The reward of a sample is its place in its group by what the judge said."""

    reads_scores = True

    async def finish_group(self, samples, data):
        order = sorted(range(len(samples)), key=lambda i: samples[i].rewards["Polite"])
        from dataclasses import replace
        return tuple(replace(sample, reward=float(order.index(i))) for i, sample in enumerate(samples))
'''


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy, another model of its family, a reward model, and the file of a user."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "mine.py").write_text(SCORES)
    policy, other = tiny_model_folder(folder), tiny_model_folder(folder, seed=1)
    config = load_config(TrainConfig, None, [f"actor.path={other}", "actor.dtype=float32", "train_dataset.path=addition"])
    torch.manual_seed(3)
    judge = build_train_engine(config.config.actor, 1, head="scalar")
    judge.load_weights((name, torch.randn_like(x) if x.shape[0] == 1 else x) for name, x in judge.weights())
    judge.save(folder / "judge")
    load_tokenizer(policy).save_pretrained(folder / "judge")
    return folder


def resolved(overrides, *more):
    keys = {
        item.partition("=")[0]: item
        for item in [*overrides, "total_train_steps=2", "gconfig.n_samples=4", "tracking.trajectories_per_step=99", *more]
    }
    return load_config(TrainConfig, None, list(keys.values()))


def steps(summary):
    return [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]


def samples_of(summary, step=1):
    return [json.loads(line) for line in (summary.folder / f"trajectories/step_{step}.jsonl").read_text().splitlines()]


def test_a_second_reward_model_a_teacher_penalty_and_a_judge_come_from_a_users_file(overrides, models):
    mine, other = models / "mine.py", models / "tiny-llama-1"
    spec = (
        f"math + 0.5*model(path={models}/judge, name=helpful) + 2*model(path={models}/judge, name=again, center=1) "
        f"+ 0.1*{mine}:StayClose(path={other}) + {mine}:Polite(path={other}) "
        f"+ 4*model(path={models}/judge, name=often, above=0)"
    )
    summary = train(resolved(overrides, f"reward={spec}", "evaluate.every_steps=2", "evaluate.max_rows=2"))

    names = ["StayClose", "Polite", "helpful", "again", "often", "math"]
    for row in steps(summary)[1:]:
        assert row["reward/mean"] == pytest.approx(sum(row[f"rewards/{name}"] for name in names), abs=1e-6)
        assert abs(row["rewards/helpful"]) > 0.01
        assert row["rewards/again"] == pytest.approx(4 * row["rewards/helpful"] - 2, abs=1e-6)
        assert row["rewards/often"] in [4 * count / 16 for count in range(17)]  # each sample has 4 or nothing
        assert row["rewards/StayClose"] < 0 and row["rewards/Polite"] < 0 and row["time/score_s"] > 0
    plan = plan_run(resolved(overrides, f"reward={spec}").config)
    assert [r.name for r in plan.residents] == ["actor", "helpful", "StayClose", "engine"]  # two models serve four scores
    assert [s.name for s in plan.stages if s.kind == "score"] == [
        f"score: {n}" for n in ("helpful", "again", *names[:2], "often")
    ]


def test_the_score_of_a_reward_model_is_what_the_model_gives_the_conversation(overrides, models):
    summary = train(resolved(overrides, f"reward={models}/judge", "actor.dtype=float32"))
    engine = build_train_engine(
        load_config(
            TrainConfig, None, [f"actor.path={models}/judge", "actor.dtype=float32", "train_dataset.path=addition"]
        ).config.actor,
        1,
        head="scalar",
    )
    reader = open_reader(str(models / "judge"), load_tokenizer(models / "judge"))
    for said in samples_of(summary)[:6]:
        question = said["prompt"].partition("user\n")[2].partition("<|im_end|>")[0]
        row = {"messages": [{"role": "user", "content": question}]}
        read = reader.conversation(Sample((), 0.0, completion_text=said["completion"]), row)
        assert float(RewardModel(engine).score(pack([read]))[0]) == pytest.approx(said["reward"], abs=1e-5)


def test_the_filter_of_groups_judges_behind_the_scores_and_draws_again(overrides, models):
    filtered = ["algorithm.filter=dynamic_sampling", "train_dataset.size=64"]
    kept = train(resolved(overrides, *filtered, f"reward={models}/mine.py:Polite(path={models}/tiny-llama-1)"))
    assert steps(kept)[-1]["groups/without_spread"] == 0
    with pytest.raises(NoBatch, match="the filter of groups kept 0 of"):
        train(
            resolved(
                overrides, *filtered, f"reward={models}/mine.py:Constant(path={models}/tiny-llama-1)", "trial_name=constant"
            )
        )


def test_what_a_model_cannot_judge_is_counted_and_never_a_reward_of_0(overrides, models):
    summary = train(resolved(overrides, f"reward={models}/mine.py:NotFinite(path={models}/tiny-llama-1)"))
    last = steps(summary)[-1]
    assert last["samples/failed/reward_not_finite"] > 0 and last["groups/size"] == 3
    with pytest.raises(NoBatch, match="nothing_to_judge"):
        train(
            resolved(
                overrides,
                f"reward={models}/mine.py:Unreadable(path={models}/tiny-llama-1)",
                "trial_name=unreadable",
                "rollout.max_data_failures=10",  # more than one batch
            )
        )


def test_what_a_workflow_makes_of_scores_is_checked_like_all_it_returns(overrides, models):
    keys = [f"reward={models}/mine.py:Polite(path={models}/tiny-llama-1)", f"workflow={models}/mine.py:Spoils"]
    with pytest.raises(NoBatch, match="reward_not_finite"):
        train(resolved(overrides, *keys, "rollout.max_data_failures=10"))


def test_a_group_that_is_not_finished_in_time_fails_by_name(overrides, models):
    keys = [f"reward={models}/mine.py:Polite(path={models}/tiny-llama-1)", f"workflow={models}/mine.py:Hangs"]
    with pytest.raises(NoBatch, match="deadline"):
        train(resolved(overrides, *keys, "rollout.max_data_failures=3", "rollout.episode_timeout_s=2"))


def test_a_score_of_a_users_own_that_hangs_ends_the_run_at_its_deadline(overrides, models):
    keys = [f"reward={models}/mine.py:Forgotten(path={models}/tiny-llama-1)", "reward_timeout_s=0.05"]
    with pytest.raises(UserCodeFailed, match=r"mine.py:Forgotten' took longer than 0.8 s and was interrupted"):
        train(resolved(overrides, *keys))  # 16 samples


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

    monkeypatch.setattr(episode_scores, "Future", closing)
    with pytest.raises(InfrastructureFailure, match="'helpful' was asked when its model had been closed"):
        asyncio.run(asyncio.wait_for(scores.ask("helpful", Sample((), 0.0), {}), 5.0))


def test_what_a_score_reads_must_be_a_sequence_of_the_model(overrides, models):
    with pytest.raises(UserCodeFailed, match=r"read must give a dict of at least input_ids, loss_mask, temperature"):
        train(resolved(overrides, f"reward={models}/mine.py:Garbled(path={models}/tiny-llama-1)"))


def test_the_samples_that_are_trained_on_are_chosen_behind_the_scores(overrides, models):
    """The first one of each group fails, and another takes its place."""
    keys = [f"reward={models}/mine.py:NotFinite(path={models}/tiny-llama-1)", "algorithm.update_samples=2"]
    assert "loss" in steps(train(resolved(overrides, *keys)))[-1]


def test_an_empty_answer_is_read_and_judged(models):
    reader = open_reader(str(models / "judge"), load_tokenizer(models / "judge"))
    row = {"messages": [{"role": "user", "content": "3 + 4?"}]}
    said, silent = (reader.conversation(Sample((), 0.0, completion_text=text), row) for text in ("7", ""))
    assert 0 < len(silent["input_ids"]) < len(said["input_ids"]) and silent["loss_mask"][-1]
    decoded = reader.tokenizer.decode(silent["input_ids"])
    assert decoded == reader.tokenizer.decode(said["input_ids"]).replace("7", "", 1)


def test_a_model_serves_the_rewards_of_several_data_sets_with_a_weight_in_each(models):
    judge, sources = f"model(path={models}/judge)", "[{path: a, reward: 'math + JUDGE'}, {path: b, reward: '0.5*JUDGE'}]"
    keys = [f"reward=format + 2*{judge}", f"train_dataset.sources={sources.replace('JUDGE', judge)}"]
    plan = plan_run(load_config(TrainConfig, None, [f"actor.path={models}/tiny-llama-0", *keys]).config)
    rows = [{}, {"reward_name": f"math + {judge}"}, {"reward_name": f"0.5*{judge}"}, {"reward_name": "math"}]
    terms = [plan.scores[0].rewards.get(plan.sum_of(row)) for row in rows]
    assert [term and term.weight for term in terms] == [2.0, 1.0, 0.5, None]


def test_spellings_of_terms():
    knobs = read_terms("mine.py:Polite(path=x, judge=other.py:Model)")[0].knobs
    assert knobs == {"path": "x", "judge": "other.py:Model"}
    assert [(t.name, t.weight) for t in read_terms("math - 0.1*my.py:Short + 0.5*(format + model(path='a b'))")] == [
        ("math", 1.0),
        ("my.py:Short", -0.1),
        ("format", 0.5),
        ("model", 0.5),
    ]
    assert [(t.name, t.weight) for t in read_terms("my.py:useful - my.py:harmful")] == [
        ("my.py:useful", 1.0),
        ("my.py:harmful", -1.0),
    ]


def test_a_group_is_finished_behind_the_scores_that_its_workflow_reads(overrides, models):
    polite = f"reward={models}/mine.py:Polite(path={models}/tiny-llama-1)"
    summary = train(resolved(overrides, polite, f"workflow={models}/mine.py:Ranks"))
    rewards = [sample["reward"] for sample in samples_of(summary)]
    assert sorted(rewards) == sorted([0.0, 1.0, 2.0, 3.0] * (len(rewards) // 4))


def test_an_episode_that_goes_on_by_a_reward_part_ends_the_run_unless_it_says_so(overrides, models):
    keys = [f"reward=math + model(path={models}/judge)", "total_train_steps=1"]
    with pytest.raises(WrongWorkflow, match="generated again, and model of the reward is added only when the episode has"):
        train(resolved(overrides, *keys, f"workflow={models}/mine.py:AsksAgain"))
    summary = train(resolved(overrides, *keys, f"workflow={models}/mine.py:TakesPart", "trial_name=part"))
    assert all(sample["rewards"]["model"] != 0 for sample in samples_of(summary))
    plain = train(resolved(overrides, "reward=math", f"workflow={models}/mine.py:AsksAgain", "trial_name=plain"))
    assert plain.steps == 2  # all of this reward is there at once


def test_a_reward_awaited_in_an_episode_is_that_of_the_stage_to_the_bit(overrides, models):
    keys = [
        f"reward=math + 0.5*model(path={models}/judge)",
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


def test_a_run_with_scores_is_the_same_whatever_the_order_of_its_models(overrides, models):
    one, two = f"model(path={models}/judge)", f"{models}/mine.py:Polite(path={models}/tiny-llama-1)"
    metrics = [
        steps(train(resolved(overrides, f"reward={spec}", f"trial_name={name}", "deterministic=true")))[-1]
        for name, spec in (("one", f"{one} + {two}"), ("two", f"{two} + {one}"))
    ]
    timeless = [
        {k: v for k, v in row.items() if "time" not in k and "_per_s" not in k and "gib" not in k} for row in metrics
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["reward=math + model(path=JUDGE, normalise=group)", "workflow=multi_turn"],
            "reads the whole reward in the middle",
        ),
        (["reward=judge(model=POLICY)", "workflow=multi_turn"], "'judge' in the middle of an episode, .* serve it"),
        (["reward=model(path=JUDGE, steps=' ', aggregate=none)", "workflow=MINE:NeedsAll"], "awaits .* use aggregate=min"),
        (["reward=model(path=JUDGE)", "workflow=multi_turn", "memory_limit_gib=0.001"], "'generate'.*tandem serve-reward"),
        (["reward=model(path=JUDGE)", "workflow=MINE:Asks"], "asks for 'helpful', which nobody gives it"),
        (["reward=math", "workflow=MINE:Misspelt"], "reads_reward must be one of .*, got 'partially'"),
        (["reward=model(path=JUDGE)", "algorithm=ttrl"], "judges by a vote|reward"),
        (["reward=model(path=JUDGE) + model(path=JUDGE, name=model)"], "names a reward twice"),
        (["reward=model(path=JUDGE, name=actor)"], "'actor' is the name of another reward's model or of a role"),
        (["reward=model(paht=JUDGE)"], "paht"),
        (["reward=model(path=JUDGE, scale=0)"], "scale must be above 0"),
        (["reward=model(path=JUDGE, scale=abc)"], "scale must be a number, got 'abc'"),
        (["reward=MINE:NoModel(path=x)"], "its attribute `model` is missing"),
        (["reward=MINE:NoPath(path=x)"], "must be a folder or a name, got None"),
        (["reward=EVEN + MINE:Even(path=POLICY)"], "'even' is the name of another reward"),
        (["reward=model(path=POLICY)"], "is no reward model, because it has no trained head"),
    ],
)
def test_a_score_that_cannot_be_had_is_refused_before_the_run(overrides, models, keys, words):
    keys = [key.replace("JUDGE", str(models / "judge")).replace("POLICY", str(models / "tiny-llama-0")) for key in keys]
    small = Path(__file__).parent / "small_rewards.py"
    keys = [key.replace("MINE", f"{models}/mine.py").replace("EVEN", f"{small}:even") for key in keys]
    with pytest.raises(ConfigError, match=words):
        train(resolved(overrides, *keys), dry_run=True)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("headless", r"1 are missing, first 'score.weight'"),
        ("pickle", "cannot be read: UnpicklingError"),
        ("two labels", "classifier with 2 labels"),
    ],
)
def test_the_folder_of_a_reward_model_that_cannot_be_read_is_refused_by_name(overrides, models, tmp_path, damage, words):
    folder = shutil.copytree(models / "judge", tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    if damage == "headless":
        save_file({name: x for name, x in weights.items() if name != "score.weight"}, folder / "model.safetensors")
    elif damage == "pickle":
        (folder / "model.safetensors").unlink()
        torch.save({**weights, "trap": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")
    else:
        config = json.loads((folder / "config.json").read_text())
        config |= {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words) as refused:
        train(resolved(overrides, f"reward=model(path={folder})"))
    assert str(folder) in str(refused.value) and not (tmp_path / "sprung").exists()


def test_a_class_of_a_classifier_is_a_reward(overrides, models, tmp_path):
    folder = shutil.copytree(models / "judge", tmp_path / "classes")
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "calm", "1": "rude"}, "label2id": {"calm": 0, "rude": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    head = weights["score.weight"]
    save_file({**weights, "score.weight": torch.cat([0 * head, head])}, folder / "model.safetensors", {"format": "pt"})
    both = [f"model(path={folder}, class_label={label}, probability=true, name={label})" for label in ("calm", "rude")]
    summary = train(resolved(overrides, f"reward={' + '.join(both)} + 0*model(path={models}/judge, probability=true)"))
    parts = [sample["rewards"] for sample in samples_of(summary)]
    assert len({part["rude"] for part in parts}) > 2
    for part in parts:  # the head of `calm` is 0: the log-odds of `rude` are the score of the model with one label
        assert part["calm"] + part["rude"] == pytest.approx(1) and 0 < part["rude"] < 1
    with pytest.raises(ConfigError, match=r"has no class_label=rud; its classes are 0 \(calm\), 1 \(rude\)"):
        train(resolved(overrides, f"reward=model(path={folder}, class_label=rud)"), dry_run=True)


def test_a_reward_model_with_another_vocabulary_reads_the_text_in_its_own_tokens(overrides, models, tmp_path):
    """Its tokens have other numbers than the actor's; its scores are those of the model that numbers as the actor does."""
    folder = shutil.copytree(models / "judge", tmp_path / "renumbered")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    plain = sorted(number for number in vocabulary.values() if number not in special)
    other = dict(zip(plain, [*plain[7:], *plain[:7]], strict=True))
    tokenizer["model"]["vocab"] = {word: other.get(number, number) for word, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    table = weights[name].clone()
    table[list(other.values())] = weights[name][list(other)]
    save_file({**weights, name: table}, folder / "model.safetensors", metadata={"format": "pt"})
    rewards = [
        [
            sample["reward"]
            for sample in samples_of(train(resolved(overrides, f"reward={spec}", "deterministic=true", trial)))
        ]
        for spec, trial in ((models / "judge", "trial_name=same"), (folder, "trial_name=other"))
    ]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-5) and len(set(rewards[0])) > 4


def test_a_score_of_the_wrong_shape_says_what_was_expected(overrides, models):
    with pytest.raises(Exception, match=r"one score for each sequence, \[\d+\]; it gave \[1, 2\]"):
        train(resolved(overrides, f"reward={models}/mine.py:WrongShape(path={models}/tiny-llama-1)"))


def test_without_a_run_that_holds_models_such_a_reward_is_refused(models):
    with pytest.raises(ConfigError, match="needs a model, which `tandem train` and `tandem eval` hold"):
        build_reward(f"math + model(path={models}/judge)", timeout_s=1)


def test_the_graph_and_the_plan_show_the_models_that_score(models, capsys):
    keys = [f"reward=math + model(path={models}/judge)", f"actor.path={models}/tiny-llama-0", "train_dataset.path=addition"]
    file = models / "run.yaml"
    file.write_text("\n".join(key.replace("=", ": ", 1) for key in keys[1:]).replace("actor.path:", "actor:\n  path:"))
    assert main(["graph", str(file), keys[0], "train_dataset.path=addition"]) == 0
    shown = capsys.readouterr().out
    assert "score: model" in shown and "model (frozen)" in shown and "rewards/model" in shown
