"""The garbage collector does not walk over models and libraries while a run goes on."""

import contextlib
import gc

_kept = False
"""True while a run keeps objects from the collector. One value, because a process has one collector."""


def keep_from_collector(stack: contextlib.ExitStack) -> None:
    """Takes what is loaded by now out of the garbage collector's reach until the stack closes.

    Models and libraries are hundreds of thousands of objects that a full collection walks over again and again, up to 0.2 s
    each time, in which no request of an agent is answered and no token is drawn (benchmarks/recorder.py --no-freeze).
    A process that has called `gc.freeze` before the run keeps what it froze, and the run freezes and thaws nothing.
    """
    global _kept
    if gc.get_freeze_count():
        return
    _kept = True
    stack.callback(_let_go)
    collect_and_keep()


def collect_and_keep() -> None:
    """Collects all garbage, that of models which are gone too, and keeps the collector away from the rest."""
    if _kept:
        gc.unfreeze()
    gc.collect()
    if _kept:
        gc.freeze()


def _let_go() -> None:
    global _kept
    _kept = False
    gc.unfreeze()
