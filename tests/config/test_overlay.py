"""A role's null takes the actor's: one rule for the critic, the reference, the teacher and reward models."""

from dataclasses import replace

import pytest

from tandem.api.workflow import FrozenModel
from tandem.config.preference import DistillConfig, FrozenConfig, TeacherConfig
from tandem.config.train_engine import (
    ActorConfig,
    CriticConfig,
    LoRAConfig,
    ReferenceConfig,
    TrainEngineConfig,
    key_of,
    overlay,
)

ACTOR = ActorConfig(path="a", backend="fsdp:d2", gradient_checkpointing=True, lora=LoRAConfig(rank=4), mini_batches=3)


@pytest.mark.parametrize(
    "own", [ReferenceConfig(path="b"), FrozenConfig(path="b"), TeacherConfig(path="b"), FrozenModel("b")]
)
def test_a_frozen_model_is_the_actors_but_for_what_it_says_and_never_has_adapters(own):
    made = overlay(TrainEngineConfig, own, ACTOR, lora=LoRAConfig())
    assert type(made) is TrainEngineConfig
    assert (made.path, made.backend, made.gradient_checkpointing, made.lora.rank) == ("b", "fsdp:d2", True, None)


def test_a_value_that_is_false_or_zero_is_a_value_and_its_key_is_the_roles_own():
    critic = CriticConfig(gradient_checkpointing=False, epochs_per_batch=1)
    made = overlay(ActorConfig, critic, replace(ACTOR, epochs_per_batch=2), optimizer=ACTOR.optimizer, lora=ACTOR.lora)
    assert (made.gradient_checkpointing, made.epochs_per_batch, made.path) == (False, 1, "a")
    config = DistillConfig(teacher=TeacherConfig(dtype="float32"))
    assert [key_of(config, "teacher", name) for name in ("dtype", "backend")] == ["teacher.dtype", "actor.backend"]
