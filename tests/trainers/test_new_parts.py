"""A new part of an algorithm is one file with one registration; a function in a file of the user's has the same record."""

import json
import subprocess
import sys

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.plan import plan_run

NEW = """
from tandem.api.lazy_torch import torch
from tandem.algorithms.registry import POLICY_LOSSES
from tandem.config.parts import KnobRule


@POLICY_LOSSES.register(
    "halved",
    "2701.00001",
    knobs={"factor": KnobRule(low=0.0, meaning="Size of the loss.")},
    no_weight="it looks at the sampler itself",
    corrects_itself=True,
    proportional=True,
)
def halved(policy, advantages, mask, *, factor=0.5):
    \"\"\"L_t = −factor·A·policy.\"\"\"
    losses = -factor * advantages * policy.masked_fill(~mask, 0.0)
    return losses, {"ratio": torch.ones_like(policy)}
"""
RUN = """
import sys
import new_loss
from tandem.cli.main import main

code = main(sys.argv[1:])
print("torch" in sys.modules)
sys.exit(code)
"""
LOSS = "algorithm.policy_loss=halved"


@pytest.fixture
def tandem(tmp_path):
    """`tandem …` in a process that has imported the new file and nothing else, as the room imports its own files."""
    (tmp_path / "new_loss.py").write_text(NEW)
    (tmp_path / "run.py").write_text(RUN)

    def run(*words):
        command = [sys.executable, str(tmp_path / "run.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    return run


def test_a_new_loss_is_listed_and_checked_without_torch(tandem):
    listed = tandem("algorithms", "--parts", "--json").stdout.splitlines()
    row = next(row for row in json.loads(listed[0]) if row["name"] == "halved")
    assert row == {
        "key": "algorithm.policy_loss",
        "name": "halved",
        "formula": "L_t = −factor·A·policy",
        "sources": ["2701.00001"],
        "knobs": {"factor": 0.5},
    }
    keys = ["config", "train_dataset.path=addition", LOSS]
    assert tandem(*keys, "rollout.replay.groups=4", "algorithm.correction.weight=none").returncode == 0
    for wrong, words in {
        "algorithm.policy_loss.factor=-1": "algorithm.policy_loss.factor must be a number, at least 0, got -1",
        "algorithm.policy_loss.clip=1": "is not used by halved; it has factor. Leave it out, or choose cpgd or gmpo",
        "algorithm.correction.weight=mask": "contradicts algorithm.correction.weight=mask, because it looks at the sampler",
        "algorithm.policy_loss=halfed": "did you mean 'halved'?",
    }.items():
        done = tandem(*keys, wrong)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "False"), done.stderr
        assert words in done.stderr


@pytest.mark.slow
def test_a_new_loss_is_trained_with_and_spares_steps_without_signal(tandem, overrides, tmp_path):
    done = tandem("train", *overrides, LOSS, "algorithm.policy_loss.factor=0.25", "total_train_steps=2", "trial_name=new")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*/new/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[-1]["step"] == 2 and rows[-1]["grad_norm"] > 0


OWN = """
from tandem.algorithms.registry import ADVANTAGES, FILTERS, IMPORTANCE_WEIGHTS, POLICY_LOSSES
from tandem.config.parts import KnobRule


@POLICY_LOSSES.describe(knobs={"low": KnobRule(at_most="high", meaning="Low."), "high": KnobRule(meaning="High.")},
                        sequence_ratio=True)
def loss(policy, mask, *, low=0.0, high=1.0):
    return policy * low, {}


@ADVANTAGES.describe(on_policy="its baseline is the sampler's")
def advantage(rewards, group_id, in_statistics):
    return rewards


@FILTERS.describe(knobs={"most": KnobRule(high=1.0, meaning="Most.")})
def keep(accuracies, rewards, *, most=0.5):
    return True, ""


@IMPORTANCE_WEIGHTS.describe(knobs={"high": KnobRule(meaning="High.")}, drops_outside=True)
def weight(ratio, *, high=4.0):
    return ratio * (ratio <= high)
"""


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["algorithm.policy_loss=own.py:loss", "algorithm.policy_loss.low=2"], "low must be at most"),
        (["algorithm.policy_loss=own.py:loss", "algorithm.correction.weight=truncate"], "correction.level=sequence"),
        (["algorithm.advantage=own.py:advantage", "actor.mini_batches=2"], "because its baseline is the sampler's"),
        (["algorithm.advantage=own.py:advantage", "gconfig.n_samples=1"], "compares the samples of a prompt, got 1"),
        (["algorithm.filter=own.py:keep", "algorithm.filter.most=2"], "most must be a number, at most 1, got 2"),
        (["algorithm.correction.weight=own.py:weight", "algorithm.correction.high=0.5"], "high must be at least 1"),
        (
            ["algorithm.correction.weight=own.py:weight", "algorithm.correction.low=0.5"],
            "low is not a knob of own.py:weight",
        ),
    ],
)
def test_the_record_of_a_function_in_a_file_is_checked_before_a_model_is_loaded(keys, words, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    config = load_config(TrainConfig, None, ["train_dataset.path=addition", *keys]).config
    with pytest.raises(ConfigError, match=words):
        plan_run(config)
