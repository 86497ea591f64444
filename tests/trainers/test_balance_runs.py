"""`rollout.balance=auto` in a run of its own kind: threads really move, in both processes."""

import json

import pytest
import torch

from tandem.api.weights import WeightVersion
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.rollout import EmbeddedEngineConfig
from tandem.engines.inference.embedded import EmbeddedProcess
from tandem.flow import conductor
from tandem.trainers.loop import train


@pytest.mark.slow
@pytest.mark.invariant
def test_a_trainer_that_waits_gives_threads_to_generation(overrides, monkeypatch):
    given, measured = [], []

    class Watched(conductor.Balance):
        """Who waits for whom on a machine with other work is chance, so this balance is told that the trainer does."""

        def __init__(self, generating, training, give):
            def and_note(*split):
                give(*split)
                given.append((split, torch.get_num_threads()))

            super().__init__(generating, training, and_note)

        def after_step(self, metrics):
            measured.append((metrics["time/trainer_wait"], metrics["time/engine_idle"]))
            return super().after_step({"time/trainer_wait": 0.6, "time/engine_idle": 0.0})

    monkeypatch.setattr(conductor, "Balance", Watched)
    sizes = ["gconfig.max_new_tokens=32", "rollout.max_concurrent=4", "gconfig.n_samples=2", "total_train_steps=5"]
    sides = ["async_training=true", "rollout.balance=auto", "threads=4", "rollout.engine.threads=1"]
    before = torch.get_num_threads()
    try:
        folder = train(load_config(TrainConfig, None, [*overrides, *sizes, *sides])).folder
    finally:
        torch.set_num_threads(before)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert measured == [(row["time/trainer_wait"], row["time/engine_idle"]) for row in rows]
    assert all(0 <= share <= 1 for shares in measured for share in shares) and any(trainer > 0 for trainer, _ in measured)
    assert given == [((2, 2), 2)]
    assert [row["threads/generate"] for row in rows] == [1, 1, 1, 2, 2]
    assert all(row["threads/generate"] + row["threads/train"] == 4 for row in rows)


@pytest.mark.slow
@pytest.mark.invariant
def test_an_engine_computes_with_as_many_threads_as_it_is_told(model):
    config = EmbeddedEngineConfig(kv_cache_gib=0.01)
    engine = EmbeddedProcess.start(model, config, torch.float32, "cpu", version=WeightVersion(0), threads=1)
    try:
        assert engine.control("set_threads", 3) == {"threads": 3}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["rollout.balance=auto"], "async_training=true"),
        (["rollout.balance=auto", "async_training=true", "rollout.backend=embedded:d2"], "rollout.backend=embedded"),
        (["rollout.balance=auto", "async_training=true", "actor.backend=fsdp:d2"], "actor.backend=fsdp:d1"),
    ],
)
def test_a_run_that_cannot_be_balanced_is_refused_at_start(overrides, items, message):
    with pytest.raises(ConfigError, match=message):
        train(load_config(TrainConfig, None, [*overrides, *items]))
