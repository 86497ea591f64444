"""Evaluation beside training, and what a run is made of."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest

from tandem.api.requests import LLMResponse, StopReason
from tandem.api.workflow import RolloutWorkflow
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.opening import open_rows
from tandem.flow.services import check_names, check_rows, make_reward
from tests.trainers.evaluating import evaluate

REWARDS = Path(__file__).parent / "small_rewards.py"


class Waits(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        await asyncio.sleep(3600)


class Raises(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        data["messages"].append("changed")
        raise ValueError("a bug of the user's")


class Ends(RolloutWorkflow):
    def __init__(self, error):
        self.error = error

    async def arun_episode(self, engine, data):
        raise self.error


class NoEngine:
    async def agenerate(self, request):
        return LLMResponse(request.input_ids, (), (), (), StopReason.STOP)


@pytest.mark.parametrize("workflow", [Waits(), Raises(), Ends(SystemExit(1)), Ends(asyncio.CancelledError())])
def test_a_row_that_hangs_or_raises_is_counted_and_the_evaluation_ends(workflow):
    rows = [{"messages": []}, {"messages": []}]
    found = evaluate(NoEngine(), workflow, rows, timeout_s=0.2)
    assert (found.failed, found.rows, found.accuracy) == (2, 2, 0.0)
    assert rows == [{"messages": []}, {"messages": []}]


def mixture(tmp_path, reward="gold_reward.py:score"):
    (tmp_path / "gold_reward.py").write_text("def score(gold):\n    return float(gold)\n")
    for name, row in {"one": {"question": "a?", "answer": "1"}, "two": {"question": "b?", "gold": 2.0}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps(row) + "\n")
    sources = f"[{{path: {tmp_path}/one}}, {{path: {tmp_path}/two, reward: '{tmp_path}/{reward}'}}]"
    return load_config(TrainConfig, None, [f"train_dataset.sources={sources}", "reward=exact_number"]).config


def test_each_source_of_a_mixture_is_judged_by_its_own_reward(tmp_path):
    config = mixture(tmp_path)
    rows, reward = open_rows(config).train.rows, make_reward(config)
    try:
        check_rows(reward, rows)
        judged = {}
        for row in rows:
            result = asyncio.run(reward(prompt="", completion="1", prompt_ids=(), completion_ids=(), row=row))
            judged[row["tandem.source"]] = result.value
    finally:
        reward.close()
    assert judged == {"one": 1.0, "two": 2.0}


def test_a_reward_that_lacks_its_column_is_refused_at_start_with_the_columns_there(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "a?", "gold": "1"}) + "\n")
    config = load_config(TrainConfig, None, [f"train_dataset.path={tmp_path}", "reward=exact_number"]).config
    with pytest.raises(ConfigError, match=r"answer_column.*question, gold"):
        check_rows(make_reward(config), open_rows(config).train.rows)


def test_single_rows_that_cannot_be_judged_are_named_at_start_and_dropped_when_drawn(tmp_path, caplog):
    answers = ["1", "one", "2", "", "3"]
    text = "".join(json.dumps({"question": "a?", "answer": answer}) + "\n" for answer in answers)
    (tmp_path / "train.jsonl").write_text(text)
    config = load_config(TrainConfig, None, [f"train_dataset.path={tmp_path}", "reward=exact_number"]).config
    check_rows(make_reward(config), open_rows(config).train.rows)
    assert "2 of 5 rows of data set" in caplog.text
    assert "train.jsonl:2: reward 'exact_number' compares numbers" in caplog.text and len(caplog.records) == 1


def test_golds_that_are_prose_are_counted_at_start_and_refused_if_all_are(tmp_path, caplog):
    prose = {"question": "a?", "answer": "First we add all of the apples, and then we see."}
    rows = [prose, *({"question": "a?", "answer": "1"} for _ in range(2))]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(TrainConfig, None, [f"train_dataset.path={tmp_path}", "reward=math"]).config
    with contextlib.closing(make_reward(config)) as reward:
        check_rows(reward, open_rows(config).train.rows)
        assert "1 of 3 rows of data set" in caplog.text and "cannot read the answer 'First we add" in caplog.text
        (tmp_path / "train.jsonl").write_text(json.dumps(prose) + "\n")
        with pytest.raises(ConfigError, match=r"none of 1 rows .* name another answer_column"):
            check_rows(reward, open_rows(config).train.rows)


def test_a_long_data_set_is_looked_at_in_a_moment(caplog):
    reward = make_reward(TrainConfig(reward="math", reward_timeout_s=1.0))
    solution = "So we add. " * 100 + r"\boxed{7}."
    rows = [
        {"tandem.source": "a", "answer": solution if number % 2 else "First we add, and then we see."}
        for number in range(100_000)
    ]
    with contextlib.closing(reward):
        began = time.thread_time()
        check_rows(reward, rows)
        assert time.thread_time() - began < 3  # a tenth of it where nothing else runs
    assert "rows of data set 'a' cannot be judged" in caplog.text


def test_answers_that_are_no_numbers_are_refused_by_a_reward_that_compares_numbers(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "a?", "answer": "x + 1"}) + "\n")
    config = load_config(TrainConfig, None, [f"train_dataset.path={tmp_path}", "reward=gsm8k"]).config
    check_rows(make_reward(config), open_rows(config).train.rows)  # "1" is a number in it
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "a?", "answer": "x"}) + "\n")
    with pytest.raises(ConfigError, match=r"the answer 'x' holds none; reward `math` compares expressions"):
        check_rows(make_reward(config), open_rows(config).train.rows)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("reward=exact_nubmer", "exact_number"),
        ("workflow=multi_trun", "multi_turn"),
        ("workflow=nothing", "; there are: "),
        ("tracking.sinks=[wandbb]", "wandb"),
    ],
)
def test_names_are_resolved_before_anything_is_made(item, words):
    def resolve():
        config = load_config(TrainConfig, None, ["train_dataset.path=addition", item]).config
        check_names(config)
        make_reward(config)

    with pytest.raises(ConfigError, match=words):
        resolve()
