"""One tiny model for all runs of this folder."""

from pathlib import Path

import pytest

from tests.tiny import tiny_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), kind="llama")


@pytest.fixture
def overrides(model, tmp_path):
    """A run of three steps on a tiny model, in a folder of the test's own."""
    return [
        f"run.root={tmp_path}",
        f"actor.path={model}",
        "actor.optimizer.lr=0.01",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "rollout.batch_size=4",
        "rollout.engine.kv_cache_gib=0.05",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=8",
        "train_dataset.path=addition",
        "valid_dataset.path=addition",
        "evaluate.every_steps=null",
        "total_train_steps=3",
        "tracking.plot_every_steps=null",
        f"reward={Path(__file__).parent / 'small_rewards.py'}:even",
        "threads=1",
    ]
