"""Disks that are full or read-only, at the ledger and at the last words of a run."""

import json
import resource
import subprocess
import sys

import pytest

from tandem.config.errors import ConfigError
from tandem.state.existing import RunFolderInUse
from tandem.state.ledger import LedgerFile, LedgerNotWritten
from tandem.state.run_folder import RunFolder, record_failure

LIMITED = """
import json, resource, signal, sys
from pathlib import Path
from tandem.state.ledger import LedgerFile, LedgerNotWritten
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with LedgerFile(Path(sys.argv[1])) as ledger:
    ledger.commit(1, [(0, place, True, "") for place in range(10)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (32768, resource.RLIM_INFINITY))
    try:
        ledger.commit(2, [(0, place, False, "a long reason " * 20) for place in range(10, 1000)])
    except LedgerNotWritten as error:
        print(json.dumps([str(error), str(error.__cause__), ledger.records]))
"""


def test_a_full_disk_is_named_by_the_ledger_which_stays_as_it_was(tmp_path):
    path = tmp_path / "ledger.sqlite"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said, cause, records = json.loads(done.stdout)
    assert cause in ("database or disk is full", "disk I/O error")  # the fault did happen
    assert f"prompts of step 2 could not be written to {path}" in said and "free some space" in said and records == 10
    with LedgerFile(path) as ledger:
        assert ledger.records == 10
        ledger.verify(10, ledger.digest)
        ledger.commit(2, [(0, 10, True, "")])


def test_a_ledger_that_may_not_be_written_is_named_too(tmp_path):
    with LedgerFile(tmp_path / "ledger.sqlite") as ledger:
        ledger.path.rename(tmp_path / "moved")  # SQLite writes to no file that has lost its name
        with pytest.raises(LedgerNotWritten, match=r"attempt to write a readonly database.*repeat the command"):
            ledger.commit(1, [(0, 0, True, "")])


LINES = """
import json, resource, signal, sys
from pathlib import Path
from tandem.api.failures import NotWritten
from tandem.flow.session import append_digests
from tandem.config.experiment import TrackingConfig
from tandem.tracking.tracker import Tracker
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder, said = Path(sys.argv[1]), []
tracker = Tracker(folder, TrackingConfig(plot_every_steps=None), progress=False)
tracker.log(1, {"loss": 1.0})
append_digests(folder, 1, {"a": "x"})
resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
log = lambda n: tracker.log(2, {f"m{i}": 0.5 for i in range(n)})
for write in (log, lambda n: append_digests(folder, 2, {"a": "x" * n})):
    try:
        write(1000)
    except NotWritten as error:
        said.append([str(error), error.may_pass])
    write(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # what it says is a file too
print(json.dumps(said))
"""


def test_a_full_disk_is_named_by_metrics_and_digests_and_leaves_no_half_lines(tmp_path, zygote):
    done = zygote.run(LINES, tmp_path, log=tmp_path / "said")
    assert done.returncode == 0, done.stdout
    said = json.loads(done.stdout.splitlines()[-1])
    for (words, may_pass), name in zip(said, ("metrics.jsonl", "weights.jsonl"), strict=True):
        assert f"{tmp_path / name} could not be written" in words and "free some space" in words and not may_pass
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]


def test_a_run_that_cannot_begin_for_a_full_disk_says_so_and_begins_with_room(tmp_path):
    now, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, most))
    try:
        with pytest.raises(ConfigError, match=r"the run folder .* cannot be written: .*File too large.*free some space"):
            RunFolder.open(tmp_path, "exp", "trial", config_text="a: 1\n" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (now, most))
    assert [path.name for path in (tmp_path / "exp/trial").iterdir()] == [".lock"]
    RunFolder.open(tmp_path, "exp", "trial", config_text="a: 1\n" * 1000).close()


def test_a_run_whose_log_cannot_be_written_says_so_and_lets_go_of_the_folder(tmp_path):
    (tmp_path / "exp/trial/log.txt").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cannot be written: .*Is a directory.*log\.txt"):
            RunFolder.open(tmp_path, "exp", "trial", config_text="", examine=lambda folder: None)


def test_the_error_of_a_run_is_not_hidden_by_a_disk_that_takes_no_last_words(tmp_path, capsys):
    def fails():
        with RunFolder.open(tmp_path, "exp", "trial", config_text="") as run:
            (run.path / "run.json").unlink()
            (run.path / "run.json").mkdir()
            raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        fails()
    assert "run.json could not be written" in capsys.readouterr().err


def opened(tmp_path, error=None):
    run = RunFolder.open(tmp_path, "exp", "trial", config_text="")
    run.finish("interrupted" if error is None else "failed", error)
    return run.path


def test_whoever_watches_writes_down_how_a_run_failed_and_that_it_is_started_again(tmp_path):
    folder = opened(tmp_path)
    path = record_failure(folder, "rank 1 was killed", stacks="where all stood", restart={"number": 1, "step": 7})
    info = json.loads((folder / "run.json").read_text())
    assert info["status"] == "failed" and info["error"] == "rank 1 was killed"
    assert path.read_text() == "where all stood" and info["stacks"] == path.name == "stacks-1.txt"
    (line,) = info["restarts"]
    assert (line["number"], line["step"], line["cause"]) == (1, 7, "rank 1 was killed")
    assert "rank 1 was killed; restart 1 follows (see stacks-1.txt)" in (folder / "log.txt").read_text()
    record_failure(folder, "again", stacks="elsewhere", restart={"number": 2, "step": 9})
    assert len(json.loads((folder / "run.json").read_text())["restarts"]) == 2 and (folder / "stacks-2.txt").exists()


def test_what_a_run_said_of_its_own_error_is_kept(tmp_path):
    folder = opened(tmp_path, "ValueError: mine")
    record_failure(folder, "rank 0 ended with exit status 1", keep=True)
    assert json.loads((folder / "run.json").read_text())["error"] == "ValueError: mine"
    record_failure(folder, "rank 1 was killed")
    assert json.loads((folder / "run.json").read_text())["error"] == "rank 1 was killed"


def test_nothing_is_written_into_a_folder_that_is_finished_or_another_runs(tmp_path):
    with RunFolder.open(tmp_path, "exp", "trial", config_text="") as run:
        with pytest.raises(RunFolderInUse):
            record_failure(run.path, "not mine")
        run.finish("finished")
    assert record_failure(run.path, "not mine", stacks="none") is None
    assert json.loads((run.path / "run.json").read_text())["status"] == "finished"
