"""The recipes of docs/recipes/two_models.md run with tiny models, on the data that they make."""

import asyncio
import json
import runpy
import sys
from pathlib import Path

import pytest

from tandem.api.requests import LLMResponse, StopReason
from tandem.api.workflow import Sample
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train
from tests.tiny import tiny_model_folder, tiny_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def partner(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("partner"), seed=7, max_position_embeddings=512)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("policy"), max_position_embeddings=512)


def made(name, folder, monkeypatch):
    """The data of a recipe."""
    monkeypatch.setattr(sys, "argv", [name, str(folder)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in folder.iterdir()}


def test_no_story_is_in_two_parts(tmp_path, monkeypatch):
    parts = made("planner", tmp_path, monkeypatch)
    assert not {row["question"] for row in parts["train"]} & {row["question"] for row in parts["test"]}


@pytest.mark.parametrize("name", ["planner", "simulated_user"])
def test_the_control_deals_the_rewards_of_a_group_out_anew(name):
    control = runpy.run_path(str(EXAMPLES / f"{name}.py"))["Control"]
    samples = tuple(Sample(trajectories=(), reward=float(i), accuracy=i / 8, prompt_text=str(i)) for i in range(8))
    groups = [asyncio.run(control.finish_group(None, samples, {"answer": str(seed)})) for seed in range(300)]
    assert all([one.accuracy for one in group] == [i / 8 for i in range(8)] for group in groups)
    assert all(sorted(one.reward for one in group) == [float(i) for i in range(8)] for group in groups)
    # a sample gets the mean of its group, whatever it earned itself
    means = [sum(group[i].reward for group in groups) / len(groups) for i in range(8)]
    assert max(abs(mean - 3.5) for mean in means) < 0.6


class Talk:
    """A customer that says a word, and a policy that says two."""

    def __init__(self, tokenizer, said, *turns):
        self.tokenizer, self.said, self.turns, self.heard = tokenizer, said, list(turns), []

    async def reply(self, engine, messages):
        self.heard.append(messages[-1]["content"])
        return self.said

    async def agenerate(self, request):
        ids = tuple(self.tokenizer(self.turns.pop(0), add_special_tokens=False)["input_ids"])
        return LLMResponse(request.input_ids, ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.STOP)


@pytest.mark.parametrize(
    ("question", "order", "reward"),
    [
        ("Which colour?", "A red cup, thank you.", 1.0),
        ("Which colour?", "A cup, thank you.", 0.5),
        ("Which colour?", "A red or blue cup.", 0.5),
        ("Which colour?", "A red hat.", 0.25),
        ("A cup.", "A red cup.", 0.75),
        ("A cup.", "Thank you.", 0.0),
    ],
)
def test_the_clerk_is_rewarded_for_a_question_and_for_the_order(question, order, reward):
    clerk = runpy.run_path(str(EXAMPLES / "simulated_user.py"))["Clerk"]
    tokenizer = tiny_tokenizer()
    talk = Talk(tokenizer, "red", question, order)
    row = {"messages": [{"role": "user", "content": "I would like a cup."}], "thing": "cup", "answer": "red"}
    sample = asyncio.run(clerk(partner=talk, reward=None, gconfig=None, tokenizer=tokenizer).arun_episode(talk, row))
    assert (sample.reward, sample.accuracy) == (reward, float(reward >= 0.75))
    assert talk.heard == ([f"You want a red cup. {question}"] if "?" in question else [])


@pytest.mark.parametrize(
    ("name", "data", "who"), [("planner", "planner_data", "worker"), ("simulated_user", "user_data", "customer")]
)
def test_the_recipe_trains_and_its_record_has_what_the_partner_said(
    tmp_path, monkeypatch, policy, partner, name, data, who, overrides
):
    made(name, tmp_path / data, monkeypatch)
    monkeypatch.chdir(tmp_path)
    own = {"run.root", "actor.dtype", "rollout.dtype", "rollout.engine.kv_cache_gib", "tracking.plot_every_steps", "threads"}
    keys = [key for key in overrides if key.partition("=")[0] in own]
    keys += [f"actor.path={policy}", f"workflow={EXAMPLES / f'{name}.py'}:{'Planner' if name == 'planner' else 'Clerk'}"]
    keys += [f"partner=model(path={partner}, max_new_tokens=4)", "total_train_steps=2", "tracking.trajectories_per_step=9"]
    keys += ["evaluate.every_steps=2", "valid_dataset.max_rows=4", "gconfig.n_samples=2", "rollout.batch_size=2"]
    folder = train(load_config(TrainConfig, EXAMPLES / f"{name}.yaml", keys)).folder
    lines = (folder / "trajectories" / "step_2.jsonl").read_text().splitlines()
    assert any(json.loads(line)["judges"][who] for line in lines)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and "eval/accuracy" in rows[0]
