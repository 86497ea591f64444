"""Keys of adapters: read, or refused with the reason."""

import pytest

from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig
from tandem.config.train_engine import LoRAConfig, critic_engine


def load(*items, cls=TrainConfig):
    return load_config(cls, None, ["train_dataset.path=addition", *items]).config


def test_the_keys_of_the_page_make_an_adapter():
    items = ["rank=16", "alpha=32", "target_modules=all-linear", "dropout=0"]
    config = load(*(f"actor.lora.{item}" for item in items))
    assert config.actor.lora.rank == 16 and config.actor.lora.scaling == 2.0
    assert config.actor.lora.target_modules == ("all-linear",)
    assert load("actor.lora.rank=8").actor.lora.scaling == 2.0  # alpha is twice the rank
    assert load("actor.lora.rank=8", "actor.lora.target_modules=[q_proj, v_proj]").actor.lora.target_modules[1] == "v_proj"


def test_the_critic_has_an_adapter_only_where_it_is_asked_for_one():
    config = load("algorithm=ppo", "actor.lora.rank=16", "actor.lora.alpha=4")
    assert critic_engine(config.critic, config.actor).lora.rank is None
    config = load("algorithm=ppo", "critic.lora.rank=8")
    assert critic_engine(config.critic, config.actor).lora == LoRAConfig(rank=8) and config.actor.lora.rank is None


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["actor.lora.alpha=32"], "actor.lora.alpha=32.0 is not used because actor.lora.rank is null: set it"),
        (["actor.lora.target_modules=[q_proj, k_proj]"], r"target_modules=\[q_proj, k_proj\] is not used because"),
        (["actor.lora.rank=0"], "actor.lora.rank must be a whole number, at least 1, got 0"),
        (["actor.lora.rank=4", "actor.lora.alpha=0"], "actor.lora.alpha must be a number, above 0, got 0"),
        (["actor.lora.rank=4", "actor.lora.target_modules=[]"], "target_modules is empty"),
        (["actor.lora.rank=4", "actor.lora.target_modules=[all-linear, q_proj]"], "which is all of them, and more"),
        (["actor.lora.rank=4", "actor.lora.dropout=0.1"], "dropout=0.1 would make log-probabilities random"),
        (["actor.lora.rank=4", "actor.backend=fsdp:d1t2"], "does not go with actor.backend=fsdp:d1t2: t cuts every matrix"),
        (["algorithm=ppo", "critic.lora.rank=4", "actor.backend=fsdp:d1t2"], "critic.lora does not go with critic.backend"),
        (["critic.lora.rank=4"], "critic.lora.rank=4 is not used, because"),
        (["algorithm=ppo", "critic.shared=true", "critic.lora.rank=4"], "critic.lora.rank=4 is not used with critic.shared"),
        (["actor.lora.rnak=4"], "did you mean actor.lora.rank"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(items, words):
    with pytest.raises(ConfigError, match=words):
        load(*items)


@pytest.mark.parametrize("cls", [PreferenceConfig, DistillConfig])
def test_dropout_is_refused_where_passes_are_compared(cls):
    items = ["teacher.path=x"] if cls is DistillConfig else []
    with pytest.raises(ConfigError, match="would make log-probabilities random"):
        load("actor.lora.rank=4", "actor.lora.dropout=0.1", *items, cls=cls)


@pytest.mark.parametrize("cls", [SFTConfig, RewardModelConfig])
def test_dropout_is_taken_where_they_are_not(cls):
    assert load("actor.lora.rank=4", "actor.lora.dropout=0.1", cls=cls).actor.lora.dropout == 0.1


def test_a_part_that_is_frozen_has_no_adapters():
    with pytest.raises(ConfigError, match=r"actor\.freeze and actor\.lora\.towers both name 'vision'"):
        load("actor.lora.rank=4", "actor.lora.towers=[vision,connector]", "actor.freeze=[vision]")
    load("actor.lora.rank=4", "actor.lora.towers=[connector]", "actor.freeze=[vision]")
