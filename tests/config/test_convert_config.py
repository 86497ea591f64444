"""Configurations of TRL and verl as ours: the keys of published ones, and what each number means."""

from pathlib import Path

import pytest
import yaml

from tandem.cli.main import main
from tandem.config.convert import Conversion, convert, read_foreign, trainer_of
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import COMMANDS, load_config
from tandem.config.preference import PreferenceConfig
from tests.tiny import tiny_model_folder

HERE = Path(__file__).parent
PUBLISHED = {
    (system, name): keys
    for system in ("trl", "verl")
    for name, keys in yaml.safe_load((HERE / f"published_{system}.yaml").read_text()).items()
}
KEYS = yaml.safe_load((HERE / "their_keys.yaml").read_text())

DR_GRPO = {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}


def trainer(system: str, name: str) -> str:
    """The trainer of a published example, by its file name."""
    return "ppo" if system == "verl" else {"gspo": "grpo"}.get(name.split("_")[0], name.split("_")[0])


def published(tmp_path: Path, system: str, name: str) -> Conversion:
    """A published example, read from a file and translated; eight devices."""
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(PUBLISHED[system, name]))
    return convert(trainer(system, name), read_foreign({"trl": "TRL", "verl": "verl"}[system], file), 8)


@pytest.mark.parametrize(("system", "name"), PUBLISHED)
def test_every_published_key_is_translated_or_has_a_reason_and_the_rest_loads(tmp_path, system, name):
    found = published(tmp_path, system, name)

    sources = " ".join(why for _, why in (*found.ours.values(), *found.open.values()))
    for key in found.given:
        assert key in sources or found.left.get(key), key
    assert not [key for key, why in found.left.items() if why.startswith("unknown") and "ray_init.num" not in key]
    file = tmp_path / "ours.yaml"
    file.write_text(found.text())
    load_config(found.kind, file, ["train_dataset.path=addition"])


def dry_run(tmp_path: Path, system: str, name: str) -> None:
    """Converts a published example by the command, and checks the run on a small model and data of ours."""
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(yaml.safe_dump(PUBLISHED[system, name]))
    options = [*(["--trainer", trainer(system, name)] if system == "trl" else []), "--processes", "8"]
    assert main(["convert-config", "--from", system, str(theirs), "-o", str(ours), *options]) == 0

    model, kind = tiny_model_folder(tmp_path), published(tmp_path, system, name).kind
    text = ours.read_text()
    lines = [line for line in text.splitlines() if not line.startswith("tracking.")]  # wandb need not be installed
    ours.write_text("\n".join(lines))
    small = [f"run.root={tmp_path}", "train_dataset.path=addition", f"actor.path={model}"]
    small += (
        ["gconfig.max_new_tokens=16", "rollout.engine.max_model_len=null"] if kind is TrainConfig else ["max_length=128"]
    )
    small += [f"critic.path={model}"] if "\ncritic.path:" in text else []
    small += ["reward=math + format"] if "algorithm.advantage: gdpo" in text else []
    if kind is PreferenceConfig:
        rows = tmp_path / "pairs.jsonl"
        rows.write_text('{"prompt": "1+1", "chosen": "2", "rejected": "3"}\n' * 256)
        small[1] = f"train_dataset.path={rows}"
    assert main([COMMANDS[kind], str(ours), *small, "--dry-run"]) == 0


@pytest.mark.parametrize(("system", "name"), [("trl", "gspo"), ("verl", "gspo__test_gspo_3b_math")])
def test_a_converted_file_passes_the_dry_run(tmp_path, system, name):
    dry_run(tmp_path, system, name)


@pytest.mark.slow
@pytest.mark.parametrize(("system", "name"), PUBLISHED)
def test_every_converted_file_passes_the_dry_run(tmp_path, system, name):
    dry_run(tmp_path, system, name)


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "sft", "dpo", "ppo"])
def test_the_tables_have_every_key_of_their_present_versions(trainer):
    names = KEYS["verl" if trainer == "ppo" else "trl"] + ("" if trainer == "ppo" else f" {KEYS[trainer]}")
    conversion = convert(trainer, dict.fromkeys(names.split()), 8)

    assert len(names.split()) > 150
    assert [name for name, why in conversion.left.items() if why.startswith("unknown")] == []


def test_a_key_that_they_do_not_have_either_is_called_unknown():
    assert "unknown: TRL has no such key" in convert("grpo", {"num_generation": 4}).left["num_generation"]
    assert "unknown: verl has no such key" in convert("ppo", {"actor.clip_ration": 4}).left["actor.clip_ration"]


@pytest.mark.parametrize(
    ("trainer", "theirs", "ours"),
    [
        ("grpo", {"loss_type": "grpo", "scale_rewards": "none"}, ("algorithm.advantage", "dr_grpo")),
        ("grpo", {"scale_rewards": False}, ("algorithm.advantage", "dr_grpo")),
        ("grpo", {"beta": 0.04}, ("algorithm.kl.importance", True)),
        ("grpo", {"beta": 0.0}, ("algorithm.kl.importance", None)),
        ("grpo", {}, ("algorithm.aggregation", "token_mean")),
        ("grpo", {}, ("actor.optimizer.schedule", "linear")),
        ("grpo", {"loss_type": "dr_grpo"}, ("algorithm.aggregation", "constant")),
        ("grpo", {"epsilon": 0.3}, ("algorithm.policy_loss.clip_high", 0.3)),
        ("grpo", {"epsilon_high": 0.28}, ("algorithm.policy_loss.clip_high", 0.28)),
        ("grpo", {"loss_type": "cispo", "epsilon_high": 5}, ("algorithm.policy_loss.clip_high", 4)),
        ("grpo", {"importance_sampling_level": "sequence"}, ("algorithm.policy_loss", "gspo")),
        ("grpo", {"loss_type": "sapo", "sapo_temperature_neg": 1.1}, ("algorithm.policy_loss.tau_negative", 1.1)),
        ("grpo", {"mask_truncated_completions": True}, ("algorithm.shaping", ["mask_truncated"])),
        ("grpo", {"top_p": 0.9}, ("algorithm.allow_truncated_sampling", True)),
        ("grpo", {"max_steps": 100, "warmup_steps": 0.1}, ("actor.optimizer.warmup_steps", 10)),
        ("grpo", {"steps_per_generation": 4, "max_steps": 100}, ("total_train_steps", 25)),
        ("grpo", {"max_steps": 100}, ("total_train_epochs", None)),
        ("rloo", {}, ("algorithm.kl.coefficient", 0.05)),
        ("rloo", {}, ("algorithm.kl.where", "reward")),
        ("sft", {"gradient_accumulation_steps": 4}, ("batch_size", 32)),
        ("dpo", {"loss_type": ["ipo"], "beta": 0.2}, ("loss", "ipo")),
        ("dpo", {"loss_type": "ipo", "beta": 0.2}, ("loss.beta", 0.2)),
        ("ppo", {}, ("algorithm.advantage", "gae")),
        ("ppo", {}, ("algorithm.policy_loss.dual_clip", 3.0)),
        ("ppo", {"data.train_batch_size": 96, "actor.ppo_mini_batch_size": 32}, ("actor.mini_batches", 3)),
        ("ppo", {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01}, ("algorithm.kl.coefficient", 0.01)),
        ("ppo", {"actor.use_kl_loss": False, "actor.kl_loss_coef": 0.01}, ("algorithm.kl.coefficient", None)),
        ("ppo", {"actor.use_kl_loss": True, "actor.kl_loss_type": "low_var_kl"}, ("algorithm.kl.estimator", "k3")),
        ("ppo", {"algorithm.use_kl_in_reward": True}, ("algorithm.kl.where", "reward")),
        ("ppo", {"algorithm.use_kl_in_reward": True}, ("algorithm.kl.coefficient", 0.001)),
        ("ppo", {"actor.loss_agg_mode": "seq-mean-token-sum"}, ("algorithm.aggregation", "sequence_sum")),
        ("ppo", {"algorithm.adv_estimator": "reinforce_plus_plus"}, ("algorithm.advantage", "reinforce_pp")),
        ("ppo", DR_GRPO, ("algorithm.advantage", "dr_grpo")),
        ("ppo", {"actor.optim.lr_warmup_steps": 10}, ("actor.optimizer.warmup_steps", 40)),
        ("ppo", {"rollout.top_k": -1}, ("gconfig.top_k", 0)),
        ("ppo", {"rollout.top_k": -1}, ("algorithm.allow_truncated_sampling", None)),
        ("ppo", {"data.max_prompt_length": 100, "data.max_response_length": 300}, ("rollout.engine.max_model_len", 400)),
        ("ppo", {"actor.clip_ratio_low": 0.1, "actor.clip_ratio_high": 0.3}, ("algorithm.policy_loss.clip_low", 0.1)),
        ("ppo", {"actor.ppo_micro_batch_size_per_gpu": 8}, ("actor.max_tokens_per_micro_batch", None)),
        ("ppo", {"trainer.save_freq": -1}, ("checkpoint.every_steps", None)),
        ("ppo", {"model.lora_rank": 32}, ("actor.lora.rank", 32)),
    ],
)  # fmt: skip
def test_a_key_means_here_what_it_means_there(trainer, theirs, ours):
    key, expected = ours
    found = convert(trainer, theirs, 1).ours

    assert found.get(key, (None,))[0] == expected


def test_completions_on_devices_become_prompts_and_the_line_says_how():
    found = convert(
        "grpo", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, 4
    )

    assert {k: found.ours[k][0] for k in ("rollout.batch_size", "actor.mini_batches")} == {
        "rollout.batch_size": 16,  # 4 × 4 devices × 8 = 128 completions, 8 a prompt
        "actor.mini_batches": 4,  # 4 × 4 devices × 2 = 32 completions an optimizer step
    }
    assert (
        "128 completions, 32 an optimizer step, 4 processes (--processes), 8 a prompt" in found.ours["rollout.batch_size"][1]
    )
    with pytest.raises(ConfigError, match=r"no whole groups of 8.*--processes N"):
        convert("grpo", {"per_device_train_batch_size": 1}, 2)


def test_a_shell_script_is_read_with_its_variables(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "set -x\nlength=$((1024 * 2))\nBATCH=${BATCH:-}\n"
        "if gpu; then\n    BATCH=${BATCH:-64}\nelse\n    BATCH=${BATCH:-32}\nfi\n"
        "python3 prepare.py --out there\npython3 -m verl.trainer.main_ppo \\\n    data.train_batch_size=${BATCH} \\\n"
        "    data.max_response_length=$length \\\n    +actor_rollout_ref.rollout.n='5' data.train_files=$HOME/x.parquet $@\n"
    )
    theirs = read_foreign("verl", script)
    assert theirs == {
        "data.train_batch_size": 64,
        "data.max_response_length": 2048,
        "rollout.n": 5,
        "data.train_files": "$HOME/x.parquet",
    }
    assert "not in this file" in convert("ppo", theirs).left["data.train_files"]

    script.write_text(
        "accelerate launch train.py --beta 1e-3 --use_peft --lora_target_modules q_proj, v_proj --no_shuffle_dataset"
    )
    assert read_foreign("TRL", script) == {
        "beta": 0.001,
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "shuffle_dataset": False,
    }


def test_what_cannot_be_read_or_known_is_refused(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("learning_rate: 1e-5")
    with pytest.raises(ConfigError, match="--trainer grpo, rloo, sft or dpo"):
        trainer_of("TRL", read_foreign("TRL", file))
    file.write_text("- 1")
    with pytest.raises(ConfigError, match="has no keys"):
        read_foreign("TRL", file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_foreign("verl", tmp_path / "none.yaml")
    file.write_text("a: " + "[" * 5000)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_foreign("verl", file)


@pytest.mark.parametrize(
    ("trainer", "key", "value", "words"),
    [
        ("grpo", "per_device_train_batch_size", "many", "must be a whole number of at least 1, got 'many'"),
        ("grpo", "num_generations", 0, "must be a whole number of at least 1, got 0"),
        ("grpo", "loss_type", ["dapo"], "must be text, got"),
        ("sft", "max_steps", float("inf"), "must be a number, got inf"),
        ("ppo", "data.train_batch_size", [8], "must be a whole number of at least 1, got"),
        ("sft", "per_device_train_batch_size", 1.5, "must be a whole number of at least 1, got 1.5"),
        ("grpo", "epsilon_high", "big", "must be a number, got 'big'"),
        ("sft", "max_steps", 10**400, "must be a number, got 1000"),
        ("ppo", "trainer.save_freq", "often", "must be a number, got 'often'"),
        ("ppo", "actor.optim.betas", [0.9], "must be a list of two numbers"),
    ],
)
def test_a_value_that_its_key_cannot_have_is_refused_by_name(trainer, key, value, words):
    with pytest.raises(ConfigError, match=f"{key} {words}"):
        convert(trainer, {key: value})
