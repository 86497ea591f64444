"""Some of the ranks work together, and the others neither wait for them nor hear of them."""

import time

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from tandem.api.failures import RankFailed
from tandem.api.team import Team
from tests.ranks import on


def failure_of(action):
    """Type and message of what it raised; empty if nothing."""
    try:
        action()
    except (OSError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refuse():
    raise OSError("the disk is full")


def fails_on(team, rank):
    with team.together():
        if dist.get_rank() == rank:
            refuse()


def numbered(calls):
    for name in ("a", "b"):
        calls.append(name)
        yield name, torch.full((2,), float(dist.get_rank()))


def as_members(team):
    """All that a team can do, on each of its ranks."""
    calls = []
    found = {"share": team.share(lambda: f"of rank {dist.get_rank()}"), "gather": team.gather(dist.get_rank())}
    batch = team.share(lambda: TensorDict({"x": torch.arange(3) + dist.get_rank(), "y": torch.ones(1)}, batch_size=[]))
    found |= {"batch": dict(batch.items()), "spread": dict(team.spread(numbered(calls)))}
    found |= {"read": calls, "shared failure": failure_of(lambda: team.share(refuse))}
    found |= {f"failure of {rank}": failure_of(lambda rank=rank: fails_on(team, rank)) for rank in (1, 2)}

    def reader_fails():
        with team.together(), team.whole(team.spread(numbered(calls))) as stream:
            for _ in stream:
                if team.main:
                    refuse()

    return found | {"whole": failure_of(reader_fails), "after": team.share(lambda: 7)}


def one_rank(ranks):
    team, everyone = Team(dist.new_group([1, 2])), Team()
    found = {"main": team.main, "member": team.member, "rank": team.rank, "size": team.size}
    began = time.monotonic()
    if team.member:
        found |= as_members(team)
    else:
        with pytest.raises(RuntimeError, match="rank 0 is not on this team"), team.together():
            pass
    found["seconds"] = time.monotonic() - began
    return found | {"everyone": everyone.share(lambda: "of rank 0")}  # the group is in order again


@pytest.mark.invariant
def test_a_team_of_some_ranks_shares_and_fails_without_the_others(tmp_path):
    other, main, second = on(3, one_rank, out=tmp_path)

    assert [one["main"] for one in (other, main, second)] == [False, True, False]
    assert [(one["rank"], one["size"]) for one in (other, main, second)] == [(-1, 0), (0, 2), (1, 2)]
    assert other["seconds"] < 1
    for member in (main, second):
        assert member["share"] == "of rank 1" and member["gather"] == [1, 2]
        assert {name: column.tolist() for name, column in member["batch"].items()} == {"x": [1, 2, 3], "y": [1.0]}
        assert {name: tensor.tolist() for name, tensor in member["spread"].items()} == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
        assert member["after"] == 7 and member["seconds"] < 5
    assert main["read"][:2] == ["a", "b"] and second["read"] == []  # the others' tensors are not read
    own, told = "OSError: the disk is full", "RankFailed: rank 1 failed: OSError: the disk is full"
    for name in ("shared failure", "failure of 1", "whole"):
        assert (main[name], second[name]) == (own, told)
    assert (main["failure of 2"], second["failure of 2"]) == (told.replace("rank 1", "rank 2"), own)
    assert [one["everyone"] for one in (other, main, second)] == ["of rank 0"] * 3


def test_a_rank_alone_shares_with_nobody():
    team = Team.alone()
    assert (team.main, team.member, team.size, team.gather(3)) == (True, True, 1, [3])
    with pytest.raises(KeyError), team.together():
        raise KeyError("mine")
