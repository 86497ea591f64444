"""Environments in worker processes: what fails is named, others go on, and nothing is left behind."""

import asyncio
import os
import time
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from tandem.api.failures import DataFailure
from tandem.rollout.environments.environment_workflow import EnvironmentLimits, EnvironmentPool, EnvironmentWorker

WORLDS = Path(__file__).parent / "worlds.py"
PAGE = Path(__file__).parents[2] / "docs/agents_environments.md"
QUICK = {"reset_timeout_s": 20.0, "step_timeout_s": 20.0}


@pytest.fixture
def pool():
    pools = []

    def make(name, knobs=None, **limits):
        pools.append(EnvironmentPool(f"{WORLDS}:{name}", knobs or {}, name=name, limits=EnvironmentLimits(**QUICK | limits)))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


async def play(pool, does="plays", action="go"):
    async with pool.world() as world:
        await world.reset({"does": does}, 0)
        return await world.step(action)


async def outcome(pool, does):
    try:
        await play(pool, does)
    except DataFailure as failure:
        return failure
    return None


FAULTS = {
    "raises": ("raises", "environment_raised", r"ValueError: a wall that is none \(worlds.py:\d+ in step: raise "),
    "calls `sys.exit`": ("exits", "environment_raised", "SystemExit: enough"),
    "ends its process": ("dies", "environment_died", "exit code 3 in step"),
    "gives a reward that is NaN": ("nan", "environment_not_finite", "the reward is nan"),
    "gives a reward that is no number": (
        "words for a reward",
        "environment_wrong_type",
        "the reward must be a number, got a str",
    ),
    "shows something that is no text": (
        "no text",
        "environment_wrong_type",
        "observation of step must be a text that the model can read, got a int",
    ),
    "returns four values": ("four", "environment_wrong_type", "it returned a tuple of 4"),
    "says of the end neither True nor False": (
        "no flag",
        "environment_wrong_type",
        "terminated must be True or False, got a str",
    ),
    "shows more than 100,000 characters": ("floods", "environment_wrong_type", "has 1000000 characters"),
}
"""What an environment does wrong, as docs/agents_environments.md says it: (what `Fails` does, reason, words)."""

BESIDE = {
    "hangs in a step": ("hangs", "environment_timeout"),
    "hangs in its reset": ("hangs in reset", "environment_timeout"),
    "has twice `memory_mib` in the middle of an episode": ("leaks", "environment_memory"),
}
"""The same, of what other episodes could feel."""


@pytest.mark.parametrize("fault", FAULTS)
def test_what_an_environment_does_wrong_has_a_name_and_the_next_episode_is_fine(pool, fault):
    does, reason, words = FAULTS[fault]
    worlds = pool("Fails")
    failure = asyncio.run(outcome(worlds, does))
    assert failure.reason == reason
    with pytest.raises(DataFailure, match=words):
        raise failure
    assert asyncio.run(play(worlds)).observation == "Well."


def test_one_that_hangs_or_leaks_disturbs_nobody(pool):
    worlds = pool("Fails", step_timeout_s=2.0, reset_timeout_s=2.0, memory_mib=100.0)

    async def all_at_once():
        return await asyncio.gather(
            *(outcome(worlds, does) for does in ("plays", *(d for d, _ in BESIDE.values()), "plays"))
        )

    reasons = [failure and failure.reason for failure in asyncio.run(all_at_once())]
    assert reasons == [None, *(reason for _, reason in BESIDE.values()), None]


def test_the_page_lists_what_environments_do_wrong():
    table = PAGE.read_text().partition("<!-- from the tests: faults -->\n")[2].partition("<!-- end -->")[0]
    rows = [f"| {fault} | `{reason}` |" for fault, (_, reason, *_) in {**FAULTS, **BESIDE}.items()]
    assert table.splitlines() == ["| the environment | reason |", "|---|---|", *rows]


def test_an_environment_that_cannot_be_made_says_why(pool):
    failure = asyncio.run(outcome(pool("Broken"), "plays"))
    assert failure.reason == "environment_raised" and "no such maze" in str(failure)


async def pid_of(pool):
    async with pool.world() as world:
        return int(await world.reset({}, 0))


def test_a_worker_is_reused_and_replaced_after_so_many_episodes(pool):
    worlds = pool("Who", max_episodes=2)
    pids = [asyncio.run(pid_of(worlds)) for _ in range(3)]
    memory_mib = psutil.Process(pids[2]).memory_info().rss / 2**20  # before its last episode, after which it ends
    pids.append(asyncio.run(pid_of(worlds)))
    assert pids[0] == pids[1] != pids[2] == pids[3]
    grown = pool("Who", memory_mib=memory_mib / 1.5)  # more than it may have between episodes, less than twice that
    assert len({asyncio.run(pid_of(grown)) for _ in range(2)}) == 2


def test_a_forged_answer_is_none(pool):
    failure = asyncio.run(outcome(pool("Forges"), "plays"))
    assert failure.reason == "environment_died" and "without the call's token" in str(failure)


def test_a_worker_does_without_torch(pool):
    assert asyncio.run(play(pool("Who"))).observation == "torch: False"


def test_no_more_workers_than_allowed_and_all_get_their_turn(pool):
    worlds = pool("Who", workers=2)

    async def many():
        return await asyncio.gather(*(pid_of(worlds) for _ in range(8)))

    assert len(set(asyncio.run(many()))) <= 2


def test_an_episode_cancelled_in_a_call_loses_its_worker_but_not_between_calls(pool):
    worlds = pool("Fails")

    async def cancelled(does):
        begun = asyncio.Event()

        async def episode():
            async with worlds.world() as world:
                await world.reset({"does": does}, 0)
                begun.set()
                await (world.step("go") if does == "hangs" else asyncio.sleep(1000))

        task = asyncio.create_task(episode())
        await begun.wait()
        await asyncio.sleep(0.1)
        before = list(worlds.pids)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return before

    (first,) = asyncio.run(cancelled("plays"))
    assert worlds.pids == [first]
    asyncio.run(cancelled("hangs"))
    deadline = time.monotonic() + 60
    while worlds.pids and time.monotonic() < deadline:
        time.sleep(0.05)
    assert worlds.pids == []


def test_environments_are_closed_with_the_pool_and_no_process_is_left(pool, tmp_path):
    notes = tmp_path / "notes"
    worlds = pool("Fails", {"notes": str(notes)})

    async def three():
        await asyncio.gather(*(play(worlds) for _ in range(3)))

    asyncio.run(three())
    pids = worlds.pids
    worlds.close()
    assert len(notes.read_text().split()) == len(pids)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert os.getpid() not in pids


@pytest.mark.timeout(60)
def test_a_worker_is_let_go_although_its_call_was_cancelled_before_it_began():
    worker = EnvironmentWorker("Plays", "tandem.rollout.environments.worker", f"{WORLDS}:Plays", "{}")
    worker.call = Future()
    assert worker.call.cancel()  # as a pool does that is shut down with calls in its queue
    worker.kill()
    worker.release()
    assert not worker.alive
