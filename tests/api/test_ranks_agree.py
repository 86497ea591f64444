"""A failure of one rank is known to all at once: collective results, saving, publishing."""

import contextlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tandem.api.failures import EngineDied, RankFailed
from tandem.api.team import Team
from tandem.config.errors import ConfigError, TandemError
from tandem.config.experiment import CheckpointConfig, RunConfig, SFTConfig
from tandem.flow.process import Process
from tandem.state.checkpoint import CheckpointFailed, save_checkpoint
from tandem.state.run_folder import RunFolder
from tandem.trainers.start import open_run
from tandem.weights.channel import LocalChannel
from tandem.weights.publisher import WeightPublisher
from tests.engines_train.steps import engine_on
from tests.ranks import finish, start
from tests.rollout.clockwork import ClockworkEngine
from tests.tiny import tiny_model_folder


def test_alone_everything_is_a_plain_call():
    assert Team().share(lambda: 3) == 3
    with pytest.raises(KeyError), Team().together():
        raise KeyError("mine")
    stream = iter(range(3))

    def read_one():
        with Team().whole(stream) as numbers:
            next(numbers)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        read_one()
    assert list(stream) == [1, 2]  # nobody else takes part


class FullChannel(LocalChannel):
    """Has no room left after the first tensor."""

    def put(self, named_tensors, dtype):
        next(iter(named_tensors))
        raise OSError(28, "No space left on device")


class DyingEngine(ClockworkEngine):
    def prepare_weights(self, update):
        raise EngineDied("it was killed")


def refuse(kind):
    raise kind("it is the main rank's fault")


def main_fails(rank, kind):
    with Team().together():
        if rank == 0:
            refuse(kind)


def open_and_close(config, process):
    with contextlib.ExitStack() as stack:
        open_run(config, process, stack, steps=1)


def seen(action):
    """What an action raised: type, message and seconds."""
    began = time.monotonic()
    try:
        action()
    except TandemError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    except OSError as error:
        return "OSError", str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def one_rank(rank, out, folder):
    """Every way of failing, one after another: the group must be in order again after each."""
    torch.set_num_threads(1)
    file = f"file://{out}/rendezvous"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    engine = engine_on(folder, ranks=2)
    run = RunFolder.open(out, "exp", "trial", config_text="") if rank == 0 else None
    found = {
        "result": seen(lambda: Team().share(lambda: refuse(OSError))),
        "told": seen(lambda: Team().share(lambda: refuse(ConfigError))),
        "block": seen(lambda: main_fails(rank, OSError)),
    }

    unusable = Path(out) / "exp" / "unusable"
    if rank == 0:  # what a run left that failed before its first step may be used again
        (unusable / "metrics.jsonl").mkdir(parents=True)
        (unusable / "run.json").write_text('{"status": "failed"}')
    config = SFTConfig(experiment_name="exp", trial_name="unusable", run=RunConfig(root=str(out)))
    found["tracker"] = seen(lambda: open_and_close(config, Process("cpu", threads=1, rank=rank, world_size=2)))
    if rank == 0:
        assert "IsADirectoryError" in json.loads((unusable / "run.json").read_text())["error"]

    def tokenizer(folder):
        raise OSError(28, "No space left on device")

    found["tokenizer"] = seen(
        lambda: save_checkpoint(Team(), run, 1, engine.save, tokenizer, CheckpointConfig(keep_last=None))
    )
    locked = Path(out) / "file"
    locked.write_text("")
    found["folder"] = seen(lambda: engine.save(locked / "below"))  # only rank 0 writes, so only it fails
    if run is not None:
        run.checkpoints.rmdir()
        run.checkpoints.write_text("a file where the folder should be")
    found["unwritable"] = seen(
        lambda: save_checkpoint(Team(), run, 2, engine.save, lambda path: None, CheckpointConfig(keep_last=None))
    )
    if run is not None:
        run.checkpoints.unlink()

    def mine_is_refused(folder):
        engine.save(folder)
        if rank == 1:
            refuse(OSError)

    found["other"] = seen(
        lambda: save_checkpoint(Team(), run, 2, mine_is_refused, lambda path: None, CheckpointConfig(keep_last=None))
    )
    for name, engines, channel in (
        ("channel", [ClockworkEngine()], FullChannel()),
        ("engine", [DyingEngine()], None),
    ):
        publisher = WeightPublisher(
            engine, engines if rank == 0 else [], run="t", dtype=torch.float32, channel=channel if rank == 0 else None
        )
        found[name] = seen(publisher.publish)
    assert Team().share(lambda: 7) == 7
    path = save_checkpoint(Team(), run, 3, engine.save, lambda path: None, CheckpointConfig(keep_last=None))
    assert (path is None) == (rank == 1)
    torch.save(found, f"{out}/{rank}.pt")
    if run is not None:
        assert sorted(os.listdir(run.checkpoints)) == ["step_3"]
        run.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    finish(start(one_rank, (str(out), tiny_model_folder(out)), 2))
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(
    ("name", "on_the_other", "words"),
    [
        ("result", RankFailed, "rank 0 failed: OSError: it is the main rank's fault"),
        ("told", ConfigError, "it is the main rank's fault"),
        ("block", RankFailed, "rank 0 failed: OSError: it is the main rank's fault"),
        ("tracker", RankFailed, "rank 0 failed: IsADirectoryError"),
        ("tokenizer", CheckpointFailed, "step 1 could not be saved"),
        ("folder", RankFailed, "NotADirectoryError"),
        ("unwritable", CheckpointFailed, "step 2 could not be saved"),
        ("other", "OSError", "it is the main rank's fault"),
        ("channel", "WeightUpdateFailed", "No space left on device"),
        ("engine", EngineDied, "it was killed"),
    ],
)
def test_what_fails_on_rank_0_ends_the_other_within_seconds_with_the_cause(ranks, name, on_the_other, words):
    main, other = (rank[name] for rank in ranks)
    assert other[0] == getattr(on_the_other, "__name__", on_the_other)
    for kind, message, seconds in (main, other):
        assert kind != "nothing"
        assert words.rpartition("Error: ")[2] in message or kind == "OSError"
        assert seconds < 20
    assert words in other[1]
