"""Trainers as objects: rows, functions and a model in memory make the run that the command makes of files."""

import asyncio
import json
import os
import re
import threading
from pathlib import Path

import pytest
import torch
import transformers
import yaml

import tandem
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
REWARD = """
def share(completion_ids):
    return 2 * sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""


def options(overrides, *without):
    pairs = (item.partition("=")[::2] for item in [*overrides, "deterministic=true"])
    others = ("reward", "train_dataset.path", "valid_dataset.path", *without)
    return {key: yaml.safe_load(value) for key, value in pairs if key not in others}


def closure():
    factor = 2

    def share(prompts, completions, completion_ids, **columns):
        assert len(columns["answer"]) == len(completions) == 1
        return [factor * sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    return share


def weights(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_closure_and_rows_in_memory_train_to_the_bits_of_the_command(overrides, tmp_path):
    (tmp_path / "own.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = {"reward": f"{tmp_path}/own.py:share", "train_dataset.path": f"{tmp_path}/rows.jsonl", "trial_name": "files"}
    by_command = tandem.train(None, options(overrides) | files)
    trainer = tandem.GRPOTrainer(reward_funcs=closure(), train_dataset=ROWS, options=options(overrides), trial_name="memory")

    async def cell():  # a notebook's cell runs inside of its kernel's loop
        return trainer.train(until=1), trainer.train()

    first, whole = asyncio.run(cell())
    assert (first.steps, whole.steps, by_command.steps) == (1, 2, 2)
    found, expected = trainer.model.state_dict(), weights(by_command.checkpoint)
    assert isinstance(trainer.model, transformers.LlamaForCausalLM)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert whole.metrics["reward/mean"] == by_command.metrics["reward/mean"]


def test_a_model_in_memory_is_trained_and_given_back(overrides, model):
    given = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    keys = options(overrides, "rollout.batch_size", "gconfig.n_samples", "gconfig.max_new_tokens", "rollout.dtype")
    keys = {key: value for key, value in keys.items() if not key.startswith("rollout")}
    trainer = tandem.SFTTrainer(given, processing_class=tokenizer, train_dataset=ROWS, options=keys, batch_size=4)
    assert trainer.train().steps == 2
    before, after = given.state_dict(), trainer.model.state_dict()
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


def test_the_page_and_the_readme_train_as_they_stand(overrides, capsys):
    root = Path(__file__).parents[2]
    for number, name in enumerate(("docs/quick_start.md", "README.md")):
        (code,) = re.findall(r"```python\n(from tandem import GRPOTrainer.*?)```", (root / name).read_text(), re.S)
        names = {}
        exec(compile(code.replace('"smollm2-135m"', "None"), name, "exec"), names)
        trainer = names["trainer"]
        trainer.options |= options(overrides) | {"total_train_steps": 1, "trial_name": f"page{number}"}
        assert trainer.train().steps == 1
    assert "step 1/1" in capsys.readouterr().out


def test_a_trainer_without_reward_funcs_says_once_which_reward_it_takes(overrides, capsys):
    keys = {key: value for key, value in options(overrides).items() if not key.startswith("reward")}
    trainer = tandem.GRPOTrainer(train_dataset=[{"question": "1 + 1?"}], options=keys, trial_name="default")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"none of 1 rows .* can be judged"):
            trainer.train()
    assert capsys.readouterr().out.count("No reward_funcs: the reward is 'math', the default") == 1


def test_a_function_that_was_changed_in_the_notebook_is_the_one_that_judges(overrides):
    found = []
    for value in (0.25, 0.75):

        async def constant(completion, value=value):
            return value

        keys = options(overrides) | {"total_train_steps": 2, "trial_name": "changed"}
        trainer = tandem.GRPOTrainer(reward_funcs=[constant, lambda completion: 0], train_dataset=ROWS, options=keys)
        found.append(trainer.train(until=len(found) + 1).metrics["rewards/constant"])
    assert found == [0.25, 0.75]
    again = tandem.GRPOTrainer(reward_funcs="math", train_dataset=ROWS, options=keys)
    assert isinstance(again.model, transformers.LlamaForCausalLM), "of the run, in a new kernel too"


def test_a_function_that_no_other_process_can_load_is_refused_before_the_model_is(overrides):
    class Elsewhere:
        def __reduce__(self):
            return getattr, (json, "nothing_here")

    def holds(completion, other=Elsewhere()):  # noqa: B008
        return 1.0

    class Dies:
        def __reduce__(self):
            return os._exit, (3,)

    def ends(completion, other=Dies()):  # noqa: B008
        return 1.0

    for function, why in ((holds, "nothing_here"), (ends, "exit status 3")):
        trainer = tandem.GRPOTrainer(reward_funcs=function, train_dataset=ROWS, options=options(overrides))
        with pytest.raises(ConfigError, match=rf"{function.__name__} cannot be loaded in the processes .*{why}"):
            trainer.train()


def test_texts_stay_texts_and_options_are_merged_by_key():
    nested = {"gconfig": {"n_samples": 2, "max_new_tokens": 8}, "system_prompt": "null"}
    trainer = tandem.GRPOTrainer(reward_funcs="math", train_dataset="addition", options=nested, gconfig={"temperature": 0.5})
    from tandem.cli.objects import items_of  # noqa: PLC0415

    config = load_config(TrainConfig, None, items_of(trainer.options)).config
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens, config.gconfig.temperature) == (2, 8, 0.5)
    assert config.system_prompt == "null"


def test_what_cannot_be_taken_is_refused_before_anything_is_loaded(overrides, tmp_path):
    lock = threading.Lock()

    def locked(completion):
        with lock:
            return 1.0

    def made(**given):
        return tandem.GRPOTrainer(**{"reward_funcs": "math", "train_dataset": ROWS, "options": options(overrides), **given})

    for given, says in (
        ({"reward_funcs": locked}, "locked cannot be sent to the processes that rewards run in: .*lock"),
        (
            {"reward_funcs": [closure()], "processing_class": object()},
            "processing_class is only for a model object",
        ),
        ({"reward_funcs": "nosuch.py +"}, "reward"),
        ({"options": {"actor.optimizer": object()}}, "a object cannot be a configuration value"),
        ({"train_dataset": {"question": ["a"]}}, "row 0 is of type str; give a list of dicts"),
        ({"train_dataset": type("DataFrame", (list,), {"iterrows": None})()}, "is a DataFrame; .* df.to_dict"),
        ({"train_dataset": 5}, "train_dataset is of type int; give a list of dicts"),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"reward_funcs": 3}, "reward_funcs: 3 is neither a function nor"),
        ({"options": [1]}, "options is of type list"),
        ({"reward_funcs": []}, "reward_funcs is empty; give a function"),
        ({"model": 3}, "model is of type int; give a folder, a name, or a model of transformers"),
        ({"reward_funcs": "math", "reward_weights": [1, 2]}, "1 reward_funcs and 2 reward_weights"),
        ({"reward_funcs": "math", "reward_weights": "a"}, "reward_weights='a' must be a list of numbers"),
        ({"train_dataset": [{"question": object()}]}, "train_dataset: 'question' of row 0 cannot be written as JSON"),
        ({"learning_rate": 1e-5}, "learning_rate"),
        ({"options": {"actor.optimizer.lrate": 1e-5}}, "actor.optimizer.lr"),
    ):
        with pytest.raises(ConfigError, match=says):
            made(**given)
    with pytest.raises(ConfigError, match="overrides is of type list; give a dict"):
        tandem.train(None, ["total_train_steps=3"])
    with pytest.raises(ConfigError, match="file is of type dict; give the name of a YAML file, and values as overrides="):
        tandem.train({"total_train_steps": 3})
    with pytest.raises(ConfigError, match="call train"):
        made().model  # noqa: B018
    assert not list(tmp_path.rglob("run.json"))
