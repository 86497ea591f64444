"""The executor closes in bounded time whatever coroutines of the user do, and says which of them would not end."""

import asyncio
import logging
import threading
import time

import pytest

from tandem.api.failures import UserCodeFailed
from tandem.rollout.event_loop import BackgroundLoop, BlockedLoop


async def goes_on():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


async def blocks(until):
    until.wait(60)


async def cleans_up(done):
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.05)
        done.append(True)


def closed(*coroutines, grace_s=0.3):
    """Seconds that closing takes while these run."""
    loop = BackgroundLoop(grace_s)
    for coroutine in coroutines:
        loop.call(asyncio.ensure_future, coroutine)
    loop.run(asyncio.sleep(0)) if coroutines[0].__name__ != "blocks" else time.sleep(0.1)
    began = time.monotonic()
    loop.close()
    loop.close()
    return time.monotonic() - began


def test_a_coroutine_that_swallows_its_cancellation_is_left_behind_and_named(caplog):
    done = []
    with caplog.at_level(logging.WARNING, "tandem.rollout"):
        assert 0.2 < closed(goes_on(), cleans_up(done)) < 3
    (record,) = caplog.records
    assert "goes_on (test_closing.py:" in record.getMessage()
    assert "CancelledError" in record.getMessage()
    assert done, "one that ends in time does what it has to do"


async def computes(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_a_coroutine_that_blocks_the_loop_is_interrupted_and_says_why():
    before = set(threading.enumerate())
    loop = BackgroundLoop(blocked_after_s=0.3)
    with pytest.raises(BlockedLoop, match=r"blocked the event loop, and all episodes share it: use await asyncio.sleep"):
        loop.run(computes(60))
    assert loop.run(asyncio.sleep(0, "it goes on")) == "it goes on"
    loop.close()
    assert set(threading.enumerate()) <= before, "no thread of it keeps what the run had in memory"


def test_a_coroutine_that_cannot_be_interrupted_ends_whoever_waits():
    told, until = [], threading.Event()
    loop = BackgroundLoop(0.1, blocked_after_s=0.3, on_blocked=told.append)
    with pytest.raises(UserCodeFailed, match=r"blocks \(test_closing.py:\d+\) has blocked the event loop for .* cannot be"):
        loop.run(blocks(until))
    assert len(told) == 1
    loop.close()
    until.set()


def test_a_coroutine_that_blocks_the_loop_is_left_behind_and_named(caplog):
    until = threading.Event()
    with caplog.at_level(logging.WARNING, "tandem.rollout"):
        assert closed(blocks(until)) < 3
    until.set()
    (record,) = caplog.records
    assert "blocks (test_closing.py:" in record.getMessage()


def test_a_task_that_was_made_as_the_loop_closed_releases_what_it_was_given():
    loop, released = BackgroundLoop(), []

    async def owner():
        try:
            await asyncio.Event().wait()
        finally:
            released.append(True)

    tasks = []
    loop.call(time.sleep, 0.3)  # the next call and the closing stand in one turn of the loop
    loop.call(lambda: tasks.append(asyncio.ensure_future(owner())))
    loop.close()
    assert released == [True] and tasks[0].cancelled()


def test_a_task_that_is_being_cancelled_finishes_its_clean_up():
    loop, done, tasks = BackgroundLoop(), [], []
    loop.call(lambda: tasks.append(asyncio.ensure_future(cleans_up(done))))
    loop.run(asyncio.sleep(0.01))
    loop.call(lambda: tasks[0].cancel())
    loop.run(asyncio.sleep(0))
    loop.close()
    assert done == [True]
