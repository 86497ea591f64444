"""Models and libraries are kept from the garbage collector while a run goes on, unless somebody else does that."""

import contextlib
import gc
import weakref

from tandem.flow.opening import collect_and_keep, keep_from_collector

ALONE = """
import contextlib, gc, weakref
from tandem.flow.opening import collect_and_keep, keep_from_collector

class Model:
    def __init__(self):
        self.itself = self

with contextlib.ExitStack() as stack:
    model = Model()
    keep_from_collector(stack)
    assert gc.get_freeze_count() > 1000
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is not None, "the collector does not see it"
    collect_and_keep()
    assert gone() is None and gc.get_freeze_count() > 1000
assert gc.get_freeze_count() == 0

with contextlib.ExitStack() as outer:
    keep_from_collector(outer)
    with contextlib.ExitStack() as inner:
        keep_from_collector(inner)
    assert gc.get_freeze_count() > 1000, "a run inside of it has let nothing go"
with contextlib.ExitStack() as stack:
    keep_from_collector(stack)
    assert gc.get_freeze_count() > 1000, "a run is not somebody else"
assert gc.get_freeze_count() == 0
"""


def test_a_run_keeps_what_is_loaded_from_the_collector_until_it_ends(tmp_path, zygote):
    done = zygote.run(ALONE, log=tmp_path / "said")
    assert done.returncode == 0, done.stdout


class Model:
    """Refers to itself, so only the collector frees it."""

    def __init__(self):
        self.itself = self


def test_a_process_that_froze_its_objects_before_keeps_them_so():
    before, model = gc.get_freeze_count(), Model()  # the tests' own conftest has frozen
    assert before > 1000
    with contextlib.ExitStack() as stack:
        keep_from_collector(stack)
        gone = weakref.ref(model)
        del model
        collect_and_keep()
        assert gone() is None
    assert gc.get_freeze_count() <= before
