"""No key is accepted and ignored: it is read, or it is refused with what would make it count."""

import re
from pathlib import Path

import pytest

import tandem
from tandem.config.algorithm import PRESETS, Component
from tandem.config.arithmetic import stalled_after_s
from tandem.config.check import check
from tandem.config.data import DatasetConfig, SourceConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import EvaluateConfig, SFTConfig, TrainConfig
from tandem.config.keys import leaves
from tandem.config.load import load_config, to_yaml
from tandem.config.preference import DistillConfig, PreferenceConfig, RewardModelConfig, training_config

DATA = "train_dataset.path=addition"
SOURCE = Path(tandem.__file__).parent
KINDS = (TrainConfig, SFTConfig, PreferenceConfig, RewardModelConfig, DistillConfig)


def load(*items, cls=TrainConfig, data=DATA, file=None):
    return load_config(cls, file, [*([data] if data else []), *items]).config


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["valid_dataset.path=addition"], "nothing is evaluated: set evaluate.every_steps"),
        (["valid_dataset.prompt_suffix=x"], "nothing is evaluated"),
        (["evaluate.max_rows=5"], "evaluate.max_rows=5 is not used because nothing is evaluated"),
        (["evaluate.max_rows=null"], "evaluate.max_rows=null is not used"),
        (["evaluate.max_new_tokens=5"], "evaluate.max_new_tokens=5 is not used"),
        (["valid_dataset.shuffle=false"], "unknown key valid_dataset.shuffle"),
        (["train_dataset.path=gsm8k.jsonl", "train_dataset.size=5"], "train_dataset.size=5 .* use train_dataset.max_rows"),
        (
            ["evaluate.every_steps=2", "valid_dataset.path=gsm8k.jsonl", "valid_dataset.size=5"],
            "valid_dataset.size=5 .* use valid_dataset.max_rows",
        ),
        (["checkpoint.keep_last=5"], "set checkpoint.every_steps"),
        (["checkpoint.asynchronous=false"], "asynchronous=false is not used because nothing is saved beside training"),
        (["checkpoint.asynchronous=false", "checkpoint.every_steps=2", "checkpoint.resumable=false"], "of the model alone"),
        (["actor.gradient_sync=micro_batch", "actor.backend=fsdp:d1t2"], "no ranks have sequences of their own"),
        (["actor.gradient_sync=micro_batch", "actor.backend=deepspeed:zero2:d2"], "by DeepSpeed, whose stage 1"),
        (["actor.gradient_sync=micro_batch", "actor.backend=fsdp:d2", "actor.offload=true"], "with actor.offload=true"),
        (
            ["actor.compile=true", "actor.gradient_checkpointing=true", "actor.selective_checkpointing=true"],
            "actor.selective_checkpointing=true does not work with actor.compile=true",
        ),
        (["actor.selective_checkpointing=true"], "nothing is recomputed: set actor.gradient_checkpointing=true"),
        (["checkpoint.keep_every=5"], "checkpoint.keep_every=5 is not used .* set checkpoint.every_steps"),
        (["checkpoint.every_steps=2", "checkpoint.keep_last=null", "checkpoint.keep_every=4"], "keeps all checkpoints"),
        (["checkpoint.every_steps=2", "checkpoint.keep_best=-eval/loss"], "nothing is evaluated: set evaluate.every_steps"),
        (["recover.max_restarts=1"], "would begin at step 0 each time, because checkpoint.every_steps=null saves nothing"),
        (
            ["recover.max_restarts=1", "checkpoint.every_steps=2", "checkpoint.resumable=false"],
            "resumable=false saves nothing",
        ),
        (["tracking.project=mine"], "set tracking.sinks to wandb or trackio"),
        (["tracking.project=mine", "tracking.sinks=tensorboard"], "set tracking.sinks to wandb or trackio"),
        (["tracking.sinks=[wandb, wandb]"], "names wandb more than once"),
        (["algorithm.kl.where=reward"], "algorithm.kl.where=reward is not used because algorithm.kl.coefficient is 0"),
        (["algorithm.kl.estimator=k3"], "algorithm.kl.estimator=k3 is not used because algorithm.kl.coefficient is 0"),
        (["algorithm.kl.importance=true"], "algorithm.kl.importance=true is not used because algorithm.kl.coefficient is 0"),
        (["algorithm.kl.coefficient=1", "algorithm.kl.horizon=9"], "algorithm.kl.horizon=9 is not used because .*target"),
        (["reference.refresh_every_steps=2"], "refresh_every_steps=2 is not used because algorithm.kl.coefficient is 0"),
        (["rollout.replay.max_uses=3"], "rollout.replay.max_uses=3 is not used because rollout.replay.groups is 0"),
        (["curriculum.target=0.25"], "curriculum.target=0.25 is not used because curriculum.round_rows is null"),
        (["evaluate.n_samples=4"], "evaluate.n_samples=4 is not used because nothing is evaluated"),
        (["evaluate.temperature=0.5"], "evaluate.temperature=0.5 is not used because nothing is evaluated"),
        (["reference.dtype=float32"], "reference.dtype=float32 is not used because algorithm.kl.coefficient is 0"),
        (
            ["algorithm.kl.coefficient=1", "algorithm.kl.where=reward", "algorithm.kl.estimator=k3"],
            "algorithm.kl.estimator=k3 is for the loss; the reward takes k1",
        ),
        (["algorithm.correction.level=sequence"], "algorithm.correction.level=sequence is not used with weight=none"),
        (["rollout.engine.keep_kv_on_update=true"], "set async_training=true"),
        (["algorithm.correction.reject.low=0.5"], "algorithm.correction.reject.low=0.5 is not used by none"),
        (["algorithm.correction.reject=geometric", "algorithm.correction.reject.low=1.5"], "at least 0, at most 1, got 1.5"),
        (["algorithm.correction.reject=prodcut"], "'product'"),
        (["evaluate.every_steps=5", "train_dataset.split=test"], "would evaluate on the training rows"),
        (["algorithm.shaping=[{name: clip, low: 2}]"], "low must be at most .*high"),
        (["algorithm.shaping=[{name: overlong, buffer_tokens: 999}]"], "buffer_tokens must be at most"),
        (["gconfig.stop=['']"], "gconfig.stop holds an empty string"),
        (["gconfig.stop_token_ids=[-1]"], "gconfig.stop_token_ids must be at least 0"),
        (["chat_template_kwargs.tokenize=true"], "chat_template_kwargs.tokenize"),
        (["seed=-1"], "seed must be a whole number, at least 0, at most 4294967295, got -1"),
        (["seed=4294967296"], "at most 4294967295, got 4294967296"),
        (["seed=9223372036854775808"], "seed must lie between"),
    ],
)
def test_a_key_that_nothing_would_read_is_refused_with_the_remedy(items, words):
    with pytest.raises(ConfigError, match=words):
        load(*items)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["evaluate.every_steps=2", "evaluate.max_new_tokens=5"], "evaluate.max_new_tokens=5 is not used by supervised"),
        (["tracking.trajectories_per_step=5"], "which samples nothing"),
        (["actor.mini_batches=2"], "optimizer steps are set by batch_size"),
        (["actor.epochs_per_batch=2"], "optimizer steps are set by batch_size"),
    ],
)
def test_keys_of_reinforcement_learning_are_refused_in_supervised_runs(items, words):
    with pytest.raises(ConfigError, match=words):
        load(*items, cls=SFTConfig)


@pytest.mark.parametrize(
    ("cls", "items", "words"),
    [
        (PreferenceConfig, ["train_dataset.prompt_suffix=x"], "prompt_suffix=x is not used by learning from judged"),
        (PreferenceConfig, ["valid_dataset.columns.margin=m"], "valid_dataset.columns.margin=m is not used by preference"),
        (PreferenceConfig, ["loss=simpo", "reference.dtype=float32"], "this loss compares with no reference"),
        (
            PreferenceConfig,
            ["loss=simpo", "memory_limit_gib=1"],
            "not used because the actor is the only model",
        ),
        (
            PreferenceConfig,
            ["actor.lora.rank=4", "memory_limit_gib=1"],
            "not used because the actor is the only model",
        ),
        (RewardModelConfig, ["train_dataset.answer_column=x"], "name their columns with train_dataset.columns"),
        (RewardModelConfig, ["step_separator=;"], "step_separator=; is not used with supervision=pairs"),
        (RewardModelConfig, ["supervision=steps", "margin=1"], "margin=1 is not used with supervision=steps"),
        (DistillConfig, ["teacher.path=x", "rollout.replay.max_age=2"], "rollout.replay.groups is 0"),
        (DistillConfig, ["teacher.path=x", "evaluate.n_samples=2"], "nothing is evaluated"),
    ],
)
def test_keys_that_learning_from_judgements_or_a_teacher_would_ignore_are_refused(cls, items, words):
    with pytest.raises(ConfigError, match=words):
        load(*items, cls=cls)


def test_distillation_evaluates_by_sampling_as_reinforcement_learning_does():
    items = ["teacher.path=x", "evaluate.every_steps=2", "evaluate.n_samples=4", "evaluate.max_new_tokens=8"]
    assert load(*items, cls=DistillConfig).evaluate.n_samples == 4


@pytest.mark.parametrize(
    "items",
    [
        ["async_training=true"],
        ["rollout.replay.groups=2"],
    ],
)
def test_distillation_corrects_what_other_weights_made(items):
    assert training_config(load("teacher.path=x", cls=DistillConfig)).algorithm.correction.weight == "none"
    found = training_config(load("teacher.path=x", *items, cls=DistillConfig))
    assert (found.algorithm.correction.weight, found.algorithm.correction.highest) == ("truncate", 2.0)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_preset_sets_counts_as_wanted_also_when_it_is_written_out(name, tmp_path):
    file = tmp_path / "config.yaml"
    config = load(f"algorithm={name}")
    file.write_text(to_yaml(config))
    assert load_config(TrainConfig, file).config == config


def test_the_reward_of_a_source_is_refused_in_supervised_runs():
    with pytest.raises(ConfigError, match="for `tandem train`"):
        load("train_dataset.sources=[{path: addition, reward: math}]", cls=SFTConfig, data=None)


@pytest.mark.parametrize(
    "items",
    [
        ["valid_dataset.prompt_suffix=x", "evaluate.every_steps=3", "evaluate.max_rows=5"],
        ["valid_dataset.path=addition", "evaluate.every_steps=null"],
        ["train_dataset.size=5"],
        ["tracking.project=mine", "tracking.sinks=[trackio]"],
        ["algorithm.kl.coefficient=1", "algorithm.kl.where=reward", "algorithm.kl.estimator=k1"],
        ["async_training=true", "rollout.engine.keep_kv_on_update=true"],
        ["seed=4294967295"],
    ],
)
def test_keys_that_count_are_taken(items):
    assert load(*items) != load()


def test_keys_that_say_the_default_are_accepted():
    assert load("algorithm.kl.where=loss", "checkpoint.keep_last=2", "tracking.project=tandem") == load()


def test_evaluation_turned_off_by_hand_leaves_the_keys_of_a_file_where_they_are(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train_dataset: {path: addition}\nvalid_dataset: {path: addition}\nevaluate: {every_steps: 3}\n")
    assert load("evaluate.every_steps=null", file=file).evaluate.every_steps is None


def test_the_knobs_of_a_rejection_rule_are_set_like_those_of_any_choice():
    correction = load("algorithm.correction.reject=product", "algorithm.correction.reject.low=0.25").algorithm.correction
    assert correction.reject == Component("product", {"low": 0.25})
    assert load().algorithm.correction.reject == Component("none")


@pytest.mark.parametrize(
    "items",
    [
        [],
        ["async_training=true", "algorithm.correction.weight=none"],
        ["algorithm.kl.coefficient=1", "algorithm.kl.where=reward"],
        ["algorithm.correction.reject=product"],
        ["valid_dataset.path=addition", "evaluate.every_steps=null"],
    ],
)
def test_the_configuration_that_a_run_writes_starts_the_same_run(tmp_path, items):
    file = tmp_path / "config.yaml"
    config = load(*items)
    file.write_text(to_yaml(config))
    assert load_config(TrainConfig, file).config == config


def test_sources_of_one_name_would_merge_in_metrics_and_are_refused():
    with pytest.raises(ConfigError, match=r"sources\[1\] has the same name in metrics .*'main'.* name: main_1"):
        load("train_dataset.sources=['a/b:main', 'c/d:main']", data=None)
    named = load("train_dataset.sources=['a/b:main', {path: 'c/d:main', name: other}]", data=None)
    assert [source.label for source in named.train_dataset.sources] == ["main", "other"]
    assert SourceConfig("data/gsm8k.jsonl").label == "gsm8k"


def test_sources_that_are_files_have_no_split_to_evaluate_on():
    with pytest.raises(ConfigError, match=r"train_dataset.path=b.jsonl is one file without splits"):
        load("train_dataset.sources=[addition, b.jsonl]", "evaluate.every_steps=2", data=None)


@pytest.mark.parametrize(
    "key", ["actor.path", "workflow", "reward", "run.root", "train_dataset.path", "algorithm.advantage", "reference.path"]
)
def test_a_name_or_path_that_is_empty_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key} is empty"):
        load(f"{key}=")


def test_a_configuration_made_in_a_script_is_checked_alike():
    config = TrainConfig(train_dataset=DatasetConfig("addition"), evaluate=EvaluateConfig(max_rows=7))
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        check(config)


def test_every_key_is_read_somewhere():
    text = "\n".join(
        path.read_text()
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "config" or path.name in ("arithmetic.py", "load.py", "check.py", "services.py")
    )
    keys = {key for cls in KINDS for key, _ in leaves(cls())}
    unread = [
        key for key in sorted(keys) if not re.search(rf"\.{key.rpartition('.')[2]}\b|\"{key.rpartition('.')[2]}\"", text)
    ]
    assert not unread


def test_nothing_is_taken_for_stalled_before_a_batch_or_an_episode_may_give_up():
    short = ["recover.stalled_after_s=5", "rollout.wait_timeout_s=20", "rollout.episode_timeout_s=30"]
    assert stalled_after_s(load(*short)) == 90.0
    assert stalled_after_s(load(*short, "recover.stalled_after_s=1000")) == 1000.0
    assert stalled_after_s(load(*short, "recover.stalled_after_s=null")) is None
    assert stalled_after_s(load("recover.stalled_after_s=5", cls=SFTConfig)) == 5.0


def test_a_key_of_an_older_version_at_its_default_is_read_over(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("train_dataset: {path: addition}\nrollout: {engine: {cuda_graphs: null}}\n")
    assert load_config(TrainConfig, file).config.rollout.engine.max_running is None
    file.write_text("train_dataset: {path: addition}\nrollout: {engine: {cuda_graphs: true}}\n")
    with pytest.raises(ConfigError, match=r"rollout\.engine\.cuda_graphs=True \(.*config\.yaml:2\) is no key any more"):
        load_config(TrainConfig, file)
