"""Rewards that need a model, from a user's file: no line of the trainers knows them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.api.batch import pack
from tandem.api.failures import UserCodeFailed
from tandem.api.workflow import Sample
from tandem.cli.main import main
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.terms import read_terms
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.plan import plan_run
from tandem.flow.residents import open_reader
from tandem.models.tokenizer import load_tokenizer
from tandem.rewards.build import build_reward
from tandem.roles.learners import RewardModel
from tandem.rollout.book import NoBatch
from tandem.trainers.loop import train
from tests.trainers.scoring import resolved, samples_of, steps


def test_a_second_reward_model_a_teacher_penalty_and_a_judge_come_from_a_users_file(overrides, models):
    mine, other = models / "mine.py", models / "tiny-llama-1"
    spec = (
        f"gsm8k + 0.5*model(path={models}/judge, name=helpful) + 2*model(path={models}/judge, name=again, center=1) "
        f"+ 0.1*{mine}:StayClose(path={other}) + {mine}:Polite(path={other}) "
        f"+ 4*model(path={models}/judge, name=often, above=0)"
    )
    summary = train(resolved(overrides, f"reward={spec}", "evaluate.every_steps=2", "evaluate.max_rows=2"))

    names = ["StayClose", "Polite", "helpful", "again", "often", "gsm8k"]
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
    engine = SpreadEngine(
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
    rows = [{}, {"tandem.reward": f"math + {judge}"}, {"tandem.reward": f"0.5*{judge}"}, {"tandem.reward": "math"}]
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
        (["reward=model(path=POLICY)"], "is no reward model, because it has no trained scoring head"),
        (["reward=judge(model=POLICY, show_media=true)"], "show_media=true, and .* reads only text"),
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
    with pytest.raises(ConfigError, match="needs a model, which `tandem train` and `tandem eval` load"):
        build_reward(f"math + model(path={models}/judge)", timeout_s=1)


def test_the_graph_and_the_plan_show_the_models_that_score(models, capsys):
    keys = [f"reward=math + model(path={models}/judge)", f"actor.path={models}/tiny-llama-0", "train_dataset.path=addition"]
    file = models / "run.yaml"
    file.write_text("\n".join(key.replace("=", ": ", 1) for key in keys[1:]).replace("actor.path:", "actor:\n  path:"))
    assert main(["graph", str(file), keys[0], "train_dataset.path=addition"]) == 0
    shown = capsys.readouterr().out
    assert "score: model" in shown and "model (frozen)" in shown and "rewards/model" in shown
