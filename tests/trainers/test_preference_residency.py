"""Actor and reference that take turns in one memory, while preferences are learnt."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tandem import open_training
from tandem.api.weights import tensor_digest
from tandem.config.errors import ConfigError
from tandem.config.load import load_config
from tandem.config.preference import PreferenceConfig
from tandem.flow.plan import plan_run
from tandem.flow.sleep_plan import GIB, Part, moved_bytes, sleep_plan_here
from tandem.models.shape import read_shape
from tandem.planning.fit import Plan
from tandem.planning.job import job_of
from tandem.trainers.lengths import known_lengths
from tandem.trainers.recipes import train
from tests.tiny import tiny_model_folder
from tests.trainers.colocated import CLOCK, rows
from tests.trainers.planning import round_machine
from tests.trainers.preferring import keys_of

REFERENCE = Part("reference", "parameters")


def config_of(keys):
    return load_config(PreferenceConfig, None, keys)


def sleeping(keys):
    config = config_of(keys).config
    return sleep_plan_here(config, plan_run(config))


def tight(keys) -> str:
    """Next to nothing more than the largest stage needs."""
    plan = sleeping([*keys, "memory_limit_gib=99"])
    return f"memory_limit_gib={1.0001 * plan.least(plan.largest) / GIB}"


def outcome(folder: Path):
    """All that a run came to, but for clocks."""
    metrics = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows(folder)]
    saved = {
        f"{path.relative_to(folder)} {name}": tensor_digest(tensor)
        for path in sorted(folder.glob("checkpoints/**/*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return metrics, saved, (folder / "weights.jsonl").read_text()


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_reference_that_sleeps_while_the_actor_learns_changes_nothing(tmp_path, loss):
    keys = keys_of(tmp_path, tiny_model_folder(tmp_path), f"loss={loss}")
    awake = train(config_of([*keys, "trial_name=awake"]))
    limit = tight(keys)
    train(config_of([*keys, limit]), until=1)
    asleep = train(config_of([*keys, limit]))  # it goes on from its checkpoint
    assert outcome(asleep.folder) == outcome(awake.folder)

    plan, last = sleeping([*keys, limit]), rows(asleep.folder)[-1]
    update = next(done for done in plan.steady() if done.stage.name == "update")
    assert update.moves.sleep == (REFERENCE,) and update.peak == plan.least(plan.largest)
    assert moved_bytes(plan.steady()) == plan.parts[REFERENCE].num_bytes, "a step reads the reference, and moves no more"
    assert last["memory/moved_gib"] == plan.parts[REFERENCE].num_bytes / GIB
    assert last["time/switch_s"] > 0 and "memory/moved_gib" not in rows(awake.folder)[-1]


SIZE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
BRIEF = ("total_train_steps=2", "evaluate.every_steps=null", "checkpoint.every_steps=null", "max_length=32")


def peak(root: Path, model: Path, *more: str) -> dict[str, float]:
    """The peaks of a process that trains, in MiB over its start."""
    command = [sys.executable, "-m", "tests.trainers.preferring", str(root), str(model), "0", *BRIEF, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def planned_mib(keys) -> float:
    """The worst instant of the plan, without the interpreter."""
    config = config_of(keys).config
    machine = round_machine(process_gib=0.02)
    job = job_of(config, machine, known_lengths(config).lengths, functools.cache(read_shape))
    return Plan(job, machine).peak_gib() * 1024


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_actor_and_a_reference_four_times_as_large_take_turns_in_the_planned_memory(tmp_path):
    """The actor keeps 103 MiB while it learns, the reference 100 while it scores."""
    actor = tiny_model_folder(tmp_path / "actor", **SIZE, num_hidden_layers=2)
    reference = tiny_model_folder(tmp_path / "reference", seed=1, **SIZE, num_hidden_layers=8)
    small, more = tiny_model_folder(tmp_path / "small"), (f"reference.path={reference}",)
    keys = keys_of(tmp_path / "plan", actor, *BRIEF, *more)
    limit = tight(keys)
    base = peak(tmp_path / "base", small)  # of models that are next to nothing
    asleep, awake = peak(tmp_path / "asleep", actor, *more, limit), peak(tmp_path / "awake", actor, *more)

    assert asleep["RssAnon"] - base["RssAnon"] == pytest.approx(planned_mib([*keys, limit]), rel=0.1)
    # a frozen model that never slept is in the pages of its file, which are resident and not anonymous
    assert awake["VmRSS"] - base["VmRSS"] == pytest.approx(planned_mib(keys), rel=0.1)
    assert planned_mib([*keys, limit]) < 0.6 * planned_mib(keys)
    folders = [tmp_path / name / "tandem" / "trial" for name in ("asleep", "awake")]
    assert outcome(folders[0]) == outcome(folders[1]) and rows(folders[0])[-1]["memory/moved_optimizer_gib"] > 0


def test_a_limit_that_cannot_work_is_refused_before_there_is_a_run_folder(tmp_path):
    keys = keys_of(tmp_path, tiny_model_folder(tmp_path))
    words = r"cannot hold the stage 'update'.*actor optimizer .* \+ actor gradients .*\(a LoRA actor\)$"
    with pytest.raises(ConfigError, match=words):
        train(config_of([*keys, "memory_limit_gib=0.0001"]))
    for other, words in (
        ("actor.offload=true", "does not go with actor.offload=true"),
        ("reference.backend=deepspeed:zero3:d2", "does not go with reference.backend=deepspeed"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of([*keys, "memory_limit_gib=1", other])
    with (
        pytest.raises(ConfigError, match="a script calls them itself: leave it out"),
        open_training(config_of([*keys, "memory_limit_gib=1"]).config),
    ):
        pass
    assert not (tmp_path / "tandem").exists()
