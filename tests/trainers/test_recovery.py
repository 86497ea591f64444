"""What a run goes on from, and what it refuses to go on from: with small parts in place of engines."""

import logging

import pytest

from tandem.api.team import Team
from tandem.config.errors import ConfigError
from tandem.config.experiment import CheckpointConfig
from tandem.lifecycle.recovery import DurableLedger, Progress, Recovery
from tandem.rollout.gate import Ledger, PromptId
from tandem.state.checkpoint import NothingToResume, save_checkpoint
from tandem.state.existing import existing_run
from tandem.state.ledger import FILE, LedgerDamaged, LedgerFile
from tandem.state.resuming import Going
from tandem.state.run_folder import RunFolder
from tandem.state.tree import StateDamaged


class Counter:
    """A part with a number."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if state["value"] < 0:
            raise ConfigError("numbers below 0 are another model's")
        self.value = state["value"]


class Run:
    """A run of a counter and a ledger: each step adds one and trains two prompts."""

    def __init__(self, root, parts=("counter",)):
        def goes_on(folder):
            found = existing_run(folder)
            return None if found is None else Going(found)

        self.run = RunFolder.open(root, "exp", "trial", config_text="", examine=goes_on)
        self.counter, self.ledger, progress = Counter(), Ledger(), Progress()
        self.file = LedgerFile(self.run.path / FILE)
        self.durable = DurableLedger(self.ledger, self.file, progress)
        own = {"progress": progress, "ledger": self.durable} | dict.fromkeys(parts, self.counter)
        self.recovery = Recovery(self.run, own, progress, Team(), ledger=self.durable)
        try:
            self.gone_on_from = self.recovery.resume()
        except BaseException:
            self.leave()
            raise

    def step(self):
        number = self.recovery.progress.step + 1
        self.counter.value += 1
        for index in (2 * number, 2 * number + 1):
            for state in ("running", "waiting", "taken", "trained"):
                self.ledger.move(PromptId(0, index), state)
        self.recovery.commit(number)
        with (self.run.path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {number}}}\n')

    def save(self):
        step = self.recovery.progress.step
        return save_checkpoint(
            Team(),
            self.run,
            step,
            lambda folder: (folder / "config.json").write_text("{}"),
            lambda folder: None,
            CheckpointConfig(keep_last=None),
            write_state=self.recovery.write,
        )

    def leave(self):
        """As a kill does: nothing is said."""
        self.file.close()
        self.run.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.leave()


@pytest.fixture
def cut_off(tmp_path):
    """Three steps, saved after the first two; the third is lost."""
    with Run(tmp_path) as run:
        for saves in (True, True, False):
            run.step()
            if saves:
                run.save()
    return tmp_path


def test_a_run_goes_on_from_the_newest_with_parts_progress_and_ledger(cut_off):
    with Run(cut_off) as run:
        assert run.gone_on_from.name == "step_2" and run.recovery.progress.step == 2
        assert run.counter.value == 2 and run.ledger.total("trained") == 4
        assert run.file.records == 4  # the two of the third step end again
        run.step()
        assert run.file.records == 6


def test_a_run_without_a_name_takes_it_from_its_checkpoint(cut_off):
    path = cut_off / "exp/trial"
    before = existing_run(path).id
    (path / "run.json").write_text('{"id": "exp/tr')
    with Run(cut_off) as run:
        assert run.run.id == before == existing_run(path).id and run.counter.value == 2


def test_what_is_damaged_is_said_set_aside_and_saved_again(cut_off, caplog):
    checkpoints = cut_off / "exp/trial/checkpoints"
    (checkpoints / "step_2/config.json").write_text("{ }")
    with caplog.at_level(logging.WARNING, "tandem"), Run(cut_off) as run:
        assert "step_2 is torn: config.json has 3 of 2 bytes; it is skipped, and its folder renamed" in caplog.text
        assert run.counter.value == 1 and run.ledger.total("trained") == run.file.records == 2
        run.step()
        assert run.save().name == "step_2" and (checkpoints / "step_2.skipped").is_dir()
    with Run(cut_off) as run:
        assert run.counter.value == 2


def test_another_runs_checkpoint_is_foreign(cut_off, tmp_path_factory, caplog):
    with Run(tmp_path_factory.mktemp("other")) as other:
        for _ in range(5):
            other.step()
        other.save().rename(cut_off / "exp/trial/checkpoints/step_5")
    with caplog.at_level(logging.WARNING, "tandem"), Run(cut_off) as run:
        assert run.counter.value == 2
    assert "step_5 is foreign: made by the run exp/trial/" in caplog.text


def test_where_none_is_whole_the_run_stops_and_changes_nothing(cut_off):
    folder = cut_off / "exp/trial"
    for step in (1, 2):
        (folder / f"checkpoints/step_{step}/state/state.json").unlink()
    before = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    with pytest.raises(NothingToResume, match=r"step_2 lacks state/state\.json; step_1 lacks"):
        Run(cut_off)
    assert before == {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}


def test_a_ledger_that_is_gone_stops_the_run(cut_off):
    path = cut_off / "exp/trial" / FILE
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(LedgerDamaged, match=r"has 0 prompts .*saved with 4 .*Restore that file"):
        Run(cut_off)
    path.write_bytes(kept)
    with Run(cut_off) as run:
        assert run.counter.value == 2


def test_a_part_that_is_new_or_of_another_model_stops_the_run(cut_off):
    with pytest.raises(
        StateDamaged, match=r"step_2 has no state of 'critic'; it has combination, counter, ledger, progress"
    ):
        Run(cut_off, parts=("counter", "critic"))
    with Run(cut_off) as run:
        run.step()
        run.counter.value = -1
        run.save()
    with pytest.raises(ConfigError, match="step_3 does not fit this run: numbers below 0 are another model's"):
        Run(cut_off)


def test_before_the_first_checkpoint_the_ledger_begins_anew_too(tmp_path, caplog):
    with Run(tmp_path) as run:
        run.step()
    with caplog.at_level(logging.WARNING, "tandem"), Run(tmp_path) as again:
        assert again.gone_on_from is None and again.file.records == 0 and again.counter.value == 0
        again.step()
    assert "begins anew at step 0, and the metrics up to step 1 are set aside" in caplog.text


def test_what_a_killed_save_left_is_gone_as_soon_as_the_run_is_started_again(cut_off, caplog):
    left = cut_off / "exp/trial/checkpoints/.step_3.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with caplog.at_level(logging.WARNING, "tandem"), Run(cut_off):
        assert not left.exists() and "removing .step_3.partial" in caplog.text


def test_the_new_configuration_is_written_once_the_run_really_goes_on(cut_off):
    config = cut_off / "exp/trial/config.yaml"
    config.write_text("seed: 1\n")
    with pytest.raises(StateDamaged):
        Run(cut_off, parts=("counter", "critic"))
    assert config.read_text() == "seed: 1\n"  # what was refused is not there
    with Run(cut_off):
        assert config.read_text() == ""
