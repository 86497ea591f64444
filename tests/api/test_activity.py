"""What counts as progress of a process."""

import threading

import pytest

from tandem.api.activity import ACTIVITY, GENERATING, OTHER_RANKS, did, enter, waiting, within
from tandem.api.team import Team


@pytest.fixture(autouse=True)
def outside():
    yield
    enter("start", 0)


def counted(action, *, elsewhere=False):
    before = ACTIVITY.count
    if elsewhere:
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()
    else:
        action()
    return ACTIVITY.count - before


def test_what_a_thread_does_counts_only_in_phases_in_which_the_main_one_waits_for_it():
    enter("train", 3)
    assert counted(did) == 1
    assert counted(did, elsewhere=True) == 0
    assert counted(lambda: did(*GENERATING), elsewhere=True) == 0  # episodes that go on while the main thread trains
    with within("generate"):
        assert counted(lambda: did(*GENERATING), elsewhere=True) == 1
        assert counted(did, elsewhere=True) == 0
    assert (ACTIVITY.phase, ACTIVITY.step) == ("train", 3)


def test_a_wait_is_named_while_it_lasts_and_also_where_it_fails():
    def fails():
        with waiting("16 groups"):
            assert ACTIVITY.waits == "16 groups"
            with waiting(OTHER_RANKS):
                assert ACTIVITY.waits == OTHER_RANKS
            assert ACTIVITY.waits == "16 groups"
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fails()
    assert ACTIVITY.waits == ""


def test_a_process_alone_meets_nobody():
    with Team().together():
        assert Team().share(lambda: ACTIVITY.waits) == ""
