"""The staleness gate and the ledger: two separate counts of the same episodes, compared with each other after each step.

The gate limits the number of unfinished and unconsumed episodes. The ledger records the outcome of each prompt of each epoch
exactly once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.config.data import EPOCH, INDEX


class StalenessGate:
    """Counts episodes. A new episode may start only while `capacity` is positive, where

    ``capacity = min(max_concurrent − running, (η + 1)·B − (running + waiting + taken))``

    with B = ``batch_size`` episodes a step and η = ``max_head_offpolicyness``. *running*: episodes not yet finished;
    *waiting*: finished and not consumed; *taken*: in a step that has not ended. A dropped episode frees its place. At η = 0
    a batch is started, consumed and trained before the next one starts (synchronous). ``max_concurrent`` None: no limit.

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
        """Returns the number of episodes that may start now, at least 0."""
        # All unfinished episodes fit into η + 1 batches. As the oldest are taken first, the weights at consumption are at
        # most η versions newer than at the start; slow episodes that others overtake are handled by `on_expiry`.
        under_way = self.running + self.waiting + self.taken
        free = (self.max_head_offpolicyness + 1) * self.batch_size - under_way
        if self.max_concurrent is not None:
            free = min(free, self.max_concurrent - self.running)
        return max(0, free)

    def submit(self) -> None:
        """Counts an episode that starts. Raises `RuntimeError` if the gate is closed."""
        if self.capacity() < 1:
            raise RuntimeError(f"an episode was started while the staleness gate is shut: {self}")
        self.running += 1

    def finish(self) -> None:
        """Moves an episode that has made its group from running to waiting."""
        self._leave("running")
        self.waiting += 1

    def drop(self) -> None:
        """Removes a running episode that will make no group."""
        self._leave("running")

    def discard(self) -> None:
        """Removes a finished group that is dropped before it is consumed."""
        self._leave("waiting")

    def consume(self) -> None:
        """Moves a finished group into the current step."""
        self._leave("waiting")
        self.taken += 1

    def end_step(self) -> None:
        """Ends the step. Call it when its weights are published."""
        # only when weights are published: until then the taken groups count towards η
        self.taken = 0

    def _leave(self, count: str) -> None:
        if getattr(self, count) < 1:
            raise RuntimeError(f"an episode left the state {count!r}, which had no episode: {self}")
        setattr(self, count, getattr(self, count) - 1)

    def __repr__(self) -> str:
        names = ("running", "waiting", "taken", "batch_size", "max_head_offpolicyness", "max_concurrent")
        return f"StalenessGate({', '.join(f'{name}={getattr(self, name)}' for name in names)})"


State = Literal["pending", "running", "waiting", "taken", "trained", "dropped"]

# The states from which a prompt may enter each state.
BEFORE: dict[State, tuple[State | None, ...]] = {
    "pending": (None, "running", "waiting"),
    "running": (None, "pending"),
    "waiting": ("running",),
    "taken": ("waiting",),
    "trained": ("taken",),
    "dropped": ("running", "waiting"),
}


Record = tuple[int, int, bool, str]
"""A finished prompt: epoch, index, True if it was trained, and the reason if it was dropped."""


NO_EPOCH = -2
"""Epoch of rows without ``tandem.epoch`` and ``tandem.index``, which are numbered in order of arrival. (Rows of an
evaluation have epoch −1.)"""


@dataclass(frozen=True, slots=True)
class PromptId:
    """Identifies a prompt by its epoch and its index in that epoch."""

    epoch: int
    index: int

    @classmethod
    def of(cls, row: Mapping[str, Any], count: int) -> "PromptId":
        """Returns the id of a row. ``count``: the number used for a row without ``tandem.epoch`` and ``tandem.index``."""
        epoch, index = row.get(EPOCH), row.get(INDEX)
        return cls(epoch, index) if isinstance(epoch, int) and isinstance(index, int) else cls(NO_EPOCH, count)


class Ledger:
    """Ledger in memory. A prompt is ``pending`` until its episode starts, and ends once, as ``trained`` or ``dropped``.

    A prompt counts as trained when its batch is first trained on; repeated training on the batch changes nothing. Totals are
    updated with each move, so the cost of a step does not depend on the size of the data set.
    """

    def __init__(self) -> None:
        self._states: dict[PromptId, State] = {}
        self._reasons: dict[PromptId, str] = {}
        self._sizes: dict[int, int] = {}
        self._totals: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self.failed_samples: Counter[str] = Counter()
        """Number of failed samples by reason, in groups that were trained or dropped."""

        self._moves = 0  # moves since the last full recount
        self._ended: list[PromptId] = []

    def begin_epoch(self, epoch: int, size: int) -> None:
        """Sets the size of an epoch in prompts; prompts not seen yet count as pending."""
        self._sizes.setdefault(epoch, size)

    def move(self, prompt: PromptId, state: State, reason: str = "") -> None:
        """Moves a prompt into ``state``. ``reason`` is required for ``dropped`` only.

        Raises:
            RuntimeError: the prompt cannot enter this state from its present one, because it would be lost or used twice.
        """
        before = self._states.get(prompt)
        if before not in BEFORE[state]:
            raise RuntimeError(
                f"prompt {prompt.index} of epoch {prompt.epoch} cannot become {state}: it is {before or 'new'} "
                f"{self._reasons.get(prompt, '')}; per epoch each prompt is trained once, or dropped with a reason"
            )
        if before is not None:
            self._totals[before] -= 1
        self._totals[state] += 1
        self._states[prompt] = state
        self._moves += 1
        if state in ("trained", "dropped"):
            self._ended.append(prompt)  # for `take_ended`: the step's record on disk includes these
        if state == "dropped":
            self._reasons[prompt] = reason
            self._dropped[reason] += 1

    def state(self, prompt: PromptId) -> State:
        """Returns the state of a prompt; a prompt not seen yet is pending."""
        return self._states.get(prompt, "pending")

    def pending(self) -> list[PromptId]:
        """Returns the prompts whose episodes had started and must begin again."""
        return [p for p, state in self._states.items() if state == "pending"] if self._totals["pending"] else []

    def total(self, state: State) -> int:
        """Returns the number of prompts in this state, over all epochs."""
        return self._totals[state]

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of dropped prompts since the start, by reason."""
        return dict(self._dropped)

    def check(self, gate: StalenessGate) -> None:
        """Compares the totals with the gate, the number of prompts and the reasons.

        Recounts every prompt (`recount`) after as many moves as there are prompts, at a constant average cost for each move.

        Raises:
            RuntimeError: totals that disagree; the message names them.
        """
        for state, counted in (("running", gate.running), ("waiting", gate.waiting), ("taken", gate.taken)):
            if self._totals[state] != counted:
                raise RuntimeError(
                    f"the ledger is inconsistent: {self._totals[state]} prompts are {state}, the gate says {counted}"
                )
        if self._totals.total() != len(self._states):
            raise RuntimeError(f"the ledger is inconsistent: {len(self._states)} prompts, totals {dict(self._totals)}")
        if self._dropped.total() != self._totals["dropped"]:
            raise RuntimeError(
                f"the ledger is inconsistent: {self._totals['dropped']} dropped, reasons {dict(self._dropped)}"
            )
        if self._moves >= len(self._states):
            self.recount()

    def recount(self) -> None:
        """Recounts every prompt of all epochs and compares the result with the totals.

        Raises:
            RuntimeError: totals that disagree; the message names them.
        """
        self._moves = 0
        totals, reasons = self._counted()
        for name, recounted, recorded in (("totals", totals, self._totals), ("reasons", reasons, self._dropped)):
            if +recounted != +recorded:
                raise RuntimeError(
                    f"the ledger is inconsistent: its {name} are {dict(+recorded)}, counted anew {dict(+recounted)}"
                )

    def _counted(self) -> tuple[Counter[str], Counter[str]]:
        """Counts the prompts anew. Returns the totals, and the reasons of dropped prompts."""
        return Counter(self._states.values()), Counter(self._reasons.values())

    def take_ended(self) -> list[Record]:
        """Returns the prompts trained or dropped since the last call, in this order; a durable ledger stores them."""
        ended, self._ended = self._ended, []
        return [(p.epoch, p.index, self._states[p] == "trained", self._reasons.get(p, "")) for p in ended]

    def load_records(self, records: Iterable[Record], sizes: Mapping[int, int]) -> None:
        """Replaces the contents by finished prompts and the size of each epoch. All other prompts count as not seen."""
        states = [[epoch, index, "trained" if trained else "dropped", why] for epoch, index, trained, why in records]
        self.load_state_dict({"prompts": states, "sizes": sizes.items()})

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of prompts of each epoch that has begun."""
        return dict(self._sizes)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole ledger as plain lists."""
        prompts = [[p.epoch, p.index, state, self._reasons.get(p, "")] for p, state in self._states.items()]
        return {"prompts": prompts, "sizes": [[epoch, size] for epoch, size in self._sizes.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents by a state that `state_dict` returned."""
        self._states = {PromptId(epoch, index): where for epoch, index, where, _ in state["prompts"]}
        self._reasons = {PromptId(epoch, index): why for epoch, index, where, why in state["prompts"] if where == "dropped"}
        self._sizes = dict(state["sizes"])
        self._totals, self._dropped = self._counted()
        self._moves, self._ended = 0, []
