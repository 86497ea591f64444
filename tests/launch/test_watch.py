"""When ranks are at fault, and when they only take long: the rules alone, on a clock of the test's own."""

import pytest

from tandem.api.activity import OTHER_RANKS
from tandem.launch import watch as rules
from tandem.launch.watch import GAPS, SILENT_S, START_S, WEDGED_S, Fault, RankReport, Used, Watch

WAITS = {"waits": OTHER_RANKS}


class Group:
    """Ranks that tell something every half second; they are in their second step, unless they are told otherwise."""

    def __init__(self, ranks: int = 2, stalled_after_s: float | None = 600.0, first_step: int = 1):
        self.watch, self.now = Watch(ranks, stalled_after_s), 0.0
        self.used, self.below = [0.0] * ranks, [0.0] * ranks
        for rank in range(ranks) if first_step else ():
            self.watch.hear(rank, RankReport(0, "train", first_step), Used())

    def run(self, seconds: float, *ranks: dict | None, busy: tuple[int, ...] = (), held: bool = True, children=(), disk=()):
        """Each rank says the same for so long; None says nothing. ``busy``: who uses the processor; ``children``: whose
        child processes do; ``disk``: that wait for one."""
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            for rank, said in enumerate(ranks):
                self.used[rank] += 0.5 * (rank in busy)
                self.below[rank] += 0.5 * (rank in children)
                if said is not None:
                    used = Used(self.used[rank], 0, self.below[rank], rank in disk)
                    self.watch.hear(rank, RankReport(**{"count": 1, "phase": "train", "step": 2} | said), used)
            fault = self.watch.look(self.now, lambda rank, seconds: held)
            if fault is not None:
                return fault
        return None


def test_ranks_and_their_launcher_speak_of_the_same():
    assert rules.OTHER_RANKS == OTHER_RANKS


def test_a_rank_that_says_nothing_is_found_in_time_and_not_before():
    group = Group()
    assert group.run(30, {}, {}, busy=(0, 1)) is None
    before = group.now
    fault = group.run(60, {}, None, busy=(0,))
    assert (fault.kind, fault.rank) == ("silent", 1) and SILENT_S <= group.now - before <= SILENT_S + 1
    assert "rank 1 of 2 has not answered for 1" in fault.text


def test_a_rank_that_is_busy_where_nobody_else_may_speak_is_not_silent():
    group = Group()
    group.run(1, {}, {}, busy=(0, 1))
    assert group.run(100, {}, None, busy=(0, 1), held=False) is None


@pytest.mark.parametrize("first", [WAITS, {}], ids=["rank 0 waits by name", "rank 0 waits in a layer"])
def test_a_rank_that_stands_still_in_training_while_the_others_wait_is_found(first):
    group = Group()
    assert group.run(10, {}, {}, busy=(0, 1)) is None
    fault = group.run(60, first, {})
    assert (fault.kind, fault.rank) == ("wedged", 1) and group.now <= 10 + WEDGED_S + rules.WINDOW_S + 1


def test_ranks_that_all_wait_for_each_other_are_found_in_any_phase():
    group = Group()
    fault = group.run(60, WAITS | {"phase": "save"}, WAITS | {"phase": "generate"})
    assert fault.kind == "wedged" and "none of them makes progress" in fault.text and group.now <= WEDGED_S + 1


@pytest.mark.parametrize(
    ("main", "other", "busy"),
    [
        ({"phase": "generate", "waits": "16 groups"}, WAITS | {"phase": "generate"}, ()),
        ({"phase": "save"}, WAITS | {"phase": "save"}, ()),  # a slow disk
        ({"phase": "build"}, WAITS | {"phase": "build"}, ()),  # servers that start
        ({}, WAITS, (0,)),  # one large micro-batch on a processor
    ],
)
def test_what_only_takes_long_is_not_ended_before_the_limit_of_a_phase(main, other, busy):
    group = Group(stalled_after_s=600)
    assert group.run(599, main, other, busy=busy) is None
    fault = group.run(3, main, other, busy=busy)
    assert (fault.kind, fault.rank) == ("stalled", 0)
    assert f"in phase {main.get('phase', 'train')!r}" in fault.text
    assert main.get("waits", "its present piece of work") in fault.text


def test_where_waiting_uses_the_processor_the_place_in_the_code_counts():
    group = Group()
    spinning = {"spins": True, "place": 7}
    fault = group.run(60, WAITS, spinning, busy=(0, 1))
    assert (fault.kind, fault.rank) == ("wedged", 1)
    moving = Group()
    for place in range(30):
        assert moving.run(2, WAITS, {"spins": True, "place": place}) is None


def test_without_a_limit_only_silence_counts():
    group = Group(stalled_after_s=None)
    assert group.run(1000, WAITS, WAITS) is None
    assert group.run(60, WAITS, None).kind == "silent"


def test_time_in_which_the_whole_machine_sleeps_does_not_count():
    group = Group()
    group.run(10, {}, WAITS)
    group.now += 3600  # everybody is silent and still for an hour, the launcher too
    assert group.run(2, {}, WAITS) is None


def test_progress_of_one_rank_is_progress_of_the_group():
    group = Group(stalled_after_s=60)
    for count in range(20):
        assert group.run(30, {"count": count, "phase": "generate"}, WAITS) is None


def test_one_rank_alone_waits_for_nobody():
    assert Group(1).run(500, {}) is None


@pytest.mark.parametrize("spins", [False, True])
@pytest.mark.parametrize("how", ["children", "disk"])
def test_a_rank_whose_children_work_or_that_waits_for_a_disk_is_at_work(how, spins):
    group = Group()
    assert group.run(300, WAITS, {"spins": spins}, **{how: (1,)}) is None
    assert group.run(30, WAITS, {"spins": spins}).kind == "wedged"


def test_in_the_first_step_ranks_may_compile_as_long_as_nothing_may_be_done():
    for step in (0, 1):  # while models are loaded, and in the first step
        group = Group(first_step=0)
        assert group.run(599, WAITS | {"step": step}, {"step": step}) is None
        assert group.run(599, WAITS | {"step": step, "count": 2}, WAITS | {"step": step, "count": 2}) is None
        assert group.run(5, WAITS | {"step": step, "count": 2}, {"step": step, "count": 2}).kind == "stalled"


def test_who_was_as_long_at_one_piece_of_training_before_is_not_standing_still():
    group = Group(stalled_after_s=1000)
    assert group.run(60, WAITS, {}, busy=(1,)) is None  # a forward pass that counted nothing for a minute
    assert group.run(GAPS * 60 - 2, WAITS | {"count": 2}, {"count": 2}) is None
    assert group.run(10, WAITS | {"count": 2}, {"count": 2}).kind == "wedged"


def test_a_rank_that_never_says_a_word_is_found():
    group = Group(stalled_after_s=20, first_step=0)
    assert group.run(START_S - 1, {"phase": "start", "step": 0}, None, held=False) is None
    fault = group.run(5, {"phase": "start", "step": 0}, None, held=False)
    assert (fault.kind, fault.rank) == (
        "stalled",
        1,
    ) and "rank 1 of 2 has reported nothing since it was started" in fault.text


def test_a_machine_that_a_rank_says_is_cut_off_ends_its_group():
    group = Group()
    assert group.run(5, {}, {}, busy=(0, 1)) is None
    fault = group.run(5, {"cut_off": "machine 1 is gone"}, {}, busy=(0, 1))
    assert fault == Fault("silent", 0, "machine 1 is gone")
