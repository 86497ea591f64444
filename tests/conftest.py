"""What every test may count on."""

import signal
import sys

import pytest
from hypothesis import settings

settings.register_profile("tandem", deadline=None)  # a busy machine is no fault of an example
settings.load_profile("tandem")


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
