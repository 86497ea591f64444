"""What every test may count on."""

import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.zygote import Zygote

settings.register_profile("tandem", deadline=None)  # a busy machine is no fault of an example
settings.load_profile("tandem")

MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
ROOM_BYTES = 4 * 2**30
"""So much must be free there; what all tests together leave is a small part of it."""


def pytest_configure():
    """Folders of tests are in memory where there is room: a run waits for a disk some forty times otherwise."""
    if "PYTEST_DEBUG_TEMPROOT" in os.environ or not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free >= ROOM_BYTES and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What the test files import is never garbage: a collection would walk over it for half a second, in each run again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


MODULES = ("killing", "supervising", "colocated")
"""Files of tests/trainers whose functions tests call in processes of their own; they import torch and the trainers."""


@pytest.fixture(scope="session")
def zygote():
    """A process that has imported torch and the trainers, from which others are forked: one for all files."""
    trainers = (f"tandem.trainers.{name}" for name in ("loop", "recipes", "distill"))
    with Zygote("tests.warm", *(f"tests.trainers.{name}" for name in MODULES), *trainers) as zygote:
        yield zygote


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Commands that tests start can be interrupted, also where the tests run in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def threads_of_torch():
    """A test that computes on another number of threads leaves those after it what they had: sums are rounded by it."""
    torch = sys.modules.get("torch")
    if torch is None:  # nothing has been computed yet, and importing it takes seconds
        yield
        return
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
