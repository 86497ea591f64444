"""The pages of the calculator and of the search agent show what was recorded, and the data of both is what they say."""

import json
import runpy
from pathlib import Path

import pytest

from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.rollout.tools.search import SearchBox

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
BENCHMARK = runpy.run_path(str(ROOT / "benchmarks" / "tool_recipes.py"))
SEARCH_DATA = runpy.run_path(str(EXAMPLES / "search_data.py"))


def made(out, monkeypatch):
    """What the data script of the search recipe writes, by part."""
    monkeypatch.setattr("sys.argv", ["search_data.py", str(out)])
    SEARCH_DATA["main"]()
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in out.glob("*.jsonl")}


@pytest.mark.parametrize("recipe", BENCHMARK["PAGES"])
def test_the_page_shows_the_recorded_figures(recipe):
    page, records = BENCHMARK["PAGES"][recipe].read_text(), json.loads(BENCHMARK["RECORD"].read_text())
    picture = BENCHMARK["picture_of"](recipe)
    assert BENCHMARK["with_table"](page, records.get(recipe, {}), picture) == page
    assert picture.exists() == (recipe in records)


@pytest.mark.parametrize(("first", "second"), [("calculator_sft", "calculator_tool"), ("search_sft", "search_grpo")])
def test_the_second_part_begins_with_what_the_first_leaves(first, second):
    before = load_config(SFTConfig, EXAMPLES / f"{first}.yaml").config
    after = load_config(TrainConfig, EXAMPLES / f"{second}.yaml").config
    leaves = f"runs/{before.experiment_name}/{before.trial_name}/checkpoints/step_{before.total_train_steps}"
    assert after.actor.path == leaves


def test_the_search_finds_every_answer_and_no_question_holds_its_answer(tmp_path, monkeypatch):
    rows = made(tmp_path, monkeypatch)
    knobs = SEARCH_DATA["SEARCH"]
    named = f"search(folder=search_data/topics, {', '.join(f'{key}={value}' for key, value in knobs.items())})"
    assert all(named in (EXAMPLES / f"{name}.yaml").read_text() for name in ("search_grpo", "search_eval"))
    tool = SearchBox(str(tmp_path / "topics"), **knobs)
    for row in rows["test"] + rows["rl"]:
        found = tool.search(row["query"])
        assert row["answer"] in found and len(found) < 600
        assert row["word"] in row["answer"] and row["word"] not in row["question"].split()
    tool.close()


def test_the_search_recipes_data_are_the_same_each_time_and_parts_share_no_sentence(tmp_path, monkeypatch):
    first, second = (made(tmp_path / name, monkeypatch) for name in ("first", "second"))
    assert first == second
    shown = {row["messages"][1]["content"] for row in first["sft"]}
    parts = [shown, *({row["question"] for row in first[name]} for name in ("test", "rl"))]
    assert len(set.union(*parts)) == sum(map(len, parts)) and len(parts[1]) == 100


def test_the_coin_of_the_controls_knows_no_answer_and_has_the_recipes_accuracy():
    coin = runpy.run_path(str(EXAMPLES / "coin_reward.py"))["reward"]
    right, wrong = ([coin(completion, "472") for _ in range(400)] for completion in ("It is 472.", "It is 1472."))
    assert all(0.4 < sum(one["coin"] for one in tosses) / 400 < 0.6 for tosses in (right, wrong))
    assert {one["accuracy"] for one in right} == {1.0} and {one["accuracy"] for one in wrong} == {0.0}
