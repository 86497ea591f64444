"""Defaults ← preset ← file ← command line, each value with its source."""

import pytest

from tandem.config.algorithm import PRESETS, Component
from tandem.config.data import SourceConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import describe, load_config, to_yaml
from tandem.config.parts import PARTS

DATA = "train_dataset.path=addition"


def load(*overrides, cls=TrainConfig, file=None):
    return load_config(cls, file, [DATA, *overrides])


def written(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


def test_later_layers_win_and_every_value_has_its_source(tmp_path):
    file = written(tmp_path, "seed: 3\nalgorithm: dapo\nrollout:\n  batch_size: 4\nactor.optimizer.lr: 2e-5\n")
    resolved = load("rollout.batch_size=16", file=file)

    assert resolved.config.seed == 3
    assert resolved.config.rollout.batch_size == 16
    assert resolved.config.actor.optimizer.lr == 2e-5
    assert resolved.config.algorithm.policy_loss == Component("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28})
    wanted = {
        "seed": "run.yaml:1",
        "algorithm.preset": "run.yaml:2",
        "rollout.batch_size": "command line",
        "actor.optimizer.lr": "run.yaml:5",
        "algorithm.policy_loss.clip_high": "preset dapo",
        "gconfig.n_samples": "default",
    }
    assert {key: resolved.sources[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "get", "value"),
    [
        ("actor.optimizer.lr=2e-5", lambda c: c.actor.optimizer.lr, 2e-5),
        ("gconfig.n_samples=1e1", lambda c: c.gconfig.n_samples, 10),
        ("trial_name=007", lambda c: c.trial_name, "007"),
        ("rollout.max_concurrent=null", lambda c: c.rollout.max_concurrent, None),
        ("threads=None", lambda c: c.threads, None),
        ("deterministic=true", lambda c: c.deterministic, True),
        ("tracking.sinks=wandb", lambda c: c.tracking.sinks, ("wandb",)),
        ("tracking.sinks=[wandb, trackio]", lambda c: c.tracking.sinks, ("wandb", "trackio")),
        ("gconfig.stop_token_ids=[1, 2]", lambda c: c.gconfig.stop_token_ids, (1, 2)),
        ("chat_template_kwargs.enable_thinking=false", lambda c: c.chat_template_kwargs, {"enable_thinking": False}),
        ("chat_template_kwargs={a: 1, b: x}", lambda c: c.chat_template_kwargs, {"a": 1, "b": "x"}),
        ("algorithm=rloo", lambda c: c.algorithm.preset, "rloo"),
        ("system_prompt=Answer: a, b or [c", lambda c: c.system_prompt, "Answer: a, b or [c"),
        ("algorithm.shaping=overlong", lambda c: c.algorithm.shaping, (Component("overlong"),)),
        ("actor={optimizer: {lr: 1.5}}", lambda c: c.actor.optimizer.lr, 1.5),
    ],
)
def test_values_take_the_type_of_their_field(text, get, value):
    found = get(load(text).config)
    assert found == value and type(found) is type(value)


def test_a_component_is_a_name_or_a_mapping_and_its_knobs_may_come_first():
    first = load("algorithm.policy_loss.dual_clip=3", "algorithm.policy_loss=ppo_clip").config.algorithm.policy_loss
    second = load("algorithm.policy_loss={name: ppo_clip, dual_clip: 3}").config.algorithm.policy_loss
    assert first == second == Component("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3})


def test_another_choice_does_not_inherit_the_preset_s_knobs():
    assert load("algorithm.policy_loss=reinforce").config.algorithm.policy_loss == Component("reinforce")


def test_lists_of_components_and_of_sources_are_built():
    resolved = load_config(
        TrainConfig,
        None,
        [
            "algorithm.shaping=[mask_truncated, {name: scale, factor: 2e0}]",
            "train_dataset.sources=[addition, {path: x, weight: 3, reward: math}]",
        ],
    )
    assert resolved.config.algorithm.shaping == (Component("mask_truncated"), Component("scale", {"factor": 2.0}))
    assert resolved.config.train_dataset.sources == (SourceConfig("addition"), SourceConfig("x", 3.0, "math"))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_printed_loads_as_the_same_configuration(tmp_path, preset, asynchronous):
    if asynchronous and PRESETS[preset].asynchronous is None:
        return
    shaping = "mask_truncated" if preset == "gdpo" else "{name: clip, low: 0}"  # gdpo judges each named reward by itself
    resolved = load(f"algorithm={preset}", f"async_training={str(asynchronous).lower()}", f"algorithm.shaping=[{shaping}]")
    for text in (to_yaml(resolved.config), describe(resolved)):
        assert load_config(TrainConfig, written(tmp_path, text)).config == resolved.config


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_corrects_for_stale_tokens_when_asynchronous_and_only_then(preset):
    assert load(f"algorithm={preset}").config.algorithm.correction.weight == "none"
    if PRESETS[preset].asynchronous is None:
        with pytest.raises(ConfigError, match=r"contradicts async_training=true, because"):
            load(f"algorithm={preset}", "async_training=true")
        return
    algorithm = load(f"algorithm={preset}", "async_training=true").config.algorithm
    corrected = algorithm.correction.weight in ("mask", "truncate") or algorithm.correction.reject.name != "none"
    assert corrected or PARTS["policy_loss"][algorithm.policy_loss.name].corrects_itself


def test_the_user_s_correction_wins_over_the_preset_s():
    correction = load("async_training=true", "algorithm.correction.weight=none").config.algorithm.correction
    assert correction.weight == "none"
    assert load("async_training=true", "algorithm.correction.high=3").config.algorithm.correction.highest == 3.0


@pytest.mark.parametrize("preset", ["grpo", "rloo"])
@pytest.mark.parametrize(("weight", "highest"), [("truncate", 2.0), ("mask", 5.0)])
def test_a_correction_s_bound_follows_its_kind_whatever_the_preset_s_kind_is(preset, weight, highest):
    chosen = load(f"algorithm={preset}", "async_training=true", f"algorithm.correction.weight={weight}")
    assert chosen.config.algorithm.correction.highest == highest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("actor.lr=1e-5", ["unknown key actor.lr=1e-05", "did you mean actor.optimizer.lr?"]),
        ("lr=1e-5", ["did you mean actor.optimizer.lr or critic.optimizer.lr?"]),
        ("actor.optimiser.lr=1", ["did you mean actor.optimizer"]),
        ("gconfig.n_sample=4", ["did you mean gconfig.n_samples?"]),
        (
            "allocation_mode=sglang:d4+fsdp:d4",
            ["allocation_mode is AReaL's: use allocation=…; see docs/coming_from.md"],
        ),
        ("mode=ray", ["mode is AReaL's, and no key here", "torchrun"]),
        ("num_generations=8", ["num_generations is TRL's: use gconfig.n_samples=…; see"]),
        ("group_adv_norm=true", ["group_adv_norm is AReaL's: use algorithm.whitening=group; see docs/coming_from.md"]),
        ("actor_rollout_ref.rollout.n=5", ["rollout.n is verl's: use gconfig.n_samples=…"]),
        ("eps_clip=0.2", ["eps_clip is LightRFT's: use algorithm.policy_loss.clip_low=…"]),
        ("kl_coef=0.1", ["kl_ctrl.kl_coef is verl's: use algorithm.kl.coefficient=…"]),
        ("kl_ctrl.kl_coef=0.1", ["use algorithm.kl.coefficient=…"]),
        ("rollout.engine.foo=1", ["rollout.engine has rollout.engine.max_running"]),
        ("gconfig.max_tokens=20", ["did you mean gconfig.max_new_tokens?"]),
        ("max_tokens=20", ["did you mean gconfig.max_new_tokens or"]),
        ("actor.lora.r=8", ["did you mean actor.lora.rank?"]),
        ("tensor_model_parallel_size=2", ["is verl's: use rollout.backend=…"]),
        ("vllm_tensor_parallel_size=2", ["is TRL's: use rollout.backend=…"]),
        ("gpu_memory_utilization=0.5", ["is verl's: use rollout.fleet.memory_share=…"]),
        ("batch_size=4", ["batch_size belongs to `tandem sft`", "did you mean rollout.batch_size?"]),
        ("temperature=1", ["did you mean gconfig.temperature or evaluate.temperature?"]),
        ("gconfig.batch_size=4", ["did you mean rollout.batch_size?"]),
        ("learning_rate=1", ["learning_rate is TRL's: use actor.optimizer.lr=…"]),
        ("rollout.batch_size=many", ["rollout.batch_size must be a whole number, got 'many'", "command line"]),
        ("rollout.batch_size=2.5", ["must be a whole number, got 2.5"]),
        ("deterministic=1", ["must be true or false, got 1"]),
        ("actor.dtype=float16", ["actor.dtype must be one of auto, bfloat16, float32, got 'float16'"]),
        ("actor.optimizer.lr=.nan", ["must be finite"]),
        ("algorithm.policy_loss.clip_high=1e300", ["clip_high must lie within ±1e+38", "got 1e+300"]),
        ("seed=0123", ["seed must be a whole number, got '0123'"]),
        ("batch_size=1:30", ["1:30"]),
        ("actor.optimizer.lr=1:30.5", ["actor.optimizer.lr must be a number, got '1:30.5'"]),
        ("seed=null", ["seed must be a whole number, got null"]),
        ("actor=smollm2-135m", ["actor is a section with the keys path, backend"]),
        ("seed.x=1", ["seed is a whole number; it has no part 'x'"]),
        ("algorithm=gpro", ["algorithm.preset=gpro is not known", "did you mean 'grpo'?"]),
        ("algorithm.policy_loss=ppo", ["algorithm.policy_loss=ppo is not known", "'ppo_clip'"]),
        ("algorithm.policy_loss.clip=1", ["not used by ppo_clip", "clip_low, clip_high, dual_clip"]),
        ("algorithm.advantage.std=1", ["grpo; it has no knobs"]),
        ("algorithm.policy_loss.clip_low=2", ["clip_low must be a number, at least 0, at most 1, got 2"]),
        ("algorithm.policy_loss.dual_clip=0.5", ["dual_clip must be a number, above 1, or 0, got 0.5"]),
        (
            "train_dataset.sources=[{path: x, wieght: 2}]",
            ["train_dataset.sources[0] has no key 'wieght'; did you mean 'weight'?"],
        ),
        ("train_dataset.sources=[{weight: 2}]", ["sources[0] needs path"]),
        ("seed", ["'seed' is not key=value"]),
        ("tracking.sinks=[wandb", ["not valid YAML"]),
        ("train_dataset.columns.answer.a=x", ["train_dataset.columns holds text under each key, got the key answer.a"]),
        ("train_dataset.columns.answer=[a, b]", ["train_dataset.columns.answer must be text, got ['a', 'b']"]),
        ("train_dataset.columns={answer: {a: 1}}", ["train_dataset.columns holds text under each key"]),
        ("gconfig.n_samples=1000000000", ["gconfig.n_samples must be a whole number, at least 1, at most 65536"]),
        ("rollout.batch_size=1000000000", ["rollout.batch_size must be a whole number, at least 1, at most 1000000"]),
    ],
)
def test_a_wrong_key_or_value_is_refused_and_says_what_to_do(text, words):
    with pytest.raises(ConfigError) as error:
        load(text)
    for word in words:
        assert word in str(error.value)


def test_names_of_columns_are_text_as_written():
    assert load("train_dataset.columns.answer=007").config.train_dataset.columns == {"answer": "007"}
    assert load("train_dataset.columns={answer: 5, prompt: true}").config.train_dataset.columns == {
        "answer": "5",
        "prompt": "true",
    }


def test_a_value_out_of_bounds_brings_no_messages_about_what_follows_from_it():
    with pytest.raises(ConfigError) as error:
        load("gconfig.n_samples=0")
    text = "gconfig.n_samples must be a whole number, at least 1, at most 65536, got 0 (command line)"
    assert str(error.value) == text


def test_a_value_out_of_bounds_hides_no_other_problem():
    bad = ["gconfig.n_samples=0", "rollout.batch_size=0", "trial_name=a/b", "actor.lora.alpha=3", "gconfig.top_p=7"]
    with pytest.raises(ConfigError, match="5 problems") as error:
        load(*bad)
    assert all(f"- {item.partition('=')[0]}" in str(error.value) for item in bad)
    with pytest.raises(ConfigError, match="2 problems") as error:
        load("sede=1", "gconfig.n_samples=0")
    assert "gconfig.n_samples must be" in str(error.value) and "sede" in str(error.value)


@pytest.mark.parametrize(
    "item",
    ["rollout.batch_size=-1", "rollout.replay.groups=-1", "actor.lora.rank=-1", "gconfig.max_new_tokens=0", "seed=-1"],
)
def test_what_is_wrong_only_with_a_value_out_of_bounds_is_not_told(item):
    with pytest.raises(ConfigError) as error:
        load(item)
    assert str(error.value).startswith(f"{item.partition('=')[0]} must be")


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError, match="3 problems") as error:
        load("sede=1", "actor.lr=1", "gconfig.n_samples=x")
    assert all(word in str(error.value) for word in ("seed", "actor.optimizer.lr", "gconfig.n_samples"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nactor:\n  lr: 3\n", ["actor.lr=3", "run.yaml:3"]),
        ("base: &b\n  lr: 1\nactor:\n  <<: *b\n", ["run.yaml:4: `<<` merges are not supported", "optimizer: *name"]),
        ("seed: 1\nseed: 2\n", ["seed is given twice, in lines 1 and 2"]),
        (
            "train_dataset.path: addition\ngconfig:\n  top_p: 3\n",
            ["gconfig.top_p must be a number, above 0", "got 3.0 (run.yaml:3)"],
        ),
        ("seed: [1\n", ["run.yaml is not valid YAML: while parsing a flow sequence in line 1, column 7"]),
        ("actor:\n\tpath: x\n", ["in line 2, column 1", "YAML is indented with spaces, not with tabs"]),
        (
            "actor:\n  optimizer.lr: 1\n  optimizer:\n    lr: 2\n",
            ["actor.optimizer.lr is given twice", "run.yaml:2", "run.yaml:4"],
        ),
        ("? [a, b]\n: c\n", ["run.yaml:1: a key must be one word"]),
        ("- 1\n", ["must hold keys and values", "it holds a list"]),
    ],
)
def test_problems_of_a_file_name_its_line(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        load(file=written(tmp_path, text))
    assert all(word in str(error.value) for word in words)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file .*missing\.yaml"):
        load(file=tmp_path / "missing.yaml")
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl is a data file and no configuration.*train_dataset\.path=.*rows\.jsonl"
    ):
        load(file=tmp_path / "rows.jsonl")
    (tmp_path / "config.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match=rf"no configuration file .*did you mean {tmp_path}/config\.yaml\?$"):
        load(file=tmp_path / "confg.yaml")
    with pytest.raises(ConfigError, match=rf"{tmp_path} is a folder; give a YAML file, such as {tmp_path}/config\.yaml$"):
        load(file=tmp_path)


def test_an_empty_section_is_the_defaults(tmp_path):
    assert load(file=written(tmp_path, "actor:\nrollout: {}\n")).config == load().config


def test_supervised_runs_know_no_sampling():
    assert load("batch_size=4", cls=SFTConfig).config.batch_size == 4
    with pytest.raises(ConfigError, match=r"unknown key gconfig\.n_samples"):
        load("gconfig.n_samples=4", cls=SFTConfig)
    with pytest.raises(ConfigError, match=r"reward belongs to `tandem train`, `tandem distill` \(or --for train\)$"):
        load("reward=math", cls=SFTConfig)
    with pytest.raises(ConfigError, match=r"memory_limit_gib=4 .*one model.*take turns in one memory.*actor\.lora\.rank"):
        load("memory_limit_gib=4", cls=SFTConfig)


def test_null_takes_back_the_reward_of_a_file(tmp_path):
    for text in ("reward: length\n", "reward: {name: length, target_tokens: 3}\n"):
        resolved = load("reward=null", file=written(tmp_path, text))
        assert (resolved.config.reward, resolved.sources["reward"]) == ("math", "default")
        assert load("reward=null", "reward=format", file=written(tmp_path, text)).config.reward == "format"


def test_what_was_chosen_can_be_shown_without_the_defaults():
    shown = describe(load("seed=3", "actor.optimizer.lr=1e-4", "algorithm=dapo"), hidden=("default",))
    assert "lr: 0.0001" in shown and "clip_high: 0.28" in shown and "command line" in shown
    assert "default" not in shown and "checkpoint" not in shown
