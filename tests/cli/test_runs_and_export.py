"""What runs there are, and their models as folders of their own."""

import fcntl
import json
import os
import re
import resource
import shutil
import socket
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.api.team import Team
from tandem.cli.main import main
from tandem.cli.running import resolve
from tandem.cli.view import places_of
from tandem.config.errors import ConfigError
from tandem.config.experiment import CheckpointConfig, TrainConfig
from tandem.config.load import load_config, to_yaml
from tandem.state.checkpoint import save_checkpoint
from tandem.state.existing import last_metrics
from tandem.state.resuming import named_model, named_run, pins
from tandem.state.run_folder import RunFolder
from tandem.state.tree import write_tree
from tests.engines_train.steps import engine_on
from tests.tiny import tiny_model_folder, tiny_tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Runs: one that is finished, with three checkpoints, one that failed, and one whose process is gone."""
    root = tmp_path_factory.mktemp("runs")
    items = [
        "train_dataset.path=addition",
        "checkpoint.every_steps=1",
        "checkpoint.keep_best=eval/accuracy",
        "evaluate.every_steps=1",
    ]
    text = to_yaml(load_config(TrainConfig, None, items).config)
    engine = engine_on(tiny_model_folder(root / "models"), dtype="bfloat16")
    with RunFolder.open(root / "runs", "adding", "first", config_text=text, command="train") as run:
        for step, accuracy in ((1, 0.25), (2, 0.75), (3, 0.5)):
            (run.path / "metrics.jsonl").write_text(
                json.dumps({"step": step, "loss": 0.5, "eval/accuracy": accuracy}) + "\n"
            )
            engine.load_weights((name, tensor + step) for name, tensor in list(engine.weights()))
            save_checkpoint(
                Team(),
                run,
                step,
                engine.save,
                lambda folder: tiny_tokenizer().save_pretrained(folder),
                CheckpointConfig(keep_last=None),
                write_state=lambda folder: write_tree(Team(), folder, {"trainer": engine.state_dict()}),
                metrics={"eval/accuracy": accuracy},
            )
    with pytest.raises(ValueError, match="bad"), RunFolder.open(root / "runs", "adding", "second", config_text="seed: 1\n"):
        raise ValueError("bad")
    RunFolder.open(root / "runs", "other", "third", config_text="seed: 1\n").close()
    (root / "runs/other/third/.lock").write_text(f"process 0 on {socket.gethostname()} since then\n")
    os.makedirs(root / "runs/other/nothing")
    return root / "runs"


def test_runs_are_listed_with_how_they_ended_and_what_they_have(root, capsys):
    assert main(["runs", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["RUN", "STATUS", "STEPS"],
        ["adding/first", "finished", "3"],
        ["adding/second", "failed", "0"],
        ["other/third", "killed", "0"],
    ]
    assert "3, to step_3" in lines[1] and "eval/accuracy 0.5" in lines[1] and "none" in lines[2]
    assert main(["runs", str(root), "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["checkpoints"] == ["step_1", "step_2", "step_3"] and first["metrics"] == {"loss": 0.5, "eval/accuracy": 0.5}
    assert first["bytes"] == sum(path.stat().st_size for path in (root / "adding/first").rglob("*") if path.is_file())


def test_the_folder_of_an_experiment_or_of_a_run_is_listed_too(root, capsys):
    for folder, names in ((root / "adding", ["adding/first", "adding/second"]), (root / "adding/first", ["adding/first"])):
        assert main(["runs", str(folder), "--json"]) == 0
        assert [json.loads(line)["run"] for line in capsys.readouterr().out.splitlines()] == names


def test_a_number_that_another_process_has_by_now_is_no_run_that_lives(root, tmp_path, capsys):
    shutil.copytree(root / "other/third", tmp_path / "other/third")
    (tmp_path / "other/third/.lock").write_text(f"process {os.getpid()} on {socket.gethostname()} since then\n")
    main(["runs", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["status"] == "killed"


def test_a_run_on_another_machine_is_shown_with_its_name_and_how_long_it_is_silent(root, tmp_path, capsys):
    folder = tmp_path / "other/third"
    shutil.copytree(root / "other/third", folder)
    (folder / ".lock").write_text("process 1 on another-machine since then\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    for file in folder.iterdir():
        os.utime(file, (0, time.time() - (600 if file.name == "metrics.jsonl" else 90_000)))
    main(["runs", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["host"]) == ("elsewhere", "another-machine") and 600 <= found["silent_s"] < 660
    main(["runs", str(tmp_path)])
    assert "other/third  on another-machine, silent 10 min  1 " in capsys.readouterr().out
    with (folder / ".lock").open() as lock:  # a disk that tells of locks between machines
        fcntl.flock(lock, fcntl.LOCK_EX)
        main(["runs", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["status"] == "running"


ODD = {
    "torn": {"run.json": '{"st', "metrics.jsonl": '{"step": 3, "loss": 0.5}\n{"step": 4, "lo'},
    "words": {"run.json": '{"status": "failed"}', "metrics.jsonl": '{"step": "abc", "loss": "low"}\n'},
    "nothing": {"run.json": '{"status": null, "ended": 3}', "metrics.jsonl": '{"step": null, "loss": NaN}\n'},
    "lists": {"run.json": "[]", "metrics.jsonl": "[]\n\n3\n"},
    "bytes": {"run.json": "\udcff", "metrics.jsonl": "\udcff\n"},
    "empty": {"config.yaml": ""},
}


def test_damaged_and_foreign_folders_are_listed_with_what_can_be_read_of_them(tmp_path, capsys):
    for name, files in ODD.items():
        (tmp_path / "exp" / name).mkdir(parents=True)
        for file, text in files.items():
            (tmp_path / "exp" / name / file).write_text(text, errors="surrogateescape")
    (tmp_path / "exp/folders/run.json").mkdir(parents=True)
    (tmp_path / "exp/folders/checkpoints").write_text("")
    (tmp_path / "exp/loop").symlink_to(tmp_path / "exp/loop")
    (tmp_path / "exp/circle").mkdir()
    (tmp_path / "exp/circle/circle").symlink_to(tmp_path / "exp/circle")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr()
    found = {one["run"].removeprefix("exp/"): one for one in map(json.loads, said.out.splitlines())}
    assert found.keys() == {*ODD, "folders"} and said.err == ""
    assert (found["torn"]["status"], found["torn"]["steps"], found["torn"]["metrics"]) == ("unknown", 3, {"loss": 0.5})
    assert (found["words"]["status"], found["words"]["steps"], found["words"]["metrics"]) == ("failed", 0, {})
    assert all(found[name]["metrics"] == {} and found[name]["steps"] == 0 for name in ("nothing", "lists", "bytes", "empty"))
    assert main(["runs", str(tmp_path)]) == 0


def test_runs_without_a_record_are_listed_from_every_folder_above_them(tmp_path, capsys):
    for name in ("exp/whole/run.json", "exp/lost/metrics.jsonl", "exp/old/checkpoints/step_4/model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "exp/config.yaml").write_text("a user's own")
    for name in ("exp/checkpoints", "other/trajectories", "checkpoints/run"):  # runs and experiments may be called so
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("seed: 1\n")

    def listed(folder):
        assert main(["runs", str(tmp_path / folder), "--json"]) == 0
        return {
            one["run"]: (one["status"], one["checkpoints"]) for one in map(json.loads, capsys.readouterr().out.splitlines())
        }

    runs = {
        f"exp/{name}": ("unknown", ["step_4"] if name == "old" else []) for name in ("checkpoints", "lost", "old", "whole")
    }
    other, like_it = {"other/trajectories": ("unknown", [])}, {"checkpoints/run": ("unknown", [])}
    assert listed("") == runs | other | like_it
    assert listed("checkpoints") == like_it
    assert listed("exp") == runs and listed("other") == other
    assert listed("exp/old") == {"exp/old": runs["exp/old"]} and listed("exp/lost") == {"exp/lost": runs["exp/lost"]}


def test_of_long_metrics_only_the_end_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"step": step, "text": "x" * (step % 7) * 20_000}) for step in range(40)]
    for torn in ("", '{"step": 40', "\n\n"):
        path.write_text("\n".join(whole) + "\n" + torn)
        assert last_metrics(tmp_path)["step"] == 39 and len(last_metrics(tmp_path)["text"]) == 39 % 7 * 20_000
    path.write_text("")
    assert last_metrics(tmp_path) == {}
    with path.open("r+b") as file:  # 200 GB that nobody has: a file with a hole
        file.truncate(200 * 10**9)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 7}\n')
    assert last_metrics(tmp_path) == {"step": 7}


def test_a_run_whose_process_lives_is_running(root, capsys):
    run = RunFolder.open(root, "other", "fourth", config_text="seed: 1\n")
    main(["runs", str(root), "--json"])
    run.close()
    found = {one["run"]: one["status"] for one in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["other/fourth"] == "running" and found["other/third"] == "killed"


def test_without_runs_one_is_told(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0 and "No run in" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "x")]) == 2 and "run.root" in capsys.readouterr().err


@pytest.mark.parametrize(("which", "step"), [("", 3), ("@2", 2), ("@best", 2), ("@step_1", 1)])
def test_an_export_is_the_model_and_nothing_else(root, tmp_path, capsys, which, step):
    target = tmp_path / "model"
    assert main(["export", f"{root / 'adding/first'}{which}", str(target)]) == 0
    saved = root / f"adding/first/checkpoints/step_{step}"
    assert f"step_{step}" in capsys.readouterr().out
    assert (target / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert {path.name for path in target.iterdir()} == {path.name for path in saved.iterdir()} - {"state"}
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16


def test_a_dtype_is_rounded_once_from_the_float32_masters(root, tmp_path):
    assert main(["export", str(root / "adding/first"), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    wide, saved = load_file(tmp_path / "wide/model.safetensors"), root / "adding/first/checkpoints/step_3"
    masters, rounded = load_file(saved / "state/tensors-00001.safetensors"), load_file(saved / "model.safetensors")
    assert wide.keys() == rounded.keys()
    for name, tensor in wide.items():
        assert torch.equal(tensor, masters[f"trainer/masters/model.{name}"]) and torch.equal(
            tensor.bfloat16(), rounded[name]
        )
    assert any(not torch.equal(tensor, rounded[name].float()) for name, tensor in wide.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "wide").dtype == torch.float32


def test_a_checkpoint_without_state_can_be_exported_too(root, tmp_path):
    folder = tmp_path / "runs/a/b/checkpoints/step_4"
    assert main(["export", str(root / "adding/first"), str(folder)]) == 0
    (tmp_path / "runs/a/b/run.json").write_text("{}")
    (folder / "critic").mkdir()  # another model
    assert main(["export", str(tmp_path / "runs/a/b"), str(tmp_path / "again"), "--dtype", "float32"]) == 0
    old, new = load_file(folder / "model.safetensors"), load_file(tmp_path / "again/model.safetensors")
    assert all(torch.equal(new[name], tensor.float()) for name, tensor in old.items())
    assert not (tmp_path / "again/critic").exists()


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("adding/first@9", "has no checkpoint of step '9'; there are step_1, step_2, step_3"),
        ("adding/second", "second has no checkpoint yet"),
        ("adding/none", "adding/none, did you mean adding/second; there are adding/first,"),
        ("adding/second@best", "second has no checkpoint yet"),
    ],
)
def test_what_cannot_be_exported_is_said(root, tmp_path, capsys, which, words):
    assert main(["export", str(root / which), str(tmp_path / "model")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [b", "cannot be read, so it is not known what is best"),
        ("checkpoint: 3", "without checkpoint.keep_best"),
        ("checkpoint: {keep_best: eval/other}", "no checkpoint states the metric eval/other"),
    ],
)
def test_the_best_of_a_run_that_does_not_know_it_is_refused(root, tmp_path, capsys, text, words):
    folder = tmp_path / "exp/odd"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    (folder / "checkpoints").symlink_to(root / "adding/first/checkpoints")
    assert main(["export", f"{folder}@best", str(tmp_path / "model")]) == 2
    assert words in capsys.readouterr().err


def test_nothing_is_exported_into_the_folder_of_a_run(root, tmp_path, capsys, monkeypatch):
    before = sorted((root / "adding").rglob("*"))
    for place in ("second/model", "first/checkpoints/step_9", "first/checkpoints/step_3/model"):
        assert main(["export", str(root / "adding/first"), str(root / "adding" / place)]) == 2
        assert "a run's folder, where only the run writes" in capsys.readouterr().err
    monkeypatch.chdir(root / "adding/first")
    assert main(["export", ".", "model"]) == 2
    (tmp_path / "link").symlink_to(root / "adding/first/checkpoints")
    assert main(["export", ".", str(tmp_path / "link/step_9")]) == 2
    assert sorted((root / "adding").rglob("*")) == before
    (root / "run.json").write_text("{}")  # of somebody else
    out = root / "models"
    assert main(["export", ".", f"../../{out.name}"]) == 0 and (out / "config.json").is_file()


@pytest.mark.parametrize(("place", "reason"), [("file/below", "Not a directory"), ("/proc/below", "No such file")])
def test_a_folder_that_cannot_be_made_is_said(root, tmp_path, capsys, place, reason):
    (tmp_path / "file").write_text("mine")
    assert main(["export", str(root / "adding/first"), str(tmp_path / place)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "could not be written" in said and reason in said


@pytest.mark.parametrize("more", [[], ["--dtype", "float32"]])
def test_on_a_full_disk_nothing_of_an_export_is_left_behind(root, tmp_path, capsys, more):
    saved = root / "adding/first/checkpoints/step_3"
    now, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((saved / "model.safetensors").stat().st_size // 2, most))
    try:
        code = main(["export", str(root / "adding/first"), str(tmp_path / "model"), *more])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (now, most))
    said = capsys.readouterr().err
    assert code == 1 and "File too large" in said and "Nothing of it was left behind" in said  # the fault did happen
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_state_that_is_torn_is_not_exported(root, tmp_path, capsys):
    folder = tmp_path / "runs/a/b"
    for step in (2, 3):
        shutil.copytree(
            root / f"adding/first/checkpoints/step_{step}",
            folder / f"checkpoints/step_{step}",
            ignore=shutil.ignore_patterns("state"),
        )
    torn = folder / "checkpoints/step_3/model.safetensors"
    os.truncate(torn, torn.stat().st_size - 1)
    assert main(["export", f"{folder}@3", str(tmp_path / "model")]) == 2
    assert "is damaged: model.safetensors cannot be read" in capsys.readouterr().err
    assert main(["export", str(folder), str(tmp_path / "model")]) == 0
    assert "step_2" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--merge", "--no-merge"])
def test_a_run_without_an_adapter_has_nothing_to_merge(root, tmp_path, capsys, word):
    assert main(["export", str(root / "adding/first"), str(tmp_path / "model"), word]) == 2
    assert "has no adapter" in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_an_export_overwrites_nothing_and_takes_no_damaged_checkpoint(root, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    assert main(["export", str(root / "adding/first"), str(tmp_path / "full")]) == 2
    assert "exists" in capsys.readouterr().err and (tmp_path / "full/file").read_text() == "mine"
    damaged = tmp_path / "runs/a/b/checkpoints"
    for step in (2, 3):
        (damaged / f"step_{step}").parent.mkdir(parents=True, exist_ok=True)
        os.system(f"cp -r {root / f'adding/first/checkpoints/step_{step}'} {damaged}")
    (tmp_path / "runs/a/b/run.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, damaged / "step_3/model.safetensors")
    assert main(["export", f"{tmp_path / 'runs/a/b'}@3", str(tmp_path / "model")]) == 2
    assert "step_3 is torn: model.safetensors" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "runs/a/b"), str(tmp_path / "model")]) == 0
    assert "step_2" in capsys.readouterr().out


def test_a_run_that_is_running_is_not_said_to_have_been_killed(root, capsys):
    text = to_yaml(load_config(TrainConfig, None, ["train_dataset.path=addition"]).config)
    with RunFolder.open(root, "other", "fifth", config_text=text, command="train"):
        assert main(["continue", str(root / "other/fifth"), "rollout.wait_timeout_s=9"]) == 2
    said = capsys.readouterr().err
    assert "is being written by another run: process" in said and "killed" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adding/second"], "does not say which command started it"),
        (["adding/first"], "larger total_train_steps and --override"),
        (["adding/first", "seed=9", "total_train_steps=9", "--override"], "seed: 0 → 9"),
        (["adding/first", "trial_name=x"], "trial_name=x cannot be changed here"),
        (["adding/first", "more"], "more cannot be changed here"),
    ],
)
def test_what_cannot_go_on_is_refused(root, capsys, arguments, words):
    assert main(["continue", str(root / arguments[0]), *arguments[1:]]) == 2
    assert words in capsys.readouterr().err


def test_a_run_stands_for_a_model_as_the_checkpoint_it_has_at_the_start(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root.parent)
    newest, second = (root / f"adding/first/checkpoints/step_{step}" for step in (3, 2))
    for name, checkpoint in (("adding/first", newest), (str(root / "adding/first"), newest), ("adding/first@2", second)):
        assert named_model(name) == str(checkpoint)
    words = ["train_dataset.path=addition", f"run.root={tmp_path}", "trial_name=next", "critic.path=adding/first@best"]
    arguments = Namespace(arguments=[*words, "actor.path=adding/first", "algorithm=ppo"])
    found = resolve(arguments, TrainConfig)
    assert (found.config.actor.path, found.config.critic.path) == (str(newest), str(second))
    assert found.sources["actor.path"] == "pinned: the newest checkpoint of adding/first"
    assert pins(found) == [f'actor.path="{newest}"', f'critic.path="{second}"']  # the ranks do not look again

    then = replace(found.config, actor=replace(found.config.actor, path=str(second)))  # step 2 was the newest when it began
    RunFolder.open(tmp_path, "tandem", "next", config_text=to_yaml(then)).close()
    (tmp_path / "tandem/next/metrics.jsonl").write_text('{"step": 1}\n')
    assert resolve(arguments, TrainConfig).config.actor.path == str(second)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adding/first@7", "no checkpoint of step '7'; there are step_1, step_2, step_3"),
        ("adding/frist@2", "there is no run adding/frist, did you mean adding/first; there are adding/first,"),
        ("adding/second", "second has no checkpoint yet"),
        ("runs/adding", "runs/adding holds runs, but is not a run itself: give one of them, such as adding/first"),
    ],
)
def test_a_run_that_cannot_stand_for_a_model_says_what_there_is(name, words, root, monkeypatch):
    monkeypatch.chdir(root.parent)
    with pytest.raises(ConfigError, match=re.escape(words)):
        named_model(name)


@pytest.mark.parametrize("name", ["owner/name", "x" * 5000, "@" * 5000, "~nobody-has-this/x@3", "adding/firsd"])
def test_what_names_no_run_is_left_to_whoever_knows_models(name, root, monkeypatch):
    monkeypatch.chdir(root.parent)
    assert named_model(name) == name


def test_a_models_folder_is_taken_where_a_run_has_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "sums/one", tmp_path / "runs/sums/one/checkpoints/step_1"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert named_model("sums/one") == "sums/one"
    assert named_run("sums/one@1") == (Path("runs/sums/one"), "1")


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ([__file__], "is a file: a run is a folder, or EXPERIMENT/TRIAL of one below runs$"),
        (["runs/adding/first/metrics.jsonl"], "is a file: a run is a folder, .*; did you mean runs/adding/first$"),
        (["runs/adding/first@7"], "runs/adding/first has no samples of step 7; there are none of any step"),
        (["~nobody-has-this/x"], "there is no run ~nobody-has-this/x"),
        (["x" * 5000], "there is no run xxx"),
        ([], "there is no folder runs here"),
    ],
)
def test_the_viewer_says_what_it_wants_where_no_run_is_named(named, words, root, monkeypatch):
    monkeypatch.chdir(root.parent if named else root)
    with pytest.raises(ConfigError, match=words):
        places_of(named)
