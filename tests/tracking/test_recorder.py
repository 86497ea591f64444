"""The record of a step: whole or not there, bounded, beside training; and read back as it was written."""

import json
import logging
import math
import os
import threading

import pytest
import torch
from tensordict import TensorDict

from tandem import load_batch, load_trajectories
from tandem.api.batch import unpack
from tandem.api.requests import RequestTiming, StopReason
from tandem.api.weights import WeightVersion
from tandem.api.workflow import Dropped, Group, Sample, Trajectory
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrackingConfig
from tandem.rollout.executor import collate
from tandem.tracking import records as recording
from tandem.tracking.record_files import recorded_steps
from tandem.tracking.records import StepRecorder
from tandem.tracking.tracker import Tracker

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
MESSAGES = (
    {"role": "user", "content": "3 + 4 = ü"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "1"},
    {"role": "assistant", "content": "\ud800 it is 7"},  # half a surrogate pair, as models write them
)


def trajectory(size, version=0):
    mask = torch.tensor([False] + [True] * (size - 1))
    versions = torch.where(mask, version, -1)
    return Trajectory(torch.arange(size), mask, torch.randn(size), versions, stop_reason=StopReason.LENGTH)


def sample(reward, size=4, **more):
    given = {"prompt_text": "3 + 4 = ü", "completion_text": "it is 7", "rewards": {"right": reward}}
    return Sample((trajectory(size), trajectory(size + 1)), reward=reward, **given | more)


def group(number, *samples, **more):
    return Group(samples or (sample(0.0), sample(1.0)), group_id=number, data={"answer": "7"}, **more)


def trained(groups):
    """The batch of these groups, with an advantage for each token."""
    batch = collate(groups, version=0, max_head_offpolicyness=0)
    return TensorDict({**dict(batch.items()), "advantages": torch.randn(len(batch["input_ids"]))}, batch_size=[])


def same(one, other):
    """To the bit, also where an accuracy is not known."""
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def record(folder, step, groups, *, dropped=(), per_step=None, gib=None):
    batch = trained(groups)
    recorder = StepRecorder(folder, per_step, gib)
    recorder.record(step, groups, batch, dropped, {0: WeightVersion(0, "digest")})
    recorder.close()
    return batch


def test_the_batch_is_read_back_to_the_bit(tmp_path):
    batch = record(tmp_path, 3, [group(0), group(1, sample(0.5, 9))])

    again = load_batch(tmp_path, 3)
    assert set(again.keys()) == set(batch.keys())
    assert all(same(again[name], batch[name]) for name in batch.keys())


def test_a_sample_is_read_back_with_its_turns_calls_judges_failures_and_times(tmp_path):
    timings = (RequestTiming(0.1, 0.2, 0.5), RequestTiming(math.nan, math.nan, 2.0))
    whole = sample(1.0, messages=MESSAGES, words={"style": "Score: 7"}, timings=timings, accuracy=1.0, answer="7")
    groups = [group(4, sample(0.0), whole, failures=("deadline",), failure_words=("deadline: not done after 3 s",))]
    batch = record(tmp_path, 2, groups)

    worst, best = sorted(load_trajectories(tmp_path, 2), key=lambda one: one.reward)
    assert best.messages == [*MESSAGES[:3], {"role": "assistant", "content": "? it is 7"}]
    assert (best.step, best.group, best.sample, best.sample_id) == (2, 4, 1, 1) and worst.sample_id == 0
    assert (best.reward, best.rewards, best.accuracy, best.answer, best.extracted_answer) == (1.0, {"right": 1}, 1, "7", "7")
    assert best.judges == {"style": "Score: 7"} and best.failures == ["deadline: not done after 3 s"]
    assert best.timings[0] == pytest.approx(timings[0]) and math.isnan(best.timings[1].queued_s)
    assert best.versions[0] == [{"version": 0, "tokens": 3, "digest": "digest"}] and best.dropped is None
    for one, sequence in zip(best.trajectories, unpack(batch)[2:], strict=True):
        assert all(same(one[name], sequence[name]) for name in sequence)
    own = torch.cat([one["advantages"][one["loss_mask"]] for one in best.trajectories])
    assert best.advantage == pytest.approx(float(own.mean()))


def test_some_samples_are_recorded_with_their_own_sequences_alone(tmp_path):
    groups = [group(0, sample(0.2), sample(0.9), sample(0.1)), group(1, sample(0.3), sample(0.4))]
    batch = record(tmp_path, 1, groups, per_step=2)

    found = list(load_trajectories(tmp_path, 1))
    assert [(one.group, one.sample, one.sample_id) for one in found] == [(0, 1, 1), (0, 2, 2)]  # the best and the worst
    again = load_batch(tmp_path, 1)
    assert again["sample_id"].tolist() == [1, 1, 2, 2]
    assert torch.equal(again["input_ids"], torch.cat([row["input_ids"] for row in unpack(batch)[2:6]]))


def test_dropped_prompts_are_recorded_with_their_reasons_a_few_of_each(tmp_path):
    easy = [Dropped("filter/no_spread", "", group(number, sample(1.0))) for number in range(5)]
    late = Dropped("deadline", "deadline: not done after 3 s", Group((), 9, data={"messages": [MESSAGES[0]]}))
    record(tmp_path, 1, [group(0)], dropped=[*easy, late], per_step=3)

    found = [one for one in load_trajectories(tmp_path, 1) if one.dropped]
    assert [(one.dropped, one.group) for one in found] == [("filter/no_spread", 0), ("deadline", 9), ("filter/no_spread", 1)]
    assert found[1].why == "deadline: not done after 3 s" and found[1].sample is None and found[1].reward is None
    assert found[1].messages == [MESSAGES[0]] and found[0].reward == 1.0 and found[0].trajectories == ()


def test_lines_are_json_of_the_standard_and_a_row_may_hold_anything(tmp_path):
    row = {"answer": {"odd": object(), "numbers": (1, 2)}}
    groups = [Group((sample(1.0),), 0, data=row)]
    record(tmp_path, 1, groups)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    (line,) = (tmp_path / "trajectories/step_1.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["answer"]["numbers"] == [1, 2]


def test_a_step_that_is_made_again_replaces_its_record(tmp_path):
    record(tmp_path, 1, [group(0)])
    batch = record(tmp_path, 1, [group(7)])

    assert {one.group for one in load_trajectories(tmp_path, 1)} == {7}
    assert torch.equal(load_batch(tmp_path, 1)["advantages"], batch["advantages"])


def test_the_oldest_records_make_room_within_the_budget(tmp_path):
    record(tmp_path, 1, [group(0)])
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    for step in range(2, 8):
        record(tmp_path, step, [group(step)], gib=3.5 * size / recording.GIB)
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 3.5 * size

    assert recorded_steps(tmp_path) == [5, 6, 7]
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == [
        f"step_{step}.safetensors.gz" for step in (5, 6, 7)
    ]


def test_a_step_that_no_budget_holds_is_left_out_with_one_warning(tmp_path, caplog):
    for step in (1, 2):
        record(tmp_path, step, [group(0)], gib=1e-9)

    assert recorded_steps(tmp_path) == []
    assert "more than tracking.trajectories_gib: it is not recorded" in caplog.text


LIMITED = """
import json, logging, resource, sys
from pathlib import Path
from tandem.config.experiment import TrackingConfig
from tandem.tracking import records
from tandem.tracking.tracker import Tracker
from tests.tracking.test_recorder import group, sample, trained
warned, failed = [], []
class Collects(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage()) if record.levelno >= logging.WARNING else None
logging.getLogger("tandem").addHandler(Collects())
put = records.StepRecorder._put
def witness(self, path, data):
    try:
        return put(self, path, data)
    except OSError as error:
        failed.append(error.strerror)
        raise
records.StepRecorder._put = witness
small, large = [group(0)], [group(1, sample(1.0, 20000))]
with Tracker(Path(sys.argv[1]), TrackingConfig(plot_every_steps=None), progress=False) as tracker:
    tracker.log(1, {"loss": 1.0}, small, batch=trained(small))
    tracker.state_dict()
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
    tracker.log(2, {"loss": 1.0}, large, batch=trained(large))
    tracker.state_dict()
    tracker.log(3, {"loss": 1.0}, small, batch=trained(small))
print(json.dumps([warned, failed]))
"""


def test_a_full_disk_stops_recording_and_not_training_with_one_warning(tmp_path, zygote):
    done = zygote.run(LIMITED, tmp_path, log=tmp_path / "said")
    assert done.returncode == 0, done.stdout
    (warning,), failed = json.loads(done.stdout.splitlines()[-1])
    assert failed == ["File too large"]  # the fault did happen
    assert warning.startswith("step 2 could not be recorded: ") and "Recording stops here, training goes on" in warning
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3] and recorded_steps(tmp_path) == [1]
    assert [path.name for path in (tmp_path / "batches").iterdir()] == ["step_1.safetensors.gz"]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from tandem.tracking import records
from tests.tracking.test_recorder import record, group
if sys.argv[2] == "half":  # killed while a file is written
    os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
else:  # killed between the two files
    replace = os.replace
    def once(source, target):
        replace(source, target)
        os.kill(os.getpid(), signal.SIGKILL)
    os.replace = once
record(Path(sys.argv[1]), 5, [group(1)])
"""


@pytest.mark.parametrize("moment", ["half", "between"])
def test_a_kill_leaves_a_whole_record_or_none(tmp_path, moment, zygote):
    record(tmp_path, 5, [group(0)])
    record(tmp_path, 4, [group(0)])
    done = zygote.run(KILLED, tmp_path, moment, log=tmp_path / "said")
    assert done.returncode == -9
    assert recorded_steps(tmp_path) == [4]  # never the old lines with new tensors, nor half of either
    assert len(list((tmp_path / "batches").iterdir())) == 2

    batch = record(tmp_path, 5, [group(2)])
    assert recorded_steps(tmp_path) == [4, 5] and torch.equal(load_batch(tmp_path, 5)["advantages"], batch["advantages"])
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == [
        "step_4.safetensors.gz", "step_5.safetensors.gz",
    ]  # fmt: skip


def test_a_disk_that_is_slower_than_training_costs_records_and_not_time(tmp_path, monkeypatch, caplog):
    slow, fsync = threading.Event(), os.fsync

    def waits(file):
        slow.wait(30)
        fsync(file)

    monkeypatch.setattr(os, "fsync", waits)
    recorder, groups = StepRecorder(tmp_path, None, None), [group(0)]
    with caplog.at_level(logging.WARNING):
        for step in range(1, 9):  # would hang here if it waited for the disk
            recorder.record(step, groups, trained(groups), (), {})
    slow.set()
    recorder.close()

    assert 1 <= len(recorded_steps(tmp_path)) <= recording.QUEUED_STEPS + 1
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == ["the disk is slower than training"]


def test_a_run_that_goes_on_forgets_the_records_of_steps_that_are_made_again(tmp_path):
    def log(tracker, *steps):
        for step in steps:
            tracker.log(step, {"loss": 1.0}, [group(step)], batch=trained([group(step)]))

    config = TrackingConfig(plot_every_steps=None)
    with Tracker(tmp_path, config, progress=False) as tracker:
        log(tracker, 1, 2)
        state = tracker.state_dict()
        assert recorded_steps(tmp_path) == [1, 2]  # a checkpoint waits for them
        log(tracker, 3, 4)
    with Tracker(tmp_path, config, progress=False) as tracker:
        tracker.load_state_dict(state)
        assert recorded_steps(tmp_path) == [1, 2]
        log(tracker, 3)
    assert recorded_steps(tmp_path) == [1, 2, 3]

    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.lost-1.jsonl")  # cut off before its first checkpoint
    Tracker(tmp_path, config, progress=False).close()
    assert recorded_steps(tmp_path) == []


def test_reading_says_which_steps_there_are(tmp_path):
    for step in (2, 5, 9):
        record(tmp_path, step, [group(step)])

    assert [one.step for one in load_trajectories(tmp_path)] == [2, 2, 5, 5, 9, 9]
    with pytest.raises(ConfigError, match=r"no record of step 6; it has 3 steps from 2 to 9, the nearest 2, 5, 9"):
        load_trajectories(tmp_path, 6)
    with pytest.raises(ConfigError, match="has no recorded step: it is not a run folder"):
        load_trajectories(tmp_path / "batches")
    with pytest.raises(ConfigError, match="there is no folder"):
        load_batch(tmp_path / "nowhere", 1)
