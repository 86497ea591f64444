"""What a tracker writes, and that nothing but metrics.jsonl can stop a run."""

import io
import json
import logging
import math
from dataclasses import replace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.api.weights import WeightVersion
from tandem.api.workflow import Group, Sample, Trajectory
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrackingConfig
from tandem.config.services import SERVICES, Service
from tandem.tracking.tracker import ProgressDisplay, Tracker, duration, line

PNG = b"\x89PNG\r\n\x1a\n"


def tracker(folder, **options):
    return Tracker(folder, TrackingConfig(**options), total_steps=20, run_name="exp/trial", progress=False)


def lines(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def sample(reward, versions=(0, 0)):
    size = len(versions) + 1
    return Sample(
        (
            Trajectory(
                torch.arange(size),
                torch.tensor([False] + [True] * len(versions)),
                torch.zeros(size),
                torch.tensor([-1, *versions]),
            ),
        ),
        reward=reward,
        rewards={"format": 1.0},
        prompt_text="3 + 4 = ü",
        completion_text=f"answer {reward}",
    )


def test_each_step_is_one_line_and_what_is_not_finite_is_null(tmp_path):
    with tracker(tmp_path) as track:
        track.log(1, {"reward/mean": 0.5, "loss": torch.tensor(2.0), "gap/max": math.nan, "grad_norm": math.inf})
        track.log(2, {"reward/mean": 1})

    first, second = lines(tmp_path / "metrics.jsonl")
    assert {key: first[key] for key in first if key != "time"} == {
        "step": 1, "reward/mean": 0.5, "loss": 2.0, "gap/max": None, "grad_norm": None,
    }  # fmt: skip
    assert second["step"] == 2 and second["time"] >= first["time"]
    assert track.last["reward/mean"] == 1.0 and track.last["loss"] == 2.0


def test_a_line_is_readable_as_soon_as_it_is_logged(tmp_path):
    with tracker(tmp_path) as track:
        track.log(1, {"loss": 1.0})
        assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_samples_are_written_with_text_reward_and_the_weights_that_made_them(tmp_path):
    group = Group((sample(0.5), sample(0.0, (1, 1, 2)), sample(1.0)), group_id=7, source="sums", data={"answer": "7"})
    history = {number: WeightVersion(number, f"digest{number}") for number in range(3)}
    with tracker(tmp_path, trajectories_per_step=2) as track:
        track.log(4, {}, [group], history)

    best, worst = lines(tmp_path / "trajectories" / "step_4.jsonl")
    assert (best["reward"], worst["reward"]) == (1.0, 0.0)
    assert worst["versions"] == [
        [{"version": 1, "tokens": 2, "digest": "digest1"}, {"version": 2, "tokens": 1, "digest": "digest2"}]
    ]
    assert (worst["group"], worst["sample"], worst["source"], worst["answer"]) == (7, 1, "sums", "7")
    assert (worst["prompt"], worst["completion"], worst["tokens"]) == ("3 + 4 = ü", "answer 0.0", 3)
    assert (worst["rewards"], worst["stop_reason"]) == ({"format": 1.0}, ["stop"])


@pytest.mark.parametrize(("count", "expected"), [(0, None), (1, 1), (3, 3), (9, 4)])
def test_no_more_samples_than_asked_for(tmp_path, count, expected):
    with tracker(tmp_path, trajectories_per_step=count) as track:
        track.log(1, {}, [Group((sample(0.0), sample(1.0))), Group((sample(0.0), sample(1.0)))])

    path = tmp_path / "trajectories" / "step_1.jsonl"
    assert (len(lines(path)) if path.exists() else None) == expected


def test_pictures_are_drawn_every_so_many_steps_and_at_the_end(tmp_path):
    with tracker(tmp_path, plot_every_steps=2) as track:
        track.log(1, {"reward/mean": 0.1, "loss": 1.0})
        assert not (tmp_path / "reward.png").exists()
        track.log(2, {"reward/mean": 0.2, "loss": math.nan, "eval/accuracy": 0.5})
        drawn = (tmp_path / "reward.png").read_bytes()
        track.log(3, {"reward/mean": 0.9, "loss": 0.5})

    assert drawn.startswith(PNG) and (tmp_path / "curves.png").read_bytes().startswith(PNG)
    assert (tmp_path / "reward.png").read_bytes() != drawn
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_no_pictures_are_drawn_where_nobody_wants_any(tmp_path):
    with tracker(tmp_path, plot_every_steps=None) as track:
        track.log(1, {"reward/mean": 0.1, "loss": 1.0})

    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".png"] == []


def test_a_run_without_rewards_has_no_picture_of_them(tmp_path):
    with tracker(tmp_path) as track:
        track.log(1, {"loss": 1.0})

    assert (tmp_path / "curves.png").exists() and not (tmp_path / "reward.png").exists()


def test_a_picture_that_cannot_be_drawn_is_warned_of_once_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "reward.png").mkdir()  # cannot be replaced by a file
    with caplog.at_level(logging.WARNING), tracker(tmp_path, plot_every_steps=1) as track:
        for step in (1, 2, 3):
            track.log(step, {"reward/mean": 0.5})

    assert len(lines(tmp_path / "metrics.jsonl")) == 3
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "reward.png failed, training goes on without it"
    ]


class Breaks:
    def __init__(self, run):
        self.calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise ConnectionError("the server is away")

    def close(self):
        raise AssertionError("a broken sink is not used again")


def test_a_sink_that_fails_is_left_out_from_then_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(SERVICES["sink"], "breaks", Service("sink", "breaks", f"{__name__}:Breaks"))
    with caplog.at_level(logging.WARNING), tracker(tmp_path, sinks=("breaks",)) as track:
        track.log(1, {"loss": 1.0})
        track.log(2, {"loss": 1.0})

    assert len(lines(tmp_path / "metrics.jsonl")) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "sink breaks failed, training goes on without it: ConnectionError: the server is away"
    ]


def test_tensorboard_gets_the_finite_metrics(tmp_path):
    with tracker(tmp_path, sinks=("tensorboard",)) as track:
        track.log(1, {"reward/mean": 0.25, "loss": math.nan})
        track.log(2, {"reward/mean": 0.5, "loss": 1.0})

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [event.step for event in events.Scalars("loss")] == [2]


def test_a_sink_that_does_not_exist_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        tracker(tmp_path, sinks=("tensorbord",))
    assert list(tmp_path.iterdir()) == []


def test_a_sink_that_is_not_installed_says_what_to_install(tmp_path, monkeypatch):
    record = replace(SERVICES["sink"]["wandb"], package="a_package_that_is_not_there")
    monkeypatch.setitem(SERVICES["sink"], "wandb", record)

    with pytest.raises(ConfigError, match=r"-m pip install -e '.*\[wandb\]'"):
        tracker(tmp_path, sinks=("wandb",))


def test_metrics_that_cannot_be_written_do_end_the_run(tmp_path):
    with pytest.raises(OSError, match="metrics"):
        tracker(tmp_path / "missing")


def test_damaged_lines_of_metrics_are_told_and_kept_aside_when_a_run_goes_on(tmp_path, caplog):
    with Tracker(tmp_path, TrackingConfig(), progress=False) as tracker:
        for step in range(1, 7):
            tracker.log(step, {"loss": step})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[1], lines[2], lines[3] = "\0\0\0", '{"step": "3", "loss": 1}', '{"step": 4, "loss": ["x"]}'
    path.write_text("\n".join([*lines, '{"step": 7, "lo']))
    harmed = path.read_bytes()
    with Tracker(tmp_path, TrackingConfig(), progress=False) as tracker:
        tracker.load_state_dict({"step": 5})
        assert tracker.series["loss"] == [(1, 1.0), (5, 5.0)] and tracker.last == {"loss": 5.0}
        tracker.load_state_dict({"step": 5})
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{path}: 3 damaged lines, the first is line 2" in told and "metrics.damaged-1.jsonl" in told
    assert (tmp_path / "metrics.damaged-1.jsonl").read_bytes() == harmed
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 5]


def test_a_step_in_one_line():
    metrics = {
        "reward/mean": 0.5,
        "loss": 0.1,
        "completion_length/mean": 20.4,
        "odd/one": 3.0,
        "episodes/dropped/deadline": 2.0,
    }

    assert line(3, 20, metrics) == "step 3/20  reward 0.500  length 20  dropped 2"
    assert line(3, None, {"loss": 0.1}) == "step 3  loss 0.1000"
    wrong = {"truncated": 0.94, "groups/without_spread": 0.4, "staleness/mean": 0.0}
    assert line(3, None, wrong) == "step 3  ! 94% truncated"


def test_durations_are_read_like_a_clock():
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_without_a_terminal_each_step_is_a_plain_line():
    out = io.StringIO()
    display = ProgressDisplay(2, "run", out)
    display.step(1, {"loss": 1.0})
    display.step(2, {"loss": 0.5})
    display.close()

    assert [text.partition("  ETA")[0] for text in out.getvalue().splitlines()] == [
        "step 1/2  loss 1.0000", "step 2/2  loss 0.5000",
    ]  # fmt: skip
    assert "\x1b" not in out.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_bar_with_the_remaining_time_stays_below(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    display = ProgressDisplay(2, "exp/trial", out)
    display.step(1, {"reward/mean": 0.5})
    display.close()
    display.close()

    text = out.getvalue()
    assert "step 1/2  reward 0.500" in text and "1/2" in text and "ETA 0:00" in text and "exp/trial" in text


def test_the_tracker_prints_unless_told_not_to(tmp_path, capsys):
    with Tracker(tmp_path, TrackingConfig(), total_steps=1) as track:
        track.log(1, {"loss": 1.0})
    (tmp_path / "quiet").mkdir()
    with tracker(tmp_path / "quiet") as track:
        track.log(1, {"loss": 2.0})

    assert capsys.readouterr().out.count("step 1/") == 1
