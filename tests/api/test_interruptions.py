"""User code that takes too long."""

import signal
import sys
import threading
import time

import pytest

from tandem.api.failures import UserCodeFailed
from tandem.api.plugins import Interrupted, interrupt, interrupted_after


def test_an_alarm_that_someone_else_has_set_still_comes():
    class Alarm(Exception):
        pass

    def ring(number, frame):
        raise Alarm

    handler, others = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        late = pytest.raises(UserCodeFailed, match=r"'mine.py:slow' took longer than 0.05 s")
        with late, interrupted_after("mine.py:slow", 0.05):
            time.sleep(5)
        with interrupted_after("mine.py:quick", 60):
            pass
        with pytest.raises(Alarm):
            time.sleep(5)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *others)  # the limit of this test


def test_nobody_with_a_profiler_waits_for_a_sleeping_thread_to_be_interrupted():
    ended, called = [], []

    def sleep():
        try:
            time.sleep(2)
        except Interrupted:
            ended.append(time.monotonic())

    thread = threading.Thread(target=sleep)
    thread.start()
    interrupt(thread)
    sys.setprofile(lambda *_: None)
    try:
        (lambda: called.append(time.monotonic()))()
    finally:
        sys.setprofile(None)
    thread.join()

    assert ended and called[0] < ended[0] - 1
