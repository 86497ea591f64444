"""A tiny reward model, for tests that judge by one."""

from pathlib import Path

import torch

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.engines.train.engine import SpreadEngine
from tandem.models.tokenizer import load_tokenizer, save_tokenizer


def save_judge(folder: Path, base: Path, policy: Path) -> None:
    """Writes ``folder``: the model ``base`` with a head of random numbers, and the tokenizer and processor of ``policy``."""
    config = load_config(TrainConfig, None, [f"actor.path={base}", "actor.dtype=float32", "train_dataset.path=addition"])
    torch.manual_seed(3)
    judge = SpreadEngine(config.config.actor, 1, head="scalar")
    judge.load_weights((name, torch.randn_like(x) if x.shape[0] == 1 else x) for name, x in judge.weights())
    judge.save(folder)
    save_tokenizer(load_tokenizer(policy), folder)
