"""What `tandem` says and how it exits."""

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import pytest

from tandem.api.failures import EngineDied
from tandem.cli.arguments import run_at, run_folder, split_arguments
from tandem.cli.main import COMMANDS, main, run
from tandem.config.errors import ConfigError, TandemError

NOT_NEEDED = ("torch", "transformers", "matplotlib")


def imported_by(*argv):
    """The names of the slow libraries that a command has loaded when it is done."""
    code = (
        "import sys\nfrom tandem.cli.main import main\n"
        f"try:\n    main({list(argv)!r})\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {NOT_NEEDED!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["config", "train_dataset.path=addition"]])
def test_what_needs_no_torch_does_not_load_it(argv):
    assert imported_by(*argv) == "[]"


def test_a_wrong_configuration_is_told_before_torch_is_loaded():
    assert imported_by("train", "actr.path=x") == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])

    said = capsys.readouterr().out
    assert left.value.code == 0
    assert f"usage: tandem {command}" in said and "--debug" in said


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main([])

    said = capsys.readouterr().out
    assert all(f"  {name}" in said and command.help in said for name, command in COMMANDS.items())


def test_an_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as left:
        main(["trian"])

    said = capsys.readouterr().err
    assert left.value.code == 2 and said.endswith("there is no command 'trian'; did you mean 'train'?\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "--lr", "1e-5"], "values are given as key=value: actor.optimizer.lr=1e-5"),
        (["train", "--config", "run.yaml"], "a configuration file is written without --config: run.yaml key=value"),
        (["train", "--actor.optimizer.lr=1e-5"], "values are given as key=value: actor.optimizer.lr=1e-5"),
        (["plan", "--seed", "3"], "values are given as key=value: seed=3"),
        (["sft", "--learning-rate", "1"], "learning_rate is TRL's: use actor.optimizer.lr=…"),
        (["sft", "--batch-size", "4"], "values are given as key=value: batch_size=4"),
        (["eval", "--dataset", "x"], "there is no option --dataset; did you mean --data?"),
        (["runs", "--verbose"], "there is no option --verbose"),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_what_to_write(argv, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_a_run_is_taken_by_the_name_that_runs_lists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("runs/sums/one", "sums/one"):
        (tmp_path / place / "checkpoints").mkdir(parents=True)
        assert run_folder("sums/one") == Path(place)  # a path that is there is meant as it is written
    assert run_at("sums/one@3") == (Path("sums/one"), "3")
    with pytest.raises(ConfigError, match="there is no run sums/on, did you mean sums/one; there are sums/one "):
        run_folder("sums/on")
    with pytest.raises(ConfigError, match="this command takes a whole run: leave @3 out"):
        run_folder("sums/one@3")


def raising(error):
    def function(arguments):
        raise error

    return function


@pytest.mark.parametrize(("error", "code"), [(ConfigError("wrong key"), 2), (TandemError("it broke"), 1)])
def test_errors_raised_on_purpose_are_one_line_and_a_code(error, code, capsys):
    assert run(raising(error), Namespace(debug=False)) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_debug_shows_the_traceback():
    with pytest.raises(TandemError, match="it broke"):
        run(raising(TandemError("it broke")), Namespace(debug=True))


def test_other_errors_are_bugs_and_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()), Namespace(debug=False))


def test_ctrl_c_says_where_things_are(capsys):
    assert run(raising(KeyboardInterrupt()), Namespace(debug=False), lambda arguments: "All is in runs/a/b.") == 130
    assert capsys.readouterr().err == "\nInterrupted. All is in runs/a/b.\n"


def test_a_command_may_run_in_a_thread_of_somebody_elses_program(capsys):
    found = []
    thread = threading.Thread(target=lambda: found.append(main(["config", "train_dataset.path=addition"])))
    thread.start()
    thread.join()
    assert found == [0] and "train_dataset" in capsys.readouterr().out


def test_without_docstrings_nothing_is_started():
    done = subprocess.run([sys.executable, "-OO", "-m", "tandem", "runs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "removes the docstrings that transformers reads; leave it out" in done.stderr


def test_a_dry_run_fetches_no_model_and_says_that_the_start_will(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TANDEM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["train", "train_dataset.path=addition", "total_train_steps=1", "--dry-run"]) == 0
    assert (
        f"The start will make the built-in model smollm2-135m once, in {tmp_path}/tandem: "
        "93 MB are downloaded and converted." in (capsys.readouterr().out)
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tandem").write_text("no folder")
    assert main(["generate", "smollm2-135m", "hi"]) == 2
    assert "set TANDEM_CACHE to a folder that can be written" in capsys.readouterr().err


def test_a_polite_kill_ends_like_ctrl_c_and_the_handler_is_put_back(capsys):
    closed = []

    def function(arguments):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGTERM)
    assert run(function, Namespace(debug=False)) == 130
    assert closed == [True] and signal.getsignal(signal.SIGTERM) is before


def test_a_file_and_overrides_come_in_any_order():
    assert split_arguments(["seed=1", "a.yaml", "actor.path=x=y"]) == ("a.yaml", ["seed=1", "actor.path=x=y"])
    assert split_arguments([]) == (None, [])
    assert split_arguments(["./runs=1/a.yaml"]) == ("./runs=1/a.yaml", [])
    with pytest.raises(ConfigError, match=r"one configuration file at most, got a\.yaml, b\.yaml"):
        split_arguments(["a.yaml", "b.yaml"])


def test_config_shows_values_and_their_sources(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("train_dataset:\n  path: addition\nseed: 3\n")

    assert main(["config", "seed=4", str(file), "--json", "rollout.batch_size=2"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["seed"] == 4 and shown["config"]["rollout"]["batch_size"] == 2
    assert shown["config"]["train_dataset"]["path"] == "addition"
    assert {"seed", "rollout.batch_size", "train_dataset.path"} <= shown["sources"].keys()


def test_config_prints_text_too(capsys):
    assert main(["config", "train_dataset.path=addition", "seed=4"]) == 0
    assert "seed" in capsys.readouterr().out


def test_a_wrong_key_is_a_message_with_the_nearest(capsys):
    assert main(["config", "train_dataset.path=addition", "rollout.batch_sise=2"]) == 2

    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and "batch_size" in said.err and "Traceback" not in said.err


def test_a_name_that_is_a_path_is_refused_before_torch_is_loaded(tmp_path):
    assert imported_by("train", "train_dataset.path=addition", f"run.root={tmp_path}", "trial_name=../x") == "[]"


def test_a_folder_that_holds_a_run_is_refused_at_once(tmp_path, capsys):
    folder = tmp_path / "sums" / "first"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 5, "reward/mean": 0.5}\n')
    keys = ["train_dataset.path=addition", f"run.root={tmp_path}", "experiment_name=sums", "trial_name=first"]

    assert main(["train", *keys]) == 2
    said = capsys.readouterr().err
    assert "5 steps done" in said and "reward/mean 0.5" in said and "trial_name=" in said


@pytest.mark.parametrize("command", ["config", "graph", "plan"])
def test_a_configuration_of_another_command_is_told_by_its_keys(command, capsys):
    file = Path(__file__).parents[2] / "examples" / "addition_distill.yaml"
    assert main([command, str(file)]) == 2
    said = capsys.readouterr().err
    assert "unknown key teacher.path" in said and "teacher belongs to `tandem distill` (or --for distill)" in said
    assert main([command, str(file), "no_such_key=1"]) == 2
    assert "no_such_key belongs" not in capsys.readouterr().err


class Panic(BaseException):
    """The error of a library in Rust."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("can't start new thread"), True),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), True),
        (Panic('IOError(Os { message: "Resource temporarily unavailable" })'), True),
        (EngineDied("can't start new thread"), True),
        (RuntimeError("another"), False),
    ],
    ids=["thread", "process", "Rust", "engine", "another"],
)
def test_a_limit_of_processes_ends_in_a_sentence_that_says_what_to_type(error, told, capsys):
    def starts(_):
        if isinstance(error, TandemError):
            raise error
        raise ValueError("before it") from error

    if not told:
        with pytest.raises(ValueError, match="before it"):
            run(starts, Namespace(debug=False))
        return
    assert run(starts, Namespace(debug=False)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    what = "Type `ulimit -u 4096`" if 0 <= most < 4096 else "Let the container have more"
    assert f"`ulimit -u` is {most if most >= 0 else 'unlimited'}" in line and what in line


def test_a_lock_that_another_run_holds_is_not_told_as_a_limit_of_processes(tmp_path, capsys):
    with (tmp_path / "lock").open("w") as held, (tmp_path / "lock").open("w") as other:
        fcntl.flock(held, fcntl.LOCK_EX)

        def starts(kind):
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise kind("taken") from error

        assert run(lambda _: starts(ConfigError), Namespace(debug=False)) == 2
        assert capsys.readouterr().err == "error: taken\n"
        with pytest.raises(KeyError, match="taken"):
            run(lambda _: starts(KeyError), Namespace(debug=False))
