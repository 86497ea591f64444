"""RLHF in little: a tiny model learns what a reward model likes. The true preference rises only if the labels were true."""

import json
import runpy
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import RewardModelConfig
from tandem.trainers import loop, recipes
from tests.tiny import tiny_model_folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DATA = runpy.run_path(str(EXAMPLES / "rlhf_data.py"))
RULE = """
def letters(completion):
    fits = float(sum(c.isascii() and c.isalpha() for c in completion) >= 6)
    return {"letters": fits, "accuracy": fits}
"""
SMALL = [
    "threads=1",
    "deterministic=true",
    "actor.dtype=float32",
    "actor.optimizer.lr=0.003",
    "system_prompt=null",
    "tracking.plot_every_steps=null",
    "checkpoint.every_steps=null",
    "run.root=runs",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_trained_reward_model_raises_the_true_preference_and_a_shuffled_one_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rule.py").write_text(RULE)
    model = tiny_model_folder(tmp_path / "models", kind="llama")
    things = DATA["THINGS"]
    for split, some in (("train", things[:110]), ("test", things[110:])):
        DATA["write"](Path(f"data/{split}.jsonl"), DATA["questions"](some, seed=1))
    asked = ["--data", "data/train.jsonl", "--max-rows", "128", "--n", "8", "--temperature", "1", "--max-new-tokens", "8"]
    assert main(["eval", str(model), *asked, "--label", "answers", "reward=rule.py:letters"]) == 0
    rows = DATA["read"](Path("data/train.jsonl"))
    samples = DATA["read"](Path("evaluations/answers/samples.jsonl"))

    trained = learn(model, "pairs", DATA["make_pairs"](rows, samples, wrong=0.1))
    assert trained[0]["eval/accuracy"] < 0.4 and trained[-1]["eval/accuracy"] > 0.8
    assert trained[-1]["eval/reward"] > trained[0]["eval/reward"] + 0.5

    control = learn(model, "shuffled", DATA["make_pairs"](rows, samples, wrong=0.5))
    assert control[-1]["eval/reward"] > control[0]["eval/reward"]
    assert control[-1]["eval/accuracy"] < control[0]["eval/accuracy"] + 0.15


def learn(model: Path, name: str, pairs: list[dict[str, str]]) -> list[dict[str, float]]:
    """The figures of the held-out questions, of a policy that learnt from a reward model that learnt from ``pairs``."""
    DATA["write"](Path(f"{name}/train.jsonl"), pairs[:-64])
    DATA["write"](Path(f"{name}/test.jsonl"), pairs[-64:])
    keys = [*SMALL, f"actor.path={model}", f"train_dataset.path={name}", f"trial_name=judge_{name}", "batch_size=32"]
    keys += ["total_train_steps=100", "evaluate.every_steps=null", "evaluate.max_rows=128"]
    judge = recipes.train(load_config(RewardModelConfig, EXAMPLES / "rlhf_reward.yaml", keys)).checkpoint
    keys = [*SMALL, f"actor.path={model}", f"critic.path={judge}", f"trial_name=ppo_{name}", "train_dataset.path=data"]
    keys += [f"reward=model(path={judge}) + 0*rule.py:letters", "critic.optimizer.lr=0.003", "total_train_steps=16"]
    keys += ["gconfig.n_samples=4", "gconfig.max_new_tokens=8", "rollout.batch_size=32", "rollout.dtype=float32"]
    keys += ["rollout.engine.kv_cache_gib=0.05", "evaluate.every_steps=16", "evaluate.max_rows=64"]
    keys += ["algorithm.kl.coefficient=0.05"]  # 16 steps are few for a tiny model that is held close to what it was
    trained = loop.train(load_config(TrainConfig, EXAMPLES / "rlhf_ppo.yaml", keys))
    lines = map(json.loads, (trained.folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval/accuracy" in line]
