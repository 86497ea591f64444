"""What `tandem plan` proposes where a run does not fit, and what it says of ranks, devices and host memory."""

from dataclasses import replace

import pytest

from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.models.shape import Shape
from tandem.planning.devices import device
from tandem.planning.items import GIB
from tandem.planning.remedy import RANK, devices_needed, engine_gib, least_gib
from tandem.planning.report import Report
from tests.trainers.planning import LLAMA_8B, SMOLLM2, round_machine
from tests.trainers.test_planning_command import RL, planned

SFT = ["train_dataset.path=addition"]
LLAMA_70B = Shape("llama", 80, 8192, 28672, 64, 8, 128, 128256, 8192)
P = 70_553_706_496


def report_of(plan, change=None):
    """A report with nothing beside the plan."""
    return Report("Plan", plan, lengths="", arithmetic="", change=change)


@pytest.mark.parametrize("backend", ["deepspeed:zero2:d2", "fsdp:d1t2"])
def test_ranks_that_take_neither_offloading_nor_adapters_become_ranks_that_shard(backend):
    plan, change = planned(SFTConfig, [*SFT, f"actor.backend={backend}"], device("rtx4090", 2))

    assert not plan.fits and change is not None and change.plan.fits
    assert change.settings["actor.backend"] == "fsdp:d2"
    assert "actor.offload" in change.settings or "actor.lora.rank" in change.settings


def test_matrices_cut_over_two_ranks_are_sharded_over_them_where_that_is_enough():
    machine = replace(device("h100", 2), memory_gib=74.5)
    plan, change = planned(SFTConfig, [*SFT, "actor.backend=fsdp:d1t2", "actor.dtype=bfloat16"], machine)

    assert not plan.fits and change is not None and change.plan.fits
    assert change.settings["actor.backend"] == "fsdp:d2"
    assert "actor.offload" not in change.settings and "actor.lora.rank" not in change.settings


def test_a_critic_that_is_to_be_shared_gets_no_adapters_of_its_own():
    plan, change = planned(TrainConfig, [*RL, "algorithm=ppo"], round_machine(memory_gib=130.0))

    assert not plan.fits and change is not None and change.plan.fits
    assert change.settings["critic.shared"] is True and change.settings["actor.lora.rank"] == RANK
    assert "critic.lora.rank" not in change.settings


def test_no_number_of_devices_is_named_where_the_engine_alone_fills_one():
    plan, change = planned(TrainConfig, [*RL, "actor.backend=fsdp:d8"], device("h200", 8), shape=LLAMA_70B)

    assert not plan.fits and change is None
    assert engine_gib(plan) == 2 * 2 * P / GIB > plan.usable_gib
    assert devices_needed(plan) is None
    assert least_gib(plan) == pytest.approx((14 + 4) * P / GIB)  # of all ranks, on one device


def test_devices_that_would_hold_weights_and_moments_are_more_than_there_are():
    single, several = (replace(device("h200", count), memory_gib=130.0) for count in (1, 9))
    one, _ = planned(SFTConfig, SFT, single, shape=LLAMA_70B)
    nine, _ = planned(SFTConfig, [*SFT, "actor.backend=fsdp:d9"], several, shape=LLAMA_70B)

    assert 8 < 1.3 * 12 * P / GIB / (one.usable_gib - one.machine.process_gib) < 9
    assert devices_needed(one) == 9 and devices_needed(nine) is None


def test_a_change_says_what_it_takes_of_the_host():
    plan, change = planned(SFTConfig, [*SFT, "actor.backend=fsdp:d1"], device("rtx4090"))
    report = report_of(plan, change)

    assert change is not None and change.settings["actor.offload"] is True
    assert change.plan.host_gib > 16 * LLAMA_8B.parameters() / GIB > plan.host_gib
    assert report.data()["change"]["host_gib"] == round(change.plan.host_gib, 4)
    assert f"{change.plan.host_gib:.2f} GiB of host memory" in report.text()
    assert "that of the host is told, and compared with nothing" in report.text()


def test_what_the_first_rank_holds_is_said_as_the_machine_has_it():
    keys = [*SFT, "actor.backend=fsdp:d2"]
    gpu, _ = planned(SFTConfig, keys, device("h200", 2), shape=SMOLLM2)
    cpu, _ = planned(SFTConfig, keys, round_machine(), shape=SMOLLM2)

    assert f"the first rank's device, which holds most; all devices hold {gpu.machine_gib:.2f} GiB" in report_of(gpu).text()
    assert f"All 2 ranks share this memory; the first one holds {cpu.rank_gib:.2f} GiB" in report_of(cpu).text()


def test_devices_that_no_rank_uses_are_said():
    one, _ = planned(SFTConfig, SFT, device("h200", 8), shape=SMOLLM2)
    all_of_them, _ = planned(SFTConfig, [*SFT, "actor.backend=fsdp:d8"], device("h200", 8), shape=SMOLLM2)

    assert "1 of 8 devices is used: actor.backend=fsdp:d8" in report_of(one).text()
    assert "of 8 devices" not in report_of(all_of_them).text()
