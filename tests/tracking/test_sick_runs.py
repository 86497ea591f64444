"""Sick runs are told from well ones by their curves: recorded ones of small real runs, and variations of these."""

import json
import math
from pathlib import Path

import pytest

from tandem.config.experiment import TrackingConfig
from tandem.tracking.health import CHECKS, FILE, Curves, HealthWatch, markdown
from tandem.tracking.tracker import Tracker

RECORDED = json.loads((Path(__file__).parents[1] / "data_files/health.json").read_text())
"""Run → metric → its values. `addition…`: examples/addition_grpo.yaml; `sft`, `dpo`: a tiny model."""


def told(curves):
    """The sicknesses that are told over all steps, in order."""
    found: list[str] = []
    for step in range(1, 1 + max(map(len, curves.values()))):
        so_far = Curves({name: list(enumerate(values[:step], 1)) for name, values in curves.items()})
        found += [one.name for one in CHECKS if one.name not in found and one.sign(so_far)]
    return found


def ramp(start, end, count=18):
    return [start + (end - start) * i / (count - 1) for i in range(count)]


def well(**changed):
    """The recorded run of addition, with some curves in place of its own."""
    return RECORDED["addition"] | {name.replace("__", "/"): values for name, values in changed.items()}


LEARNS_NOTHING = {"reward__mean": [0.2, 0.21] * 9, "accuracy": [0.2, 0.21] * 9, "groups__without_spread": [0.4] * 18}

SICK = {
    "answers are cut": (RECORDED["cut"], "truncation"),
    "a reward that is always the same": (RECORDED["flat"], "dead_groups"),
    "a learning rate of 1e-9": (RECORDED["sft_still"], "weights_stand_still"),
    "no spread from the start": (well(**LEARNS_NOTHING | {"groups__without_spread": [1.0] * 18}), "dead_groups"),
    "longer and longer": (well(**LEARNS_NOTHING, completion_length__mean=ramp(10, 60)), "length_explosion"),
    "form instead of truth": (well(accuracy=ramp(0.6, 0.3), rewards__format=ramp(0.2, 1.0)), "part_for_the_whole"),
    "exploration ends early": (well(**LEARNS_NOTHING, entropy=[0.7**i for i in range(18)]), "entropy_collapse"),
    "away from the reference": (well(kl__reference=[0.01 * 1.4**i for i in range(18)]), "kl_run_away"),
    "one answer to everything": (well(**LEARNS_NOTHING, samples__same=ramp(0.1, 1.0)), "one_answer"),
    "a judge without an opinion": (well(rewards__judge=[0.7] * 18), "constant_judge"),
    "too old": (well(expired=ramp(0.0, 0.3)), "stale_tokens"),
    "nobody generates": (well(time__engine_idle=[0.95] * 18, time__overlap=[0.9] * 18), "idle_engine"),
    "memory grows": (well(memory__peak_gib=ramp(2.0, 4.0)), "growing_memory"),
    "samples fail": (
        well(samples__failed__reward_raised=ramp(0, 600), episodes__trained=ramp(8, 144), groups__size=[6.0] * 18),
        "lost_samples",
    ),
}
WELL = {
    "addition": RECORDED["addition"],
    "addition, asynchronous": RECORDED["asynchronous"],
    "sft": RECORDED["sft"],
    "dpo": RECORDED["dpo"],
    "longer answers that earn more": well(completion_length__mean=ramp(10, 60), truncated=[0.05] * 18),
    "sure because it has learnt": well(entropy=ramp(1.0, 0.005)),
    "yes and no": well(samples__same=[0.6, 0.55] * 9),
    "all have the right form by now": well(rewards__format=[0.5, 0.9, *[1.0] * 16]),
    "a warm-up from nothing": well(lr=ramp(1e-9, 1e-7), actor__update_ratio=ramp(1e-8, 9e-7)),
    "memory that settles": well(memory__peak_gib=[2.0, 2.5, 2.8, 2.9, *[3.0] * 14]),
    "a KL that rises slowly": well(kl__reference=ramp(0.0, 0.15)),
    "now and then a failure": well(samples__failed__reward_raised=ramp(0, 20), episodes__trained=ramp(8, 144)),
    "synchronous: the engine waits for training": well(time__engine_idle=[0.95] * 18, time__overlap=[0.0] * 18),
    "values that are not finite": well(loss=[math.nan] * 18, entropy=[math.nan] * 18),
}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_told_by_its_sickness(name):
    curves, sickness = SICK[name]
    assert sickness in told(curves)


@pytest.mark.parametrize("name", WELL)
def test_of_a_well_run_nothing_is_told(name):
    assert told(WELL[name]) == []


def test_every_sickness_has_a_run_that_has_it():
    assert {sickness for _, sickness in SICK.values()} == {one.name for one in CHECKS}


def test_a_learning_rate_of_1e_9_is_told_at_step_3_once_with_its_remedy(tmp_path, caplog):
    with Tracker(tmp_path, TrackingConfig(plot_every_steps=None), progress=False) as tracker:
        for step in range(1, 7):
            tracker.log(step, {"lr": 1e-9, "actor/update_ratio": 2e-9, "loss": 1.0})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tandem.tracking.health"]
    assert line.startswith("step 3: weights_stand_still: a step moves the weights by 2e-09") and "actor.optimizer.lr" in line
    (recorded,) = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    assert (recorded["step"], recorded["name"]) == (3, "weights_stand_still")


@pytest.mark.parametrize(("checkpoint", "times"), [(4, 1), (2, 2)])
def test_a_run_that_goes_on_tells_again_only_what_came_later(checkpoint, times, tmp_path, caplog):
    for first in (1, checkpoint + 1):
        with Tracker(tmp_path, TrackingConfig(plot_every_steps=None), progress=False) as tracker:
            if first > 1:
                tracker.load_state_dict({"step": checkpoint})
            for step in range(first, 6):
                tracker.log(step, {"lr": 1e-9, "actor/update_ratio": 2e-9})
    assert len([record for record in caplog.records if record.name == "tandem.tracking.health"]) == times
    assert [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()] == [3]


def test_a_run_goes_on_where_a_kill_has_torn_a_line_of_its_health(tmp_path):
    whole = json.dumps({"step": 1, "name": "truncation", "sign": "", "remedy": ""}) + "\n"
    (tmp_path / FILE).write_text(whole + '{"step": 1, "name": "dead_gr\n3\n\n', encoding="utf-8")
    HealthWatch(tmp_path).forget_after(2)
    assert (tmp_path / FILE).read_text(encoding="utf-8") == whole


def test_the_page_has_the_table():
    assert markdown() in (Path(__file__).parents[2] / "docs/health.md").read_text()
