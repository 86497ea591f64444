"""Copies of what is spread over ranks: parts that rank 0 puts together, in nameless memory that goes with its owner."""

import os
from dataclasses import replace

import pytest
import torch

from tandem.api.state import Parted, TensorPart, part_of
from tandem.api.team import Team
from tandem.state.snapshot import MARK_BYTES, SharedParts, Snapshots, mapped


def spread(values):
    """A tensor that lies over ranks, of which this one has all."""
    return Parted("w", lambda: [part_of(values)])


def whole(shared):
    return Parted("w", lambda: shared.parts("w")).whole()


def test_a_copy_is_put_together_when_it_is_read_and_stays_as_it_was():
    snapshots, weights = Snapshots(Team()), torch.arange(6.0).reshape(2, 3)
    tree = {"a": [spread(weights), torch.tensor(7)], "b": {"step": 1}}
    assert snapshots.why_not(tree) is None
    copy = snapshots.take(tree)
    weights.zero_()
    assert copy["a"][0].whole().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert copy["a"][1].item() == 7 and copy["b"] == {"step": 1}

    size = snapshots.num_bytes
    again = snapshots.take(tree)
    assert again["a"][0].whole().sum() == 0 and snapshots.num_bytes == size
    larger = snapshots.take({"a": spread(torch.ones(1000, dtype=torch.bfloat16))})
    assert larger["a"].whole().sum() == 1000 and snapshots.num_bytes > size


def test_parts_that_do_not_make_the_whole_are_found():
    shared = SharedParts(Team())
    shared.copy({"w": TensorPart(torch.ones(2, 3), (2, 0), (4, 3))})
    assert shared.share() is None
    with pytest.raises(RuntimeError, match=r"parts of w are 6 entries short of the whole, \[4, 3\]"):
        whole(shared)


def test_a_part_may_be_one_of_the_row_of_all_entries():
    shared = SharedParts(Team())
    shared.copy({"w": TensorPart(torch.arange(6.0), (0,), (2, 3), flat=True)})
    assert shared.share() is None
    assert whole(shared).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_only_the_memory_that_was_offered_is_read(tmp_path):
    own = SharedParts(Team())
    own.copy({"w": part_of(torch.ones(4))})
    offer = own.offer()
    memory = mapped(offer)
    assert memory is not None and memory[:MARK_BYTES] == offer.mark

    other = tmp_path / "other"
    other.write_bytes(bytes(offer.num_bytes))
    changes = [{"path": str(other)}, {"mark": bytes(MARK_BYTES)}, {"num_bytes": offer.num_bytes + 1}]
    wrong = [replace(offer, **change) for change in (*changes, {"path": str(tmp_path / "none")}, {"path": ""})]
    assert [mapped(offer) for offer in wrong] == [None] * 5


def test_the_memory_goes_with_its_owner():
    shared = SharedParts(Team())
    shared.copy({"w": part_of(torch.ones(4))})
    descriptor = int(shared.offer().path.rpartition("/")[2])
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:tandem-checkpoint")
    del shared
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
