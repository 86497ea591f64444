"""Tiny models for all runs of this folder."""

import shutil
from pathlib import Path

import pytest

from tests.scalar_judge import save_judge
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"), kind="llama")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A policy, another model of its family, a reward model, and the file of a user."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(Path(__file__).with_name("scores_of_a_user.py"), folder / "mine.py")
    policy, other = tiny_model_folder(folder), tiny_model_folder(folder, seed=1)
    save_judge(folder / "judge", other, policy)
    return folder


@pytest.fixture
def overrides(model, tmp_path, request):
    """A run of two steps, in slow tests three, on a tiny model, in a folder of the test's own."""
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
        f"total_train_steps={3 if request.node.get_closest_marker('slow') else 2}",
        "tracking.plot_every_steps=null",
        f"reward={Path(__file__).parent / 'small_rewards.py'}:even",
        "threads=1",
    ]
