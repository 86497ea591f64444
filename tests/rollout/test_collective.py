"""Rank 0 collects; every rank has the batch, or the error."""

import pytest
import torch
import torch.distributed as dist

from tandem.api.failures import DataFailure
from tandem.config.rollout import RolloutConfig
from tandem.rollout.book import NoBatch
from tandem.rollout.executor import Rollout
from tests.ranks import finish, start
from tests.rollout.clockwork import ClockworkEngine, OneAnswer, prompts, rows


def one_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)

    def fail(attempt):
        raise DataFailure("bad_row")

    with Rollout(ClockworkEngine() if rank == 0 else None, RolloutConfig(batch_size=3)) as rollout:
        batch = rollout.prepare_batch(iter(rows(3)), OneAnswer())
        assert prompts(batch) == [0, 1, 2]
        assert rollout.metrics().get("reward/mean") == (1.0 if rank == 0 else None)
        rollout.end_step()
        bad = [{"tandem.epoch": 1, "tandem.index": 0, "fail": fail}]
        with pytest.raises(NoBatch, match="bad_row"):
            rollout.rollout_batch(bad, OneAnswer())
    torch.save(dict(batch), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.invariant
def test_every_rank_has_the_same_batch_and_the_same_error(tmp_path):
    finish(start(one_rank, (str(tmp_path),), 2))
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name].nan_to_num(), two[name].nan_to_num()) for name in one)
