"""On GPUs, ranks that wait for rank 0 hold no collective of the device's group: a server may generate on their GPUs."""

import os
import time
from threading import Thread

import torch
import torch.distributed as dist
from tensordict import TensorDict

from tandem.api.team import Team
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.rollout import RolloutConfig
from tandem.flow.process import start_process
from tandem.rollout.executor import Rollout
from tests.ranks import finish, start
from tests.rollout.clockwork import ClockworkEngine, OneAnswer, prompts, rows

SLOW_S = 0.6


def device_group(store, rank, size, timeout):
    """Stands for NCCL: it counts its collectives when they begin, as gloo does."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def pretend_gpus():
    """From now on this process has two GPUs, of which torch.distributed knows the group above."""
    torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 2, lambda device: None
    dist.Backend.register_backend("recorded", device_group, devices=["cpu", "cuda"])
    init = dist.init_process_group
    torch.distributed.init_process_group = lambda backend, **how: init(backend.replace("nccl", "recorded"), **how)


def begun(group=None):
    """Collectives of the device's group that have begun here."""
    return (group or dist.group.WORLD)._get_backend(torch.device("cuda"))._get_sequence_number_for_group()


def slowly(value):
    time.sleep(SLOW_S)
    return value


def collect(rank):
    """Both ranks ask the executor for a batch, whose one sample takes rank 0 a while."""
    engine = ClockworkEngine(delay_s=lambda request: SLOW_S) if rank == 0 else None
    with Rollout(engine, RolloutConfig(batch_size=2)) as rollout:
        return prompts(rollout.prepare_batch(iter(rows(2)), OneAnswer()))


def wait_in_every_way(rank, folder):
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "TANDEM_RENDEZVOUS": f"{folder}/meet"}
    pretend_gpus()
    process = start_process(load_config(TrainConfig, None, ["actor.backend=fsdp:d2", "train_dataset.path=addition"]).config)
    assert process.device == f"cuda:{rank}"
    seen, over = [], False

    def watch():
        while not over:
            seen.append(begun())
            time.sleep(0.02)

    thread = Thread(target=watch)
    thread.start()
    try:
        team, part = Team(), Team(dist.new_group([0, 1]))
        assert team.share(lambda: slowly("an object")) == "an object"
        assert team.gather(slowly(rank) if rank == 0 else rank) == [0, 1]
        batch = team.share(lambda: slowly(TensorDict({"x": torch.arange(3)}, batch_size=[])))
        assert batch["x"].tolist() == [0, 1, 2]
        for one in (team, part):
            with one.together():
                time.sleep(0 if rank else SLOW_S)
        assert len(collect(rank)) == 2
    finally:
        over = True
        thread.join()
    assert set(seen) == {0} and len(seen) > 50
    assert begun() == begun(part.group) == 0
    dist.all_reduce(torch.ones(1), group=part.group)  # of the CPU, so not on the device either
    assert begun(part.group) == 0


def test_ranks_that_wait_for_rank_0_hold_no_collective_of_the_devices_group(tmp_path):
    finish(start(wait_in_every_way, (tmp_path,), 2))
