"""Contradictions are refused before anything starts, and the arithmetic of a run is right."""

import pytest

from tandem.config.arithmetic import arithmetic, max_head_offpolicyness, placement, total_steps
from tandem.config.check import check
from tandem.config.data import DatasetConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tests.config.loading import assert_refused, load


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.max_head_offpolicyness=2"], ["contradicts async_training=false", "set async_training=true"]),
        (["gconfig.n_samples=1"], ["gconfig.n_samples must be at least 2", "got 1"]),
        (["gconfig.top_p=0.9"], ["gconfig.top_p=0.9", "algorithm.allow_truncated_sampling=true"]),
        (["gconfig.top_k=20"], ["gconfig.top_k=20"]),
        (["gconfig.temperature=0"], ["gconfig.temperature must be a number, at least 0.001, at most 1000, got 0"]),
        (
            ["rollout.batch_size=2", "actor.mini_batches=4"],
            ["actor.mini_batches must be at most rollout.batch_size (2)", "got 4"],
        ),
        (["rollout.max_concurrent=0"], ["rollout.max_concurrent must be a whole number, at least 1, got 0"]),
        (["actor.backend=deepspeed:d2"], ["must be deepspeed:zero1, zero2 or zero3", "deepspeed:zero2:d2"]),
        (
            ["actor.backend=deepspeed:zero3:d2t2"],
            ["deepspeed:zero2:d2. Tensor and context parallelism (t, c)", "are fsdp's"],
        ),
        (["actor.backend=megatron:d2"], ["'megatron' is not in this version", "fsdp:d2"]),
        (["actor.backend=fsdp:d2p2"], ["pipeline parallelism (p)", "not in this version", "fsdp:d2t2"]),
        (["actor.backend=fsdp:d0"], ["each with a number of at least 1 (and six digits at most) behind it"]),
        (["critic.backend=fsdp:x2", "algorithm=ppo"], ["critic.backend=fsdp:x2 must begin with fsdp:dN"]),
        (
            ["actor.backend=fsdp:d2", "reference.backend=fsdp:d2t2", "algorithm.kl.coefficient=0.1"],
            ["reference.backend=fsdp:d2t2 is 4 rank(s)", "there are 2 (actor.backend=fsdp:d2)"],
        ),
        (
            ["actor.backend=fsdp:d4", "reference.backend=fsdp:d1t2", "algorithm.kl.coefficient=0.1"],
            ["reference.backend=fsdp:d1t2 is on 2 of 4 ranks", "can only be sharded (d): use fsdp:d2, or all ranks"],
        ),
        (
            ["actor.backend=fsdp:d2", "actor.offload=true", "reference.backend=fsdp:d1", "algorithm.kl.coefficient=0.1"],
            ["reference.backend=fsdp:d1 is on one of 2 ranks, which does not go with actor.offload=true"],
        ),
        (
            ["actor.backend=fsdp:d2", "reference.backend=fsdp:d1@2", "algorithm.kl.coefficient=0.1"],
            ["reference.backend=fsdp:d1@2 needs ranks 2 to 2, and those of the run are 0 to 1"],
        ),
        (["actor.backend=fsdp:d2@one"], ["behind @ stands the first rank of the model, as in fsdp:d1@3"]),
        (["actor.backend=fsdp:d2@0"], ["actor.backend=fsdp:d2@0: the actor is on all ranks of the run; leave @0 out"]),
        (["critic.backend=fsdp:d1@٣", "algorithm=ppo"], ["behind @ stands the first rank"]),
        ([f"critic.backend=fsdp:d1@{'9' * 5000}", "algorithm=ppo"], ["behind @ stands the first rank"]),
        ([f"actor.backend=fsdp:d{'9' * 5000}"], ["each with a number of at least 1 (and six digits at most) behind it"]),
        ([f"actor.backend=deepspeed:zero2:d{'9' * 5000}"], ["must be deepspeed:zero1, zero2 or zero3"]),
        (["actor.backend=fsdp:t2"], ["must begin with fsdp:dN"]),
        (["actor.backend=fsdp:d2d2"], ["each with a number of at least 1 (and six digits at most) behind it"]),
        (["actor.backend=fsdb:d1"], ["not a training backend"]),
        (["rollout.backend=sglang"], ["rollout.backend=sglang: say how many servers", "sglang:d1"]),
        (["rollout.backend=vlm"], ["not an inference backend"]),
        (["async_training=true", "rollout.oversample=1.5"], ["rollout.oversample=1.5 is for synchronous training"]),
        (["async_training=true", "deterministic=true"], ["deterministic=true contradicts async_training=true"]),
        (["async_training=true", "placement=colocate"], ["placement=colocate contradicts"]),
        (["rollout.on_expiry=drop"], ["no effect at staleness 0"]),
        (["reference.path=x"], ["reference.path=x is not used", "algorithm.kl.coefficient"]),
        (
            ["algorithm.correction.weight=mask", "algorithm.correction.low=6"],
            ["algorithm.correction.low must be below", "(5)"],
        ),
        (["algorithm.correction.high=3"], ["not used with weight=none"]),
        (["algorithm=gspo", "algorithm.correction.level=sequence"], ["algorithm.correction.level=sequence is not used"]),
        (["experiment_name=../x"], ["experiment_name must be the name of one folder", "'../x'"]),
        (["trial_name=a/b"], ["trial_name"]),
        (["total_train_steps=0"], ["total_train_steps must be a whole number, at least 1, got 0"]),
        (["train_dataset.path=null"], ["train_dataset.path is missing"]),
        (["train_dataset.sources=[x]"], ["both path=addition and sources"]),
        (["train_dataset.path=a.jsonl", "evaluate.every_steps=5"], ["set valid_dataset.path"]),
        (["tracking.sinks=[wandbb]"], ["'wandb'? There are: "]),
        (["tracking.sinks=[foo]"], ["tracking.sinks has 'foo'; there are: "]),
        (["rollout.min_group_size=9"], ["rollout.min_group_size must be at most gconfig.n_samples (8)"]),
        (["gconfig.min_new_tokens=999"], ["gconfig.min_new_tokens must be at most"]),
        (["gconfig.greedy=true"], ["gconfig.greedy", "set it to false"]),
        (["actor.optimizer.min_lr_ratio=0.1"], ["not used by the constant schedule"]),
        (["algorithm.filter={name: accuracy_band, low: 0.95}"], ["algorithm.filter.low must be at most"]),
        (["rollout.engine.max_model_len=128"], ["must exceed gconfig.max_new_tokens"]),
    ],
)
def test_what_cannot_work_is_refused_with_key_value_rule_and_remedy(overrides, words):
    assert_refused(overrides, words)


@pytest.mark.parametrize(
    "overrides",
    [
        ["gconfig.top_p=0.9", "algorithm.allow_truncated_sampling=true"],
        ["algorithm=reinforce", "gconfig.n_samples=1"],
        ["async_training=true", "algorithm.correction.weight=none"],
        ["async_training=true", "rollout.max_head_offpolicyness=4", "rollout.on_expiry=wait"],
        ["algorithm.kl.coefficient=0.1", "reference.path=x"],
        ["algorithm.policy_loss=my_loss.py:loss", "algorithm.policy_loss.beta=2"],
        ["rollout.oversample=1.5"],
        ["placement=decoupled"],
    ],
)
def test_what_can_work_is_accepted(overrides):
    assert load(*overrides) != load()


def test_asynchronous_training_without_a_correction_must_be_the_user_s_own_wish():
    config = TrainConfig(async_training=True, train_dataset=DatasetConfig("addition"))
    with pytest.raises(ConfigError, match=r"algorithm\.correction\.weight is none"):
        check(config)
    check(config, written={"algorithm.correction.weight"})


def test_staleness_and_placement_follow_asynchrony_unless_set():
    assert (max_head_offpolicyness(load()), placement(load())) == (0, "colocate")
    config = load("async_training=true")
    assert (max_head_offpolicyness(config), placement(config)) == (1, "decoupled")
    config = load("async_training=true", "rollout.max_head_offpolicyness=3")
    assert max_head_offpolicyness(config) == 3
    assert placement(load("placement=decoupled")) == "decoupled"


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 13),
        (["total_train_epochs=2"], 25),
        (["total_train_steps=5"], 5),
        (["total_train_steps=50"], 50),
        (["total_train_steps=50", "total_train_epochs=1"], 13),
    ],
)
def test_steps_are_given_or_follow_from_epochs(overrides, steps):
    assert total_steps(load(*overrides), num_rows=100) == steps


@pytest.mark.parametrize(
    ("epochs", "words"),
    [
        (1, "total_train_epochs=1 (13 steps) ends the run, before total_train_steps=50"),
        (9, "total_train_steps=50 ends the run, before total_train_epochs=9 (113 steps)"),
        (4, "total_train_steps=50 and total_train_epochs=4 (50 steps) are the same"),
    ],
)
def test_the_arithmetic_says_which_of_two_limits_ends_the_run(epochs, words):
    text = arithmetic(load("total_train_steps=50", f"total_train_epochs={epochs}"), num_rows=100)
    assert words in text


def test_the_arithmetic_says_that_servers_are_no_placement():
    text = arithmetic(load("rollout.backend=vllm:d1"), num_rows=100)
    assert "synchronous, on servers (rollout.backend=vllm:d1)" in text and "colocate" not in text


def test_the_arithmetic_is_told_in_words():
    text = arithmetic(load("total_train_steps=14", "actor.mini_batches=2", "gconfig.max_new_tokens=24"), num_rows=2000)
    assert "8 prompts × 8 samples = 64 sequences of at most 24 new tokens" in text
    assert "2 mini-batches of 4 × 8 = 32 sequences, 1 pass = 2 optimizer steps" in text
    assert "at most 4096 tokens each" in text
    assert "synchronous, colocate" in text
    assert "2000 rows ÷ 8 = 250 steps" in text
    assert "14 steps, 112 rows, 0.06 epochs" in text


def test_the_arithmetic_of_supervised_runs():
    text = arithmetic(load("batch_size=4", cls=SFTConfig), num_rows=10)
    assert "4 rows of at most 1024 tokens = 1 optimizer step" in text
    assert "3 steps" in text
