"""PPO through the trainer: actor and critic learn, each at its time."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train
from tests.tiny import tiny_config


def run(overrides, *more):
    """Trains; the last of two equal keys counts."""
    keys = {item.partition("=")[0]: item for item in [*overrides, "algorithm=ppo", *more]}
    return train(load_config(TrainConfig, None, list(keys.values())))


def changed(before, after) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_a_run_changes_actor_and_critic_and_saves_both(overrides, model):
    summary = run(overrides, "actor.mini_batches=2", "critic.optimizer.lr=0.01", "gconfig.n_samples=1")
    initial = load_file(model / "model.safetensors")
    actor = load_file(summary.checkpoint / "model.safetensors")
    critic = load_file(summary.checkpoint / "critic" / "model.safetensors")

    assert changed(initial, actor) == set(initial)
    assert changed({n: t for n, t in initial.items() if n != "lm_head.weight"}, critic) == set(initial) - {"lm_head.weight"}
    assert critic["score.weight"].any()
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        summary.checkpoint / "critic", output_loading_info=True
    )
    assert loaded.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(summary.checkpoint / "critic")
    assert loaded.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert AutoTokenizer.from_pretrained(summary.checkpoint).pad_token_id == tokenizer.eos_token_id
    assert not report["missing_keys"]
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("value/loss", "value/explained_variance", "value/clip_fraction", "value/mean", "returns/mean", "loss"):
        assert rows[-1][name] is not None, name
    assert rows[0]["value/mean"] == 0  # the head begins at 0
    assert rows[-1]["actor/rests"] == 0


def test_while_the_critic_warms_up_the_actor_stays_as_it_is_to_the_bit(overrides, model):
    initial = load_file(model / "model.safetensors")
    more = ["critic.warmup_steps=2", "critic.optimizer.lr=0.01", "checkpoint.every_steps=1", "checkpoint.keep_last=null"]
    summary = run(overrides, *more, "total_train_steps=3")
    checkpoints = summary.folder / "checkpoints"
    actors = [load_file(checkpoints / f"step_{i}" / "model.safetensors") for i in (1, 2, 3)]
    critics = [load_file(checkpoints / f"step_{i}" / "critic" / "model.safetensors") for i in (1, 2, 3)]

    assert not changed(initial, actors[0])
    assert not changed(initial, actors[1])
    assert changed(initial, actors[2])
    assert changed(critics[0], critics[1])
    assert changed(critics[1], critics[2])
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["actor/rests"] for row in rows] == [1, 1, 0]


def test_a_critic_that_shares_the_actors_backbone_learns_with_it(overrides):
    summary = run(overrides, "critic.shared=true", "critic.loss_weight=0.5", "actor.mini_batches=2")
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["value/mean"] == 0
    assert rows[-1]["value/mean"] != 0
    assert rows[-1]["value/loss"] > 0
    assert load_file(summary.checkpoint / "value_head.safetensors")["weight"].any()
    assert not (summary.checkpoint / "critic").exists()
    AutoModelForCausalLM.from_pretrained(summary.checkpoint)


def test_a_critic_begins_as_a_reward_model_and_goes_on_from_there(overrides, tmp_path):
    first = run(overrides, "critic.optimizer.lr=0.01", "trial_name=first")
    critic = first.checkpoint / "critic"
    second = run(overrides, f"critic.path={critic}", "critic.optimizer.lr=0", "trial_name=second", "total_train_steps=1")
    assert not changed(load_file(critic / "model.safetensors"), load_file(second.checkpoint / "critic/model.safetensors"))
    assert second.metrics["value/mean"] != 0


def test_a_reward_model_with_more_than_one_label_is_refused_as_critic(overrides, model, tmp_path):
    config = tiny_config()
    config.num_labels = 2
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "two")
    for file in model.glob("token*"):
        (tmp_path / "two" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="is a classifier with 2 labels"):
        run(overrides, f"critic.path={tmp_path / 'two'}")


def test_a_critic_with_another_tokenizer_is_refused(overrides, model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        text = file.read_bytes()
        (other / file.name).write_bytes(text.replace(b'"!"', b'"!?"') if file.name == "tokenizer.json" else text)
    with pytest.raises(ConfigError, match="has another tokenizer than the actor: '!' is missing there"):
        run(overrides, f"critic.path={other}")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["algorithm=grpo", "critic.warmup_steps=1"], r"critic\.warmup_steps=1 is not used.*use algorithm=ppo"),
        (["algorithm=grpo", "critic.optimizer.lr=0.1"], r"critic\.optimizer\.lr=0\.1 is not used"),
        (["critic.loss_weight=0.2"], r"critic\.loss_weight=0\.2 is only for critic\.shared=true"),
        (["critic.shared=true", "critic.optimizer.lr=0.1"], r"optimizer\.lr=0\.1 is not used with critic\.shared=true"),
        (["critic.warmup_steps=2"], r"critic\.warmup_steps must be below total_train_steps \(2\), got 2"),
        (["critic.value_clip=0"], r"critic\.value_clip must be a number, above 0, got 0"),
        (
            ["critic.optimizer.min_lr_ratio=0.1"],
            r"critic\.optimizer\.min_lr_ratio=0\.1 is not used by the constant schedule",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_start(overrides, more, message):
    with pytest.raises(ConfigError, match=message):
        run(overrides, *more)
