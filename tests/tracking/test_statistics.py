"""Phases and memory."""

import time

import pytest

from tandem.tracking.statistics import PhaseTimer, peak_memory_gib


def test_phases_add_up_and_start_anew_with_each_step():
    timer = PhaseTimer()
    for _ in range(2):
        with timer("generate"):
            time.sleep(0.01)
    with timer("train"):
        pass

    first, second = timer.metrics(), timer.metrics()

    assert first.keys() == {"time/generate_s", "time/train_s", "time/step_s"}
    assert 0.02 <= first["time/generate_s"] <= first["time/step_s"]
    assert second.keys() == {"time/step_s"} and second["time/step_s"] < first["time/step_s"]


def test_a_phase_that_raises_is_counted():
    timer = PhaseTimer()

    def fail():
        time.sleep(0.01)
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"), timer("train"):
        fail()

    assert timer.seconds("train") >= 0.01


def test_the_peak_remembers_memory_that_was_given_back():
    before = peak_memory_gib()
    block = bytearray(200 * 2**20)
    del block

    assert peak_memory_gib() >= before > 0.01
