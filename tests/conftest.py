"""What every test may count on."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Commands that tests start can be interrupted, also where the tests run in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
