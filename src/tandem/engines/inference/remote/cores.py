"""Which cores each server that is started here computes on."""

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path


def cores_of_this_process() -> list[int]:
    """Those that it may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class Cores:
    """Hands out cores, those first that the fewest servers have; servers that were kept for this process have theirs."""

    def __init__(self, allowed: Callable[[], Sequence[int]] = cores_of_this_process) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._held: dict[object, tuple[int, ...]] = {}
        self._folders: set[Path] = set()

    def take(self, count: int | None, file: Path | None = None) -> tuple[int, ...]:
        """``count`` cores; None: all. ``file``: where the server is kept (`kept.Place`); what one of that name had is free
        again, and those beside it, which others have started, keep what they have."""
        allowed = self._allowed()
        if count is None or count >= len(allowed):
            return tuple(allowed)
        with self._lock:
            if file is not None:
                self._look(file.parent)
                self._held.pop(file, None)
            used = Counter(core for cores in self._held.values() for core in cores)
            chosen = tuple(sorted(sorted(allowed, key=lambda core: used[core])[:count]))
            self._held[file or object()] = chosen
        return chosen

    def _look(self, folder: Path) -> None:
        """Once, before a server of this process is kept there."""
        if folder in self._folders:
            return
        self._folders.add(folder)
        for file in folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # torn: nobody takes it over either
                words = json.loads(file.read_text(encoding="utf-8"))
                self._held[file] = tuple(int(core) for core in words.get(CORES_WORD, ()))


CORES_WORD = "cores"
"""What a server that is kept says of its cores."""

CORES = Cores()
