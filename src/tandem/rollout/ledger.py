"""The ledger: records the fate of each prompt of each epoch, exactly once."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.config.data import EPOCH, INDEX
from tandem.rollout.gate import StalenessGate

State = Literal["pending", "running", "waiting", "taken", "trained", "dropped"]

STATES: tuple[State, ...] = ("pending", "running", "waiting", "taken", "trained", "dropped")

# From which states a prompt may enter each.
BEFORE: dict[State, tuple[State | None, ...]] = {
    "pending": (None, "running", "waiting"),
    "running": (None, "pending"),
    "waiting": ("running",),
    "taken": ("waiting",),
    "trained": ("taken",),
    "dropped": ("running", "waiting"),
}


Record = tuple[int, int, bool, str]
"""A finished prompt: epoch, index, whether it was trained, and the reason if it was dropped."""


NO_EPOCH = -2
"""Epoch of rows without ``tandem.epoch`` and ``tandem.index``, which are numbered in order of arrival. (−1 is evaluation's.)
"""


@dataclass(frozen=True, slots=True)
class PromptId:
    """Names a prompt: its epoch, and its place in that epoch."""

    epoch: int
    index: int

    @classmethod
    def of(cls, row: Mapping[str, Any], count: int) -> "PromptId":
        """The key of a row. ``count``: the number of a row without a key of its own."""
        epoch, index = row.get(EPOCH), row.get(INDEX)
        return cls(epoch, index) if isinstance(epoch, int) and isinstance(index, int) else cls(NO_EPOCH, count)


class Ledger:
    """The ledger in memory. A prompt is ``pending`` until its episode starts, and ends as ``trained`` or ``dropped``, once.

    A prompt counts as trained when its batch is first trained on; training on that batch again changes nothing. Totals are
    updated as prompts move, so a step's cost does not depend on the size of the data set.
    """

    def __init__(self) -> None:
        self._states: dict[PromptId, State] = {}
        self._reasons: dict[PromptId, str] = {}
        self._sizes: dict[int, int] = {}
        self._totals: Counter[str] = Counter()
        self._by_epoch: dict[int, Counter[str]] = {}
        self._dropped: Counter[str] = Counter()
        self.failed_samples: Counter[str] = Counter()
        """Reason → samples that failed in groups that were trained or dropped."""

        self._moves = 0  # since everything was last counted anew
        self._ended: list[PromptId] = []

    def begin_epoch(self, epoch: int, size: int) -> None:
        """The epoch has ``size`` prompts; those not seen yet count as pending."""
        self._sizes.setdefault(epoch, size)

    def move(self, prompt: PromptId, state: State, reason: str = "") -> None:
        """Moves a prompt into ``state``. ``reason`` belongs to ``dropped``.

        Raises:
            RuntimeError: the prompt cannot enter this state from its present one; it would be lost or used twice.
        """
        before = self._states.get(prompt)
        if before not in BEFORE[state]:
            raise RuntimeError(
                f"prompt {prompt.index} of epoch {prompt.epoch} cannot become {state}: it is {before or 'new'} "
                f"{self._reasons.get(prompt, '')}; per epoch each prompt is trained once, or dropped with a reason"
            )
        of_epoch = self._by_epoch.setdefault(prompt.epoch, Counter())
        for totals in (self._totals, of_epoch):
            if before is not None:
                totals[before] -= 1
            totals[state] += 1
        self._states[prompt] = state
        self._moves += 1
        if state in ("trained", "dropped"):
            self._ended.append(prompt)  # for `take_ended`, which writes it to disk with the step
        if state == "dropped":
            self._reasons[prompt] = reason
            self._dropped[reason] += 1

    def state(self, prompt: PromptId) -> State:
        """The state of a prompt; one that was never seen is pending."""
        return self._states.get(prompt, "pending")

    def pending(self) -> list[PromptId]:
        """Prompts whose episodes had begun and have to begin again."""
        return [p for p, state in self._states.items() if state == "pending"] if self._totals["pending"] else []

    def total(self, state: State) -> int:
        """Prompts seen so far that are in this state, over all epochs."""
        return self._totals[state]

    @property
    def dropped(self) -> Mapping[str, int]:
        """Reason → prompts dropped for it since the start."""
        return dict(self._dropped)

    def epoch_totals(self, epoch: int) -> dict[str, int]:
        """State → number of prompts of one epoch. They add up to the epoch's size after `begin_epoch`."""
        kept = self._by_epoch.get(epoch, Counter())
        totals: dict[str, int] = {state: kept[state] for state in STATES}
        # Prompts that were not seen yet have no state.
        totals["pending"] += max(0, self._sizes.get(epoch, 0) - sum(totals.values()))
        return totals

    def check(self, gate: StalenessGate) -> None:
        """Compares the totals with the gate, with the number of prompts and with the reasons.

        Recounts every prompt (`recount`) once there were as many moves as prompts, which costs a constant amount per move.

        Raises:
            RuntimeError: totals that do not agree; the message says which.
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
        """Recounts every prompt of all epochs, and compares the result with the totals.

        Raises:
            RuntimeError: totals that do not agree; the message says which.
        """
        self._moves = 0
        counted, by_epoch, reasons = self._counted()
        for what, anew, kept in (
            ("totals", counted, self._totals),
            ("reasons", reasons, self._dropped),
            *((f"totals of epoch {epoch}", by_epoch[epoch], kept) for epoch, kept in self._by_epoch.items()),
        ):
            if +anew != +kept:
                raise RuntimeError(f"the ledger is inconsistent: its {what} are {dict(+kept)}, counted anew {dict(+anew)}")

    def _counted(self) -> tuple[Counter[str], dict[int, Counter[str]], Counter[str]]:
        """Totals, totals by epoch, and reasons, from the prompts themselves."""
        by_epoch: dict[int, Counter[str]] = defaultdict(Counter)
        for prompt, state in self._states.items():
            by_epoch[prompt.epoch][state] += 1
        return Counter(self._states.values()), by_epoch, Counter(self._reasons.values())

    def take_ended(self) -> list[Record]:
        """The prompts that were trained or dropped since the last call, in this order; a durable ledger stores them."""
        ended, self._ended = self._ended, []
        return [(p.epoch, p.index, self._states[p] == "trained", self._reasons.get(p, "")) for p in ended]

    def load_records(self, records: Iterable[Record], sizes: Mapping[int, int]) -> None:
        """Replaces the contents by finished prompts and the size of each epoch. All other prompts are new."""
        states = [[epoch, index, "trained" if trained else "dropped", why] for epoch, index, trained, why in records]
        self.load_state_dict({"prompts": states, "sizes": sizes.items()})

    @property
    def sizes(self) -> Mapping[int, int]:
        """Epoch → number of prompts, for each epoch that has begun."""
        return dict(self._sizes)

    def state_dict(self) -> dict[str, Any]:
        """The whole ledger as plain lists."""
        prompts = [[p.epoch, p.index, state, self._reasons.get(p, "")] for p, state in self._states.items()]
        return {"prompts": prompts, "sizes": [[epoch, size] for epoch, size in self._sizes.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents by a state of `state_dict`."""
        self._states = {PromptId(epoch, index): where for epoch, index, where, _ in state["prompts"]}
        self._reasons = {PromptId(epoch, index): why for epoch, index, where, why in state["prompts"] if where == "dropped"}
        self._sizes = dict(state["sizes"])
        self._totals, self._by_epoch, self._dropped = self._counted()
        self._moves, self._ended = 0, []
