"""Saves beside training: the files of a save that is waited for, one at a time, and an end that waits."""

import threading
import time

import pytest
import torch

from tandem.api.failures import NotWritten
from tandem.api.team import Team
from tandem.config.experiment import SFTConfig
from tandem.config.load import load_config
from tandem.config.train_engine import ActorConfig, CriticConfig
from tandem.flow.session import CRITIC_FOLDER, Models
from tandem.lifecycle.oversight import Leaving
from tandem.lifecycle.recovery import Progress, Recovery
from tandem.lifecycle.saving import Saving
from tandem.roles.critic import Critic
from tandem.state.checkpoint import CheckpointFailed
from tandem.state.run_folder import RunFolder
from tandem.state.snapshot import Snapshots
from tests.engines_train.steps import engine_on, random_batch
from tests.tiny import tiny_tokenizer


def learn(engine, seed):
    """One step that moves the weights, whatever the head."""

    def loss(outputs, view):
        values = outputs.logprobs if outputs.scores is None else outputs.scores
        return -values * view["loss_mask"], {}

    engine.train_batch(random_batch([5, 9, 4], seed=seed), loss)


class Run:
    """A run of an engine, with saves after each of ten steps."""

    def __init__(self, root, model, asynchronous, trial, head="lm", on_error="stop", from_copy=True):
        """``from_copy``: the engine can be written from a copy of its state."""
        items = ["train_dataset.path=addition", "checkpoint.every_steps=1", "checkpoint.keep_last=null"]
        items += [f"checkpoint.on_error={on_error}"]
        self.config = load_config(SFTConfig, None, [*items, f"checkpoint.asynchronous={asynchronous}".lower()]).config
        self.engine = engine_on(model, dtype="bfloat16", head=head)
        self.folder = RunFolder.open(root, "exp", trial, config_text="")
        self.progress, self.may_write = Progress(), threading.Event()
        self.may_write.set()
        self.refusal = None  # what the disk says to a save
        parts = {"progress": self.progress, "trainer": self.engine}
        recovery = Recovery(self.folder, parts, self.progress, Team())
        late = lambda states: self.engine.late_writer(states["trainer"]) if from_copy else None  # noqa: E731
        self.saving = Saving(self.config.checkpoint, self.folder, 10, self.engine.save, self.tokenizer, recovery, late)

    def tokenizer(self, folder):
        assert self.may_write.wait(20)
        if self.refusal is not None:
            raise self.refusal
        (folder / "tokenizer.json").write_text("{}")

    def step(self):
        self.progress.step += 1
        learn(self.engine, self.progress.step)

    def after_step(self):
        if self.saving.is_due(self.progress.step):
            self.saving.save(self.progress.step, {"loss": float(self.progress.step)})

    def files(self, step):
        folder = self.folder.checkpoints / f"step_{step}"
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def __enter__(self):
        self.saving.__enter__()
        return self

    def __exit__(self, *error):
        try:
            self.saving.__exit__(*error)
        finally:
            self.folder.close()


@pytest.mark.parametrize("head", ["lm", "scalar", "both"])
def test_beside_training_the_same_files_are_written_while_the_weights_move_on(model, tmp_path, head):
    found = []
    for asynchronous in (False, True):
        torch.manual_seed(0)
        with Run(tmp_path, model, asynchronous, f"asynchronous-{asynchronous}", head) as run:
            run.step()
            if asynchronous:
                run.may_write.clear()  # nothing is complete before the weights have moved
            run.after_step()
            if asynchronous:
                run.step()
                assert not (run.folder.checkpoints / "step_1").exists()
                run.may_write.set()
                assert run.saving.finish() == run.folder.checkpoints / "step_1"
            found.append(run.files(1))
    one, two = found
    assert one.keys() == two.keys() and len(one) >= 5
    assert [name for name in one if name != "state/manifest.json" and one[name] != two[name]] == []


def test_a_second_save_waits_for_the_first_and_says_how_long(model, tmp_path):
    with Run(tmp_path, model, True, "trial") as run:
        run.step()
        run.may_write.clear()
        run.after_step()
        assert run.saving.metrics() == {}
        run.step()
        timer = threading.Timer(0.3, run.may_write.set)
        timer.start()
        run.after_step()
        assert (run.folder.checkpoints / "step_1").is_dir()
        seconds = run.saving.metrics()
        assert 0.2 < seconds["time/save_wait_s"] < 10 and seconds["time/save_background_s"] > 0.2
        timer.join()
    assert sorted(path.name for path in run.folder.checkpoints.iterdir()) == ["step_1", "step_2"]


def test_a_save_that_failed_is_raised_at_the_next_step_and_the_one_before_stays(model, tmp_path):
    with Run(tmp_path, model, True, "trial") as run:
        run.step()
        run.after_step()
        run.saving.finish()
        run.refusal = OSError(28, "No space left on device")
        run.step()
        run.after_step()  # it says nothing yet: the thread writes
        deadline = time.monotonic() + 20
        while run.saving.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        run.step()
        with pytest.raises(CheckpointFailed, match=r"step 2 could not be saved: .*No space left.*step_1") as caught:
            run.after_step()
        assert isinstance(caught.value.__cause__, OSError)
        assert sorted(path.name for path in run.folder.checkpoints.iterdir()) == ["step_1"]
        run.refusal = None
        run.after_step()  # whoever goes on saves again
    assert sorted(path.name for path in run.folder.checkpoints.iterdir()) == ["step_1", "step_3"]


@pytest.mark.parametrize("error", [Leaving, KeyboardInterrupt])
def test_whoever_leaves_waits_for_what_is_being_written_and_who_cannot_wait_does_not(model, tmp_path, error):
    def interrupted(run):
        with run:
            run.step()
            run.may_write.clear()
            run.after_step()
            if error is Leaving:
                threading.Timer(0.2, run.may_write.set).start()
            raise error

    run = Run(tmp_path, model, True, "trial")
    with pytest.raises(error):
        interrupted(run)
    assert run.saving.busy == (error is KeyboardInterrupt)
    run.may_write.set()
    run.saving.finish()  # the thread is of this process, which goes on
    assert [path.name for path in run.folder.checkpoints.iterdir()] == ["step_1"]


@pytest.mark.parametrize("wish", ["continue", "stop"])
def test_what_a_disk_refuses_during_a_checkpoint_is_tried_again_if_training_goes_on(model, tmp_path, wish):
    refusals = [NotWritten("no space")]
    written = []

    def write():
        if refusals:
            raise refusals.pop()
        written.append((run.folder.checkpoints / "step_1").is_dir())

    with Run(tmp_path, model, True, "trial", on_error=wish) as run:
        run.step()
        run.may_write.clear()
        run.after_step()
        threading.Timer(0.2, run.may_write.set).start()
        if wish == "stop":
            with pytest.raises(NotWritten):
                run.saving.persist(write)
            return
        run.saving.persist(write)
        assert written == [True]
        refusals.append(NotWritten("no space"))
        with pytest.raises(NotWritten):  # nothing is being written that could give space back
            run.saving.persist(write)


def test_an_engine_that_cannot_be_written_from_a_copy_is_waited_for(model, tmp_path, caplog):
    with caplog.at_level("INFO", "tandem"), Run(tmp_path, model, True, "trial", from_copy=False) as run:
        run.step()
        run.after_step()
        assert not run.saving.busy and (run.folder.checkpoints / "step_1").is_dir()
        assert run.saving.snapshots.num_bytes == 0
    assert "training waits for each save: these models cannot be written from a copy" in caplog.text


def test_the_last_save_of_a_run_is_written_at_once(model, tmp_path):
    with Run(tmp_path, model, True, "trial") as run:
        run.progress.step = 9
        run.step()
        run.after_step()
        assert run.saving.snapshots.num_bytes == 0 and run.saving.checkpoint.name == "step_10"


def test_a_critic_of_its_own_is_written_too(model, tmp_path):
    actor, value = engine_on(model, dtype="bfloat16"), engine_on(model, dtype="bfloat16", head="scalar")
    models = Models(actor, Critic(value, CriticConfig(), ActorConfig()), tiny_tokenizer())
    copy = Snapshots(Team()).take({"trainer": actor.state_dict(), "critic": models.critic.state_dict()})
    models.save(tmp_path / "now")
    for engine in (actor, value):
        learn(engine, 1)
    models.late_writer(copy)(tmp_path / "later")

    now, later = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "now", tmp_path / "later")
    )
    assert now == later and f"{CRITIC_FOLDER}/model.safetensors" in {str(path) for path in later}
