"""Episodes on several ranks: rank 0 collects, each rank makes its share, and the batch is that of one rank."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tandem.api.failures import DataFailure, EngineDied, WaitTimeout
from tandem.api.team import Team
from tandem.api.workflow import Group
from tandem.config.rollout import RolloutConfig
from tandem.rollout.executor import Rollout
from tandem.rollout.workflows import Repeated
from tests.ranks import alone_and_on_two, on_two
from tests.rollout.clockwork import ClockworkEngine, OneAnswer, prompts, rows


class SaysWhere(OneAnswer):
    """Rows ask for failures by name. The first token of the prompt says which rank made the sample."""

    async def arun_episode(self, engine, data):
        rank = dist.get_rank() if dist.is_initialized() else 0
        if data["tandem.index"] == 5:
            raise DataFailure("bad_row", "as row 5 is")
        if data["tandem.index"] == data.get("dies") and rank:
            raise EngineDied("the clockwork has stopped")
        sample = await super().arun_episode(engine, data)
        sample.trajectories[0].input_ids[0] = rank
        return sample


def collecting(engine, ranks, **given):
    """An executor of these ranks, and those that generate."""
    generators = None if ranks == 1 else Team(dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=60)))
    return Rollout(engine, RolloutConfig(**given.pop("config")), generators=generators, **given)


def odd_rows_are_dull(group: Group):
    return group.data["tandem.index"] % 2 == 0, "dull"


def two_batches(deterministic, ranks):
    """Two batches of four groups, half of the rows filtered, one bad; what is counted; and which rank made each sample."""
    with collecting(
        ClockworkEngine(delay_s=lambda request: 0.01),
        ranks,
        config={"batch_size": 4, "max_concurrent": 3},
        deterministic=deterministic,
        group_filter=odd_rows_are_dull,
    ) as rollout:
        loader, workflow, found = iter(rows(30)), Repeated(SaysWhere(), 2), []
        for _ in range(2):
            batch = rollout.prepare_batch(loader, workflow)
            groups = [prompts(batch)[i : i + 2] for i in range(0, 8, 2)]
            places = batch["input_ids"][batch["cu_seqlens"][:-1]].tolist()
            rollout.end_step()
            counts = {n: v for n, v in rollout.metrics().items() if n.startswith(("episodes/dropped", "episodes/trained"))}
            found.append((groups, [places[i : i + 2] for i in range(0, 8, 2)], counts))
        return found, dict(rollout.ledger.dropped)


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_ranks_make_the_batches_and_ledger_of_one_and_each_makes_whole_groups(tmp_path, deterministic):
    (alone, dropped), ((first, theirs), (second, _)) = alone_and_on_two(two_batches, deterministic, out=tmp_path)
    assert [groups for groups, _, _ in first] == [groups for groups, _, _ in second]
    if deterministic:  # otherwise the order in which groups end decides which are taken
        assert [(groups, counts) for groups, _, counts in first] == [(groups, counts) for groups, _, counts in alone]
        assert theirs == dropped
    for groups, places, _ in first:
        assert all(index % 2 == 0 and index == again for index, again in groups)
        assert all(len(set(group)) == 1 for group in places), "the samples of a group are made where its prompt is"
    assert {place for _, places, _ in first for group in places for place in group} == {0, 1}
    assert theirs["bad_row"] == 1


def failing(ranks):
    """The error of an engine that dies on rank 1, and of a workflow that hangs there; each with its seconds."""
    told = []
    dying = collecting(ClockworkEngine(), ranks, config={"batch_size": 4})
    late = collecting(
        ClockworkEngine(delay_s=lambda request: 0.01, hold=lambda request, number: dist.get_rank() == 1),
        ranks,
        config={"batch_size": 4, "wait_timeout_s": 2.0},
    )
    for rollout, columns, expected in ((dying, {"dies": 1}, EngineDied), (late, {}, WaitTimeout)):
        began = time.monotonic()
        with rollout, pytest.raises(expected) as error:
            rollout.prepare_batch(iter(rows(4, **columns)), SaysWhere())
        told.append((str(error.value), time.monotonic() - began))
    return told


def test_what_fails_or_hangs_on_one_rank_ends_all_ranks_with_the_same_error_in_time(tmp_path):
    one, other = on_two(failing, out=tmp_path)
    assert [text for text, _ in one] == [text for text, _ in other]
    assert "the clockwork has stopped" in one[0][0] and "waited 2.0 s for 4 groups; running 2" in one[1][0]
    assert all(seconds < 40 for found in (one, other) for _, seconds in found)
