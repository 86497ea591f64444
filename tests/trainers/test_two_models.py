"""The recipes of docs/recipes/two_models.md run with tiny models, on the data that they make."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.rl import train
from tests.tiny import tiny_model_folder

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


def test_no_story_is_in_two_parts_and_the_control_has_other_answers(tmp_path, monkeypatch):
    parts = made("planner", tmp_path, monkeypatch)
    assert not {row["question"] for row in parts["train"]} & {row["question"] for row in parts["test"]}
    same = [a == b for a, b in zip(parts["train"], parts["shuffled"], strict=True)]
    assert [row["question"] for row in parts["train"]] == [row["question"] for row in parts["shuffled"]]
    assert sum(same) / len(same) < 0.15


def test_the_customer_of_the_control_knows_another_colour_than_the_one_that_counts(tmp_path, monkeypatch):
    parts = made("simulated_user", tmp_path, monkeypatch)
    assert all(row["known"] == row["answer"] for row in [*parts["train"], *parts["test"]])
    assert all(row["known"] != row["answer"] for row in parts["secret"])


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
