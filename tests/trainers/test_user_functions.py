"""A user's own part of an algorithm that fails in the middle of a run ends it, with the function, its line and the step."""

import json

import pytest

from tandem.api.failures import UserCodeFailed
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import PreferenceConfig
from tandem.trainers import recipes
from tandem.trainers.loop import train

LATE = """
calls = []


def loss(policy, advantages, mask):
    calls.append(1)
    if len(calls) > 1:
        return 1 / 0
    return -policy * advantages * mask, {}


def keep(accuracies, rewards):
    calls.append(1)
    return {}["reason"] if len(calls) > 6 else (True, "")


def advantage(rewards):
    return rewards.nonsense


def no_returns(token_rewards, values, mask):
    return (token_rewards - values) * mask


def bare(policy, advantages, mask):
    return -policy * advantages * mask


def yes(rewards):
    return True


def pairs(chosen, rejected):
    calls.append(1)
    if len(calls) > 2:
        raise IndexError("mine")
    return rejected - chosen, chosen.detach(), rejected.detach()
"""


def written(tmp_path, name):
    """A file of its own for each test: it is executed once in a process, and counts its calls."""
    file = tmp_path / f"mine_{name}.py"
    file.write_text(LATE)
    return file


def line_of(words):
    return next(number for number, line in enumerate(LATE.splitlines(), 1) if words in line)


def failed_run(tmp_path):
    (folder,) = {path.parent for path in tmp_path.glob("*/*/run.json")}
    return json.loads((folder / "run.json").read_text()), (folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("key", "name", "step", "error", "words"),
    [
        ("policy_loss", "loss", 2, "ZeroDivisionError: division by zero", "1 / 0"),
        ("filter", "keep", 2, "KeyError: 'reason'", "{}["),
        ("advantage", "advantage", 1, "AttributeError: 'Tensor' object has no attribute 'nonsense'", "rewards.nonsense"),
    ],
)
def test_a_function_that_raises_ends_the_run_with_its_line_and_the_step(overrides, tmp_path, key, name, step, error, words):
    file = written(tmp_path, name)
    items = [*overrides, f"algorithm.{key}={file}:{name}"]
    with pytest.raises(UserCodeFailed) as raised:
        train(load_config(TrainConfig, None, items))
    message = str(raised.value)
    assert message.startswith(f"step {step}: '{file}:{name}' raised {error} ({file.name}:{line_of(words)} in {name}: ")
    assert words in message and "); mend it there" in message
    record, log = failed_run(tmp_path)
    assert (record["status"], record["steps"]) == ("failed", step - 1)
    assert message in record["error"]
    assert f"line {line_of(words)}, in {name}" in log  # the whole traceback


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("policy_loss", "bare", r"must return \(losses, \{name: metric\}\), tensors of shape \[\d+\]; it returned a Tensor"),
        ("filter", "yes", r"must return \(keep, reason\), a bool and a word that is counted; it returned a bool True"),
        ("advantage", "yes", r"must return a tensor of shape \[16\]; it returned a bool True"),
        ("advantage", "no_returns", r"must return \(advantages, returns\) if it takes `values`; it returned a Tensor"),
        ("advantage", "no_returns critic.shared=true", r"must return \(advantages, returns\) .* returned a Tensor"),
    ],
)
def test_a_function_that_returns_something_else_is_told_what_it_must_return(overrides, tmp_path, key, name, words):
    name, *more = name.split()
    file = written(tmp_path, f"{key}_{name}")
    with pytest.raises(UserCodeFailed, match=rf"^step 1: .*:{name} {words}"):
        train(load_config(TrainConfig, None, [*overrides, f"algorithm.{key}={file}:{name}", *more]))
    assert failed_run(tmp_path)[0]["status"] == "failed"


def test_so_does_a_preference_loss(model, tmp_path):
    file = written(tmp_path, "pairs")
    items = [
        f"run.root={tmp_path}",
        f"actor.path={model}",
        "train_dataset.path=addition_pairs",
        "evaluate.every_steps=null",
        "batch_size=2",
        "total_train_steps=4",
        "tracking.plot_every_steps=null",
        f"loss={file}:pairs",
        "threads=1",
    ]
    with pytest.raises(UserCodeFailed, match=rf"^step 3: .*IndexError: mine \(.*:{line_of('IndexError')} in "):
        recipes.train(load_config(PreferenceConfig, None, items))
    assert failed_run(tmp_path)[0]["steps"] == 2
