"""A rank dies while rank 0 writes a checkpoint beside training: it is finished where the time allows."""

import sys
import time

import pytest

from tandem.launch.local import Patience, run_ranks
from tandem.launch.rank import LAST_S
from tandem.state.checkpoint import newest_valid
from tandem.state.existing import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.invariant]


@pytest.mark.parametrize(
    ("takes_s", "saved"), [(Patience.fail_s + 2, ["step_1", "step_2"]), (600, ["step_1"])], ids=["finished", "given up"]
)
def test_a_save_that_can_be_finished_in_time_outlives_another_rank(takes_s, saved, model, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "tandem/dying"
    items = [f"run.root={tmp_path}", "trial_name=dying", f"actor.path={model}", "actor.dtype=float32", "threads=1"]
    items += ["train_dataset.path=addition", "batch_size=4", "actor.backend=fsdp:d2", "total_train_steps=100000"]
    items += ["checkpoint.every_steps=1", "checkpoint.keep_last=null"]
    command = [sys.executable, "-m", "tests.trainers.dying_beside_a_save", str(folder), str(takes_s), "sft", *items]
    assert run_ranks(command, 2) == 1
    lasted = time.time() - float((folder / "died").read_text())  # the fault did happen
    assert takes_s == 600 or lasted > 2
    assert lasted < Patience.fail_s + Patience.term_s  # by itself: nobody had to kill it, which takes longer
    assert (folder / "left").exists()
    assert not (folder / "curves.png").exists()  # a picture would take the time that is left
    assert [path.name for path in checkpoints(folder / "checkpoints")] == saved
    assert newest_valid(folder / "checkpoints", None).path.name == saved[-1]
    said = (folder / "log.txt").read_text()
    assert ("is left unfinished: the time to finish it is over" in said) == (takes_s == 600)
    assert takes_s == 600 or takes_s < Patience.fail_s + Patience.term_s - LAST_S
