"""`tandem launch`: the batch script as text, and the supervisor on plain processes."""

import stat

import pytest

from tandem.cli.main import main

WORDS = ["actor.backend=fsdp:d4", "train_dataset.path=addition"]


def test_the_batch_script_has_the_shape_of_the_job_and_no_secret(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "very-secret")
    words = [*WORDS, f"run.root={tmp_path}", "--nodes", "2", "--time", "10", "--sbatch", "gpus-per-node=2", "--dry-run"]
    assert main(["launch", "slurm", *words]) == 0
    said = capsys.readouterr().out
    lines = ["nodes=2", "ntasks=4", "ntasks-per-node=2", "time=10", "gpus-per-node=2", "signal=B:TERM@120", "requeue"]
    assert [line for line in lines if f"#SBATCH --{line}\n" not in said] == []
    assert "very-secret" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slurm", *WORDS, "--nodes", "3"], "--nodes 3: 4 ranks"),
        (["local", *WORDS, "--nodes", "2"], "--nodes is an option of tandem launch slurm, not of local"),
        (["slurm", *WORDS, "--array", "seed=1", "--array", "seed=2"], "the same run"),
        (["local", *WORDS, "--machines", "2"], "several machines need all of"),
        (["slrum", *WORDS], "there is no launcher 'slrum'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words, told, capsys):
    assert main(["launch", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_script_that_fails_on_one_rank_ends_all_and_is_quoted(tmp_path, capfd):
    script = tmp_path / "mine.py"
    script.write_text("import os, sys, time\nsys.exit('no gradient') if os.environ['RANK'] == '1' else time.sleep(600)\n")
    words = ["actor.backend=fsdp:d2", "train_dataset.path=addition", f"run.root={tmp_path}"]
    assert main(["launch", "local", str(script), *words]) == 1
    said = capfd.readouterr().err
    assert "rank 1 failed first" in said and "no gradient" in said
    (log,) = tmp_path.glob("tandem/trial/launch/attempt-1/rank-0.log")
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
