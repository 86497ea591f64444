"""Counts of one client's requests to its server, on this side."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Counters:
    """Thread-safe; ``busy_s`` is the time in which at least one request was under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._values = dict.fromkeys(("generated_tokens", "prefill_tokens", "cancelled", "busy_s", "verified_tensors"), 0.0)

    @contextmanager
    def running(self, prompt_tokens: int) -> Iterator[None]:
        with self._lock:
            self._values["prefill_tokens"] += prompt_tokens
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._values["busy_s"] += time.perf_counter() - self._since

    def add(self, name: str, count: float = 1.0) -> None:
        with self._lock:
            self._values[name] += count

    def set(self, name: str, value: float) -> None:
        with self._lock:
            self._values[name] = float(value)

    def all(self) -> dict[str, float]:
        """All of them, with ``running`` and ``waiting``."""
        with self._lock:
            busy = time.perf_counter() - self._since if self._running else 0.0
            counted = self._values | {"busy_s": self._values["busy_s"] + busy}
            return counted | {"running": float(self._running), "waiting": 0.0}
