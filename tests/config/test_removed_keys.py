"""Keys of older versions: read over at the value that left all as it is now, else refused with what to do instead."""

import json
import logging

import pytest

from tandem.cli.main import main
from tandem.config.coming_from import REMOVED
from tandem.config.errors import ConfigError
from tandem.config.evaluation import EvaluationConfig, differences, load_evaluation
from tandem.config.experiment import TrainConfig
from tandem.config.keys import all_keys
from tandem.config.load import KINDS, load_config

OTHER = {"actor.context_parallel": "gather", "critic.lora.target_modules": ["q_proj"], "rollout.engine.cuda_graphs": True}
"""Values of keys that were no number."""


def written(folder, key, value, name="mine.yaml"):
    """A configuration whose second line sets the key."""
    first, *between, last = key.split(".")
    line = f"{first}: {''.join(f'{{{part}: ' for part in between)}{{{last}: {json.dumps(value)}}}{'}' * len(between)}"
    path = folder / name
    path.write_text(f"train_dataset: {{path: addition}}\n{line}\n")
    return path


@pytest.mark.parametrize("key", REMOVED)
def test_the_old_default_is_read_over_and_any_other_value_is_answered(key, tmp_path, caplog):
    assert load_config(TrainConfig, written(tmp_path, key, REMOVED[key].was)) and not caplog.records
    file = written(tmp_path, key, OTHER.get(key, 17))
    with pytest.raises(ConfigError) as refused:
        load_config(TrainConfig, file)
    said = str(refused.value)
    assert f"{key}={OTHER.get(key, 17)} (mine.yaml:2) is no key any more: " in said and REMOVED[key].now in said


def test_no_command_has_a_key_that_is_gone():
    assert not [key for kind in (*KINDS.values(), EvaluationConfig) for key in all_keys(kind) if key in REMOVED]


def test_the_commands_say_what_to_do_instead(tmp_path, capsys):
    file = written(tmp_path, "rollout.fleet.request_timeout_s", 900)
    for words in (["train", str(file), "--dry-run"], ["config", str(file)], ["plan", str(file)]):
        assert main(words) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "rollout.fleet.request_timeout_s=900 (mine.yaml:2) is no key any more: a request may take as long" in said
        assert "remove it, and set rollout.episode_timeout_s instead" in said
    assert main(["config", str(file.rename(tmp_path / "config.yaml")), "critic.mini_batches=2"]) == 2
    assert "critic.mini_batches=2 (command line) is no key any more" in capsys.readouterr().err


def test_the_saved_configuration_of_a_run_is_read_with_any_value_and_a_warning(tmp_path, caplog):
    file = written(tmp_path, "curriculum.width", 0.1, "config.yaml")
    (tmp_path / "run.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        resolved = load_config(TrainConfig, file, ["critic.optimizer.beta2=0.999"])
    assert "curriculum.width" not in resolved.sources
    (record,) = caplog.records
    said = record.getMessage()
    assert "curriculum.width=0.1 (" in said and said.endswith(
        "config.yaml:2) is no key any more: it is always 0.25 now; remove it"
    )
    with pytest.raises(ConfigError, match=r"^critic\.optimizer\.beta2=0\.9 \(command line\) is no key any more"):
        load_config(TrainConfig, file, ["critic.optimizer.beta2=0.9"])


def test_a_saved_configuration_may_set_what_nothing_reads_a_command_may_not(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("train_dataset: {path: addition}\nrollout: {backend: 'embedded:d2', fleet: {options: {seed: 1}}}\n")
    with pytest.raises(ConfigError, match=r"options=.* starts no tandem or vllm or sglang"):
        load_config(TrainConfig, file)
    (tmp_path / "run.json").write_text("{}")
    assert load_config(TrainConfig, file).config.rollout.fleet.options == {"seed": 1}
    with pytest.raises(ConfigError, match=r"memory_share=0\.5 is not used"):
        load_config(TrainConfig, file, ["rollout.fleet.memory_share=0.5"])


def test_an_evaluation_of_an_older_version_has_the_same_settings_now():
    usual = ["model=m", "data=gsm8k"]
    assert load_evaluation(None, [*usual, "gconfig.train_first_token=false"]) == load_evaluation(None, usual)
    with pytest.raises(ConfigError, match=r"gconfig\.train_first_token=True .* is never trained on now; remove it"):
        load_evaluation(None, [*usual, "gconfig.train_first_token=true"])
    before, now = ({"config": {"gconfig": {"n_samples": 1} | more}} for more in ({"train_first_token": False}, {}))
    assert not list(differences(before, now)) and not list(differences(now, before))
    assert list(differences(before, {"config": {"gconfig": {"n_samples": 2}}})) == [("config.gconfig.n_samples", 1, 2)]
