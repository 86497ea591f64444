"""`rollout.balance=auto`: threads go where they are waited for."""

import pytest

from tandem.flow.conductor import LITTLE, Balance


class World:
    """Generation and training that take a step's work divided by their threads, side by side."""

    def __init__(self, generating, training, work=(1.0, 1.0)):
        self.work, self.splits = work, [(generating, training)]
        self.balance = Balance(generating, training, lambda *split: self.splits.append(split))

    def steps(self, count):
        for _ in range(count):
            seconds = [work / threads for work, threads in zip(self.work, self.splits[-1], strict=True)]
            step = max(seconds)
            waits = {"time/trainer_wait": 1 - seconds[1] / step, "time/engine_idle": 1 - seconds[0] / step}
            told = self.balance.after_step(waits)
            assert sum(told.values()) == sum(self.splits[0])
        return max(waits.values())


@pytest.mark.parametrize("split", [(1, 15), (8, 8), (15, 1)])
@pytest.mark.parametrize("work", [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0)])
def test_threads_move_until_neither_side_waits_for_more_than_a_tenth(split, work):
    world = World(*split, work)
    assert world.steps(60) <= LITTLE
    moves = len(world.splits)
    world.steps(60)
    assert len(world.splits) == moves, "then nothing moves"


def test_where_no_split_is_even_the_better_one_stays_until_the_work_changes():
    world = World(1, 2, work=(1.4, 1.0))  # 1:2 wastes 64 %, 2:1 30 %
    world.steps(25)
    assert world.splits == [(1, 2), (2, 1)]
    world.work = (1.0, 2.2)
    world.steps(40)
    assert world.splits[-1] == (1, 2)


def test_each_side_keeps_a_thread():
    world = World(1, 1, work=(100.0, 1.0))
    world.steps(20)
    assert world.splits == [(1, 1)]
