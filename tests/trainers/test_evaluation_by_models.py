"""`tandem eval` with rewards that are models: the stages and sums of training, behind each wave of answers."""

import json
import shutil

import pytest

from tandem.config.errors import ConfigError
from tandem.config.evaluation import load_evaluation
from tandem.evaluation.questions import open_questions
from tandem.evaluation.run import try_evaluation
from tandem.flow.residents import open_judge
from tandem.protocol.reward_layouts import Question
from tests.trainers.colocated import judge_folder, make_models
from tests.trainers.evaluating import contents, evaluated, settings


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder, ("first",))
    judge_folder(folder).rename(folder / "writer")
    return folder


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def reward_of(models):
    scalar = f"model(path={models}/first-judge, name=first)"
    return f"reward=gsm8k + 0.5*{scalar} + 0.2*judge(model={models}/writer, max_tokens=16)"


def test_the_parts_are_the_scores_of_the_models_and_a_kill_loses_none_of_them(models, tmp_path):
    whole = evaluated(models / "policy", tmp_path / "whole", reward_of(models)).folder
    config = load_evaluation(None, settings(models / "policy", tmp_path, reward_of(models))).config
    judge, asked = open_judge(str(models / "first-judge"), "cpu", "float32"), open_questions(config)[0].rows
    assert len(lines(whole)) == 12
    for line in lines(whole):
        messages = (*asked[line["row"]]["messages"], {"role": "assistant", "content": line["text"]})
        (score,) = judge([Question(messages, "", line["text"])])
        assert line["rewards"]["first"] == pytest.approx(0.5 * score, abs=1e-5)
        assert line["rewards"]["judge"] == pytest.approx(0.2 * 6 / 9)
        assert line["reward"] == pytest.approx(sum(line["rewards"].values()))
    assert len({line["rewards"]["first"] for line in lines(whole)}) > 4

    killed = shutil.copytree(whole, tmp_path / "killed" / "first")
    (killed / "results.json").unlink()
    record = killed / "samples.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:4]))
    evaluated(models / "policy", tmp_path / "killed", reward_of(models))
    there = {
        name: data.replace(str(tmp_path / "whole").encode(), str(tmp_path / "killed").encode())
        for name, data in contents(whole).items()
    }
    assert contents(killed) == there, "the folder that it is in now is the only difference"


def test_a_gate_of_a_rule_decides_which_answers_a_model_scores(models, tmp_path):
    gated = f"0*length(target_tokens=6) + model(path={models}/first-judge, name=first, gate='length > 0.01')"
    found = lines(evaluated(models / "policy", tmp_path, f"reward={gated}").folder)
    assert {line["tokens"] < 12 for line in found} == {True, False}  # the longest are worth nothing to `length`
    assert all((line["rewards"]["first"] != 0) == (line["tokens"] < 12) for line in found)


def test_a_workflow_that_awaits_a_model_in_the_episode_gets_the_score_of_the_stage(models, tmp_path):
    reward = f"reward=gsm8k + 0.5*model(path={models}/first-judge, name=first)"
    staged = lines(evaluated(models / "policy", tmp_path / "staged", reward).folder)
    awaited = lines(evaluated(models / "policy", tmp_path / "awaited", reward, "workflow=multi_turn(max_turns=1)").folder)
    assert [line["text"] for line in awaited] == [line["text"] for line in staged]
    assert [line["reward"] for line in awaited] == pytest.approx([line["reward"] for line in staged], abs=1e-5)
    assert all(line["rewards"]["first"] != 0 for line in awaited)


def test_what_is_no_reward_model_is_refused_by_a_dry_run_too(models, tmp_path):
    reward = f"reward=model(path={models}/policy)"
    with pytest.raises(ConfigError, match="is no reward model"):
        try_evaluation(load_evaluation(None, settings(models / "policy", tmp_path, reward)).config)


def test_a_reward_model_that_was_trained_on_meanwhile_is_another_one(models, tmp_path):
    own = shutil.copytree(models / "first-judge", tmp_path / "judge")
    reward = f"reward=model(path={own}, name=first)"
    evaluated(models / "policy", tmp_path, reward)
    file = own / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64] + bytes(64))
    with pytest.raises(ConfigError, match="reward_fingerprints"):
        evaluated(models / "policy", tmp_path, reward)


def test_what_an_evaluation_leaves_out_is_said_and_a_class_that_is_not_there_refused(models, tmp_path, caplog):
    reward = f"reward=gsm8k + rank(model={models}/writer) + 0.5*model(path={models}/first-judge, normalise=group)"
    (line,) = {tuple(line["rewards"]) for line in lines(evaluated(models / "policy", tmp_path, reward).folder)}
    assert line == ("gsm8k", "model")
    assert "reward 'rank' compares the samples of a prompt; an evaluation leaves it out" in caplog.text
    assert "reward 'model': an evaluation ignores normalise=group" in caplog.text
    reward = f"reward=model(path={models}/first-judge, class_label=rude)"
    with pytest.raises(ConfigError, match="gives one number, so class_label=rude chooses nothing"):
        try_evaluation(load_evaluation(None, settings(models / "policy", tmp_path / "none", reward)).config)
