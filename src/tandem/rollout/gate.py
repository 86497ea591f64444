"""The staleness gate: how many episodes may be under way."""


class StalenessGate:
    """Counts episodes; new ones start only while `capacity` is positive, where

    ``capacity = min(max_concurrent − running, (η + 1)·B − (running + waiting + taken))``

    with B = ``batch_size`` episodes a step and η = ``max_head_offpolicyness``. *running*: under way; *waiting*: finished
    and not consumed; *taken*: in a step that has not ended. A dropped episode returns its slot. At η = 0 a batch is
    started, consumed and trained before the next one starts: synchronous training. ``max_concurrent`` None: no limit.

    Example: ``StalenessGate(batch_size=8, max_head_offpolicyness=2).capacity() == 24``
    """

    def __init__(self, batch_size: int, max_head_offpolicyness: int = 0, max_concurrent: int | None = None):
        self.batch_size, self.max_head_offpolicyness, self.max_concurrent = (
            batch_size,
            max_head_offpolicyness,
            max_concurrent,
        )
        self.running = self.waiting = self.taken = 0

    def capacity(self) -> int:
        """Number of episodes that may start now; never negative."""
        # All that is under way fits into η + 1 batches. Taken oldest first, an episode meets weights at most η versions
        # newer than those it began with; for a slow one that others overtake there is `on_expiry`.
        under_way = self.running + self.waiting + self.taken
        free = (self.max_head_offpolicyness + 1) * self.batch_size - under_way
        if self.max_concurrent is not None:
            free = min(free, self.max_concurrent - self.running)
        return max(0, free)

    def submit(self) -> None:
        """An episode starts. Raises `RuntimeError` where the gate is shut."""
        if self.capacity() < 1:
            raise RuntimeError(f"an episode was started while the staleness gate is shut: {self}")
        self.running += 1

    def finish(self) -> None:
        """An episode made its group."""
        self._leave("running")
        self.waiting += 1

    def drop(self) -> None:
        """An episode under way gives no group."""
        self._leave("running")

    def discard(self) -> None:
        """A finished group is dropped before it is consumed."""
        self._leave("waiting")

    def consume(self) -> None:
        """A finished group enters a step."""
        self._leave("waiting")
        self.taken += 1

    def end_step(self) -> None:
        """The step is over and its weights are published."""
        # only when weights are published: until then the taken groups count towards η
        self.taken = 0

    def _leave(self, count: str) -> None:
        if getattr(self, count) < 1:
            raise RuntimeError(f"an episode left {count!r}, where none was: {self}")
        setattr(self, count, getattr(self, count) - 1)

    def __repr__(self) -> str:
        names = ("running", "waiting", "taken", "batch_size", "max_head_offpolicyness", "max_concurrent")
        return f"StalenessGate({', '.join(f'{name}={getattr(self, name)}' for name in names)})"
