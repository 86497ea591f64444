"""The same command goes on; another one is refused with every difference, or changes what may change."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.keys import leaves
from tandem.config.load import load_config, to_yaml
from tandem.config.preference import DistillConfig
from tandem.config.resume import FIXED, FREE, MAY_CHANGE
from tandem.state.resuming import RunFolderTaken, may_go_on
from tandem.state.run_folder import RunFolder


def config(*items, cls=TrainConfig):
    return load_config(cls, None, ["train_dataset.path=addition", "total_train_steps=9", *items]).config


@pytest.fixture
def cut_off(tmp_path):
    """A run that was killed after three steps, with a checkpoint."""
    code = (
        "import os, sys; from tandem.state.run_folder import RunFolder\n"
        "run = RunFolder.open(sys.argv[1], 'tandem', 'trial', config_text=sys.argv[2], command='train')\n"
        "(run.path / 'metrics.jsonl').write_text('{\"step\": 3, \"loss\": 1.0}\\n')\n"
        "(run.path / 'checkpoints/step_2').mkdir(parents=True); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path), to_yaml(config())], timeout=60).returncode == -9
    return tmp_path / "tandem" / "trial"


def reopened(folder, now, **options):
    examine = may_go_on(now, **options)
    return RunFolder.open(folder.parents[1], "tandem", "trial", config_text=to_yaml(now), command="train", examine=examine)


def test_a_run_that_was_cut_off_goes_on_under_its_own_name_and_says_so(cut_off):
    before = json.loads((cut_off / "run.json").read_text()) | {"restarts": [{"number": 1}]}
    (cut_off / "run.json").write_text(json.dumps(before))
    with reopened(cut_off, config()) as run:
        assert run.going.changed == ()
        assert "3 steps done; was killed before it could end" in run.going.describe()
    info = json.loads((cut_off / "run.json").read_text())
    assert (info["id"], info["started"], info["status"]) == (before["id"], before["started"], "finished")
    assert info["restarts"] == before["restarts"]
    (line,) = info["resumed"]
    assert (line["was"], line["steps"], line["changed"]) == ("running", 3, [])


def test_metrics_that_were_put_aside_are_back_where_the_run_is_refused(cut_off):
    (cut_off / "checkpoints/step_2").rmdir()
    metrics = (cut_off / "metrics.jsonl").read_text()
    aside = []
    with pytest.raises(ConfigError, match="not like this"), reopened(cut_off, config()):
        raise ConfigError(f"not like this, with {aside.extend(cut_off.glob('metrics.lost*'))}")
    assert aside
    assert (cut_off / "metrics.jsonl").read_text() == metrics and not list(cut_off.glob("metrics.lost*"))
    assert "not like this" in (cut_off / "log.txt").read_text()


@pytest.mark.parametrize("begins", [False, True])
def test_a_run_that_is_refused_before_it_goes_on_is_what_it_was(cut_off, begins):
    """A refusal behind the lock, such as that of other kernels; once training has begun an error is the run's own."""
    before = (cut_off / "run.json").read_text()

    def refused():
        with reopened(cut_off, config()) as run:
            if begins:
                run.begin(2)
            raise ConfigError("not like this")

    with pytest.raises(ConfigError, match="not like this"):
        refused()
    after = json.loads((cut_off / "run.json").read_text())
    assert (after == json.loads(before)) is not begins
    assert after["status"] == ("failed" if begins else "running")


def test_what_changes_nothing_that_is_learnt_may_be_otherwise(cut_off):
    now = config("checkpoint.every_steps=5", "rollout.wait_timeout_s=9")
    with reopened(cut_off, now) as run:
        assert [d.key for d in run.going.changed] == ["checkpoint.every_steps", "rollout.wait_timeout_s"]
        assert yaml.safe_load((cut_off / "config.yaml").read_text())["checkpoint"]["every_steps"] is None
        run.begin()
    assert yaml.safe_load((cut_off / "config.yaml").read_text())["checkpoint"]["every_steps"] == 5


def test_the_learning_rate_lengths_and_counts_change_by_override_and_not_without(cut_off):
    now = config("actor.optimizer.lr=0.5", "total_train_steps=12", "gconfig.n_samples=2")
    before = (cut_off / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"(?s)lr: 1e-06 → 0.5\n.*total_train_steps: 9 → 12|add --override") as refused:
        reopened(cut_off, now)
    for words in ("actor.optimizer.lr: 1e-06 → 0.5", "total_train_steps: 9 → 12", "gconfig.n_samples", "add --override"):
        assert words in str(refused.value)
    assert (cut_off / "config.yaml").read_text() == before
    with reopened(cut_off, now, override=True) as run:
        assert len(run.going.changed) == 3
    (line,) = json.loads((cut_off / "run.json").read_text())["resumed"]
    assert "total_train_steps: 9 → 12" in line["changed"]


@pytest.mark.parametrize(
    "item",
    [
        "seed=1",
        "algorithm=rloo",
        "actor.path=other",
        "train_dataset.prompt_suffix=x",
        "rollout.dtype=float32",
    ],
)
def test_what_a_run_is_cannot_change_within_it(cut_off, item):
    with pytest.raises(ConfigError, match="cannot change within a run: use the values that it began with, or begin another"):
        reopened(cut_off, config(item), override=True)


def test_a_knob_that_is_new_or_gone_is_a_difference(cut_off):
    now = config("algorithm.policy_loss.clip_high=0.5")
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss.*cannot change within a run"):
        reopened(cut_off, now, override=True)


def test_another_kind_of_training_does_not_go_on(cut_off):
    with pytest.raises(ConfigError, match="cannot change within a run"):
        reopened(cut_off, config(cls=SFTConfig), override=True)


def test_a_key_that_an_older_version_did_not_know_had_its_default(cut_off):
    old = yaml.safe_load((cut_off / "config.yaml").read_text())
    del old["deterministic"]
    (cut_off / "config.yaml").write_text(yaml.safe_dump(old))
    reopened(cut_off, config()).close()
    with pytest.raises(ConfigError, match="deterministic: false → true"):
        reopened(cut_off, config("deterministic=true"))


@pytest.mark.parametrize(
    ("key", "before", "other"), [("rollout.min_group_size", 1, 2), ("rollout.engine.max_running", 128, 64)]
)
def test_a_default_that_an_older_version_had_otherwise_is_no_reason_to_refuse(cut_off, key, before, other):
    (cut_off / "config.yaml").write_text(to_yaml(config(f"{key}={before}")))
    (changed,) = may_go_on(config())(cut_off).changed
    assert str(changed) == f"{key}: {before} → null"
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: {before} → {other}\nadd --override"):
        may_go_on(config(f"{key}={other}"))(cut_off)


def test_a_finished_run_is_only_made_longer_and_by_override(tmp_path):
    folder = tmp_path / "tandem" / "trial"
    with RunFolder.open(tmp_path, "tandem", "trial", config_text=to_yaml(config())):
        pass
    with pytest.raises(RunFolderTaken, match="A run is never overwritten"):  # there is nothing to train longer
        reopened(folder, config("total_train_steps=20"), override=True)
    (folder / "checkpoints/step_9").mkdir(parents=True)
    for now, options in ((config(), {}), (config(), {"override": True}), (config("checkpoint.every_steps=3"), {})):
        with pytest.raises(RunFolderTaken, match=r"A run is never overwritten.*larger total_train_steps and --override"):
            reopened(folder, now, **options)
    reopened(folder, config("total_train_steps=20"), override=True).close()


def test_no_run_is_made_shorter_than_what_is_kept_of_it(cut_off):
    with pytest.raises(ConfigError, match=r"a run of 2 steps, and total_train_steps=1 would make it shorter"):
        may_go_on(config("total_train_steps=1"), override=True)(cut_off)
    (cut_off / "run.json").write_text(json.dumps({"status": "finished"}))
    with pytest.raises(ConfigError, match=r"a run of 3 steps, and total_train_steps=2 would make it shorter"):
        may_go_on(config("total_train_steps=2"), override=True)(cut_off)


def test_without_its_configuration_a_run_does_not_go_on(cut_off):
    (cut_off / "config.yaml").unlink()
    with pytest.raises(RunFolderTaken, match=r"its config\.yaml is missing"):
        may_go_on(config())(cut_off)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (
            ["actor.backend=fsdp:d2", "reference.backend=fsdp:d1r2", "algorithm.kl.coefficient=0.1"],
            ["actor.backend=fsdp:d1", "algorithm.kl.coefficient=0.1"],
        ),
        (["actor.backend=fsdp:d1c2"], ["actor.backend=fsdp:d2"]),
        (["actor.backend=fsdp:d2", "actor.gradient_sync=micro_batch"], ["actor.backend=fsdp:d1"]),
    ],
)
def test_any_layout_goes_on_from_any_other_by_override(cut_off, before, now):
    (cut_off / "config.yaml").write_text(to_yaml(config(*before)))
    with pytest.raises(ConfigError, match="add --override"):
        may_go_on(config(*now))(cut_off)
    assert may_go_on(config(*now), override=True)(cut_off).changed


def test_without_any_checkpoint_the_metrics_of_what_is_lost_are_set_aside(cut_off):
    (cut_off / "checkpoints/step_2").rmdir()
    lines = (cut_off / "metrics.jsonl").read_text()
    with reopened(cut_off, config()) as run:
        assert not (cut_off / "metrics.jsonl").exists()
        assert run.info["resumed"][0]["lost"] == "metrics.lost-1.jsonl"
    assert (cut_off / "metrics.lost-1.jsonl").read_text() == lines


def test_a_configuration_that_cannot_be_read_is_not_guessed(cut_off):
    (cut_off / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read, so it is not known what the run was"):
        reopened(cut_off, config())


def test_the_keys_that_may_change_exist():
    keys = {key for kind in (TrainConfig, SFTConfig, DistillConfig) for key, _ in leaves(kind())}
    sections = {key.rpartition(".")[0] for key in keys} | {key.split(".")[0] for key in keys}
    assert [key for key in (*FREE, *MAY_CHANGE, *FIXED) if key not in keys | sections] == []
