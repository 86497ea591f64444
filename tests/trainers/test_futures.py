"""A conductor that lets stages wait for each other by the edges of the graph alone trains as the local one does."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.algorithm import PRESETS
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig
from tandem.flow.conductor import LocalConductor
from tandem.trainers import distill, loop, recipes
from tandem.trainers.script import open_training
from tests.flow.futures import FutureConductor
from tests.trainers.preferring import keys_of
from tests.trainers.test_constraint import BOTH, LIMIT

REWARD = """
async def parts(completion_ids):
    even = sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
    return {"even": even, "low": sum(token % 4 == 0 for token in completion_ids) / len(completion_ids)}
"""

MODELS = ("algorithm.kl.coefficient=0.1", "reference.refresh_every_steps=1", "rollout.verify.every_steps=1")
FAST = ("ppo", "m2po")


def trained(overrides, conductor, monkeypatch, *more):
    """Weights of all trained models after two steps, and the metrics that are no measurements."""
    monkeypatch.setattr("tandem.flow.opening.LocalConductor", conductor)
    items = [*overrides, "deterministic=true", f"trial_name={conductor.__name__}", "gconfig.max_new_tokens=6", *more]
    config = load_config(TrainConfig, None, list({item.partition("=")[0]: item for item in items}.values())).config
    with open_training(config) as (_, session):
        for _ in range(2):
            batch, metrics = session.step()
            metrics |= session.end_step()
        engines = [getattr(session.roles.get(name), "engine", None) for name in ("actor", "critic", "reference")]
        weights = [t.clone() for engine in engines if engine is not None for _, t in engine.weights()]
        return weights, {**batch}, metrics, session.conductor


@pytest.mark.parametrize("preset", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PRESETS])
def test_a_conductor_on_futures_gives_the_bits_of_the_local_one(overrides, preset, monkeypatch, tmp_path):
    (tmp_path / "own.py").write_text(REWARD)
    more = [f"algorithm={preset}", f"reward={tmp_path}/own.py:parts", *MODELS]
    if preset == "ttrl":
        more = [f"algorithm={preset}", "algorithm.update_samples=2", "reward=math", *MODELS]
    weights, batch, metrics, _ = trained(overrides, LocalConductor, monkeypatch, *more)
    theirs, their_batch, their_metrics, conductor = trained(overrides, FutureConductor, monkeypatch, *more)
    assert len(conductor.spans) >= 4 and len({span.pool for span in conductor.spans}) >= 2
    assert len(weights) == len(theirs) and all(map(torch.equal, weights, theirs))
    assert batch.keys() == their_batch.keys()
    assert all(torch.equal(batch[name].nan_to_num(), their_batch[name].nan_to_num()) for name in batch)
    same = {name for name in metrics if not name.startswith(("time/", "tokens_per_s/", "memory/"))}
    assert {n: metrics[n] for n in same} == pytest.approx({n: their_metrics[n] for n in same}, nan_ok=True, rel=0, abs=0)


def runs_of(overrides, model, tmp_path):
    """Whole runs: the trainer, the class of its configuration and its keys."""
    learning = [*overrides, "gconfig.max_new_tokens=6", *MODELS]
    own = ("reward=", "gconfig.n_samples=")
    taught = [f"teacher.path={model}", *(key for key in overrides if not key.startswith(own)), "gconfig.max_new_tokens=6"]
    return {
        "constraint": (loop.train, TrainConfig, [*learning, BOTH, *LIMIT]),
        "distillation": (distill.train, DistillConfig, taught),
        "preference": (
            recipes.train,
            PreferenceConfig,
            keys_of(tmp_path / "pairs", model, "checkpoint.every_steps=null"),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["constraint", "distillation", "preference"])
def test_whole_runs_on_futures_save_the_same_weights(overrides, model, kind, monkeypatch, tmp_path):
    train, config, keys = runs_of(overrides, model, tmp_path)[kind]
    saved = []
    for conductor in (LocalConductor, FutureConductor):
        for module in ("tandem.flow.opening", "tandem.trainers.supervised"):
            monkeypatch.setattr(f"{module}.LocalConductor", conductor)
        items = [*keys, "deterministic=true", "total_train_steps=2", f"trial_name={conductor.__name__}"]
        found = train(load_config(config, None, list({item.partition("=")[0]: item for item in items}.values())))
        files = sorted(Path(found.checkpoint).rglob("*.safetensors"))
        saved.append({(file.name, name): tensor for file in files for name, tensor in load_file(file).items()})
    assert saved[0].keys() == saved[1].keys() and len(saved[0]) > 10
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
