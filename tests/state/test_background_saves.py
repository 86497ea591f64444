"""A save beside training: a copy that nothing changes any more, one at a time, and nothing that fails is lost."""

import threading

import pytest
import torch

from tandem.api.activity import ACTIVITY
from tandem.api.team import Team
from tandem.lifecycle.saving import BackgroundSave
from tandem.state.checkpoint import CheckpointFailed
from tandem.state.snapshot import Snapshots


def test_a_copy_stays_as_it_was_and_the_next_takes_its_memory():
    snapshots, weights, order = Snapshots(Team()), torch.arange(6.0).reshape(2, 3), [3, 1]
    tree = {"a": {"w": weights.t(), "order": order, "text": "x"}, "b": [torch.tensor(7), None, (1, 2)]}
    first = snapshots.take(tree)
    weights.zero_()
    order.append(2)
    assert first["a"]["w"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] and first["a"]["w"].is_contiguous()
    assert first["a"]["order"] == [3, 1] and first["a"]["text"] == "x"
    assert first["b"][0].item() == 7 and first["b"][1:] == [None, [1, 2]]

    second = snapshots.take(tree)
    assert second["a"]["w"].data_ptr() == first["a"]["w"].data_ptr() and second["a"]["w"].sum() == 0
    assert snapshots.num_bytes == 6 * 4 + 8
    snapshots.take({"a": {"w": torch.ones(2, dtype=torch.bfloat16)}})
    assert snapshots.num_bytes == 4  # what is no longer there is let go of
    assert snapshots.take({"a": {"w": torch.tensor([1, 301])}})["a"]["w"].tolist() == [1, 301]  # in a dtype of its own


def test_a_copy_needs_gradients_of_nobody():
    parameter = torch.nn.Parameter(torch.ones(3))
    copy = Snapshots(Team()).take({"w": parameter})["w"]
    assert not copy.requires_grad and type(copy) is torch.Tensor


def test_what_was_written_is_taken_once(tmp_path):
    background, may_end = BackgroundSave(), threading.Event()

    def work():
        may_end.wait(10)
        return tmp_path

    background.start("the checkpoint of step 1", work)
    assert background.busy
    may_end.set()
    path, seconds = background.take()
    assert path == tmp_path and seconds > 0 and not background.busy
    assert background.take() is None


def test_what_failed_is_raised_with_its_cause_once():
    background = BackgroundSave()

    def work():
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise CheckpointFailed("the checkpoint of step 1 could not be saved") from error

    background.start("the checkpoint of step 1", work)
    with pytest.raises(CheckpointFailed, match="step 1 could not be saved") as caught:
        background.take()
    assert isinstance(caught.value.__cause__, OSError)
    assert background.take() is None
    background.start("the checkpoint of step 2", lambda: None)
    assert background.take()[0] is None


def test_who_waits_for_a_save_says_so_and_has_no_deadline_of_its_own(tmp_path):
    background, may_end, seen = BackgroundSave(), threading.Event(), []

    def work():
        may_end.wait(10)
        return tmp_path

    background.start("the checkpoint of step 3", work)
    threading.Timer(0.2, lambda: (seen.append(ACTIVITY.waits), may_end.set())).start()
    assert background.take()[0] == tmp_path
    assert seen == ["the checkpoint of step 3"] and background.take() is None
