"""Bounds of numbers, and records of the named parts of an algorithm (losses, advantages, filters …).

The configuration checks numbers and parts by them. Each record is declared and registered next to its function in
`algorithms/`. Importing `tandem` registers all of them, without importing torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

Knob = float | int | bool | str


@dataclass(frozen=True)
class KnobRule:
    """A knob of a part: its default and its allowed values."""

    default: Knob | None = None
    """The default in the function's signature. None: the default follows from other keys, see ``meaning``."""

    low: float | None = None
    """Smallest value."""

    high: float | None = None
    """Largest value."""

    above: float | None = None
    """The value must be greater than this."""

    at_most: str = ""
    """Name of another knob of the same part, which this one must not exceed."""

    also: tuple[float, ...] = ()
    """Further allowed values outside the bounds, such as 0 for off."""

    integer: bool = False
    """True: only whole numbers."""

    choices: tuple[str, ...] = ()
    """Allowed words, for a knob that is not a number. If the default is a boolean or text, the value must be so too."""

    meaning: str = ""
    """Description in one sentence."""

    def rule(self) -> str:
        """Describes the allowed values in words."""
        if self.choices or isinstance(self.default, bool | str):
            text = f"one of {', '.join(self.choices)}" if self.choices else "text"
            return "true or false" if isinstance(self.default, bool) else text
        parts = ["a whole number"] if self.integer else ["a number"]
        bounds = {"above": self.above, "at least": self.low, "at most": self.high}
        parts += [f"{word} {_shown(bound)}" for word, bound in bounds.items() if bound is not None]
        parts += [f"at most {self.at_most}"] if self.at_most else []
        return ", ".join(parts) + "".join(f", or {value:g}" for value in self.also)

    def allows(self, value: Knob) -> bool:
        """True if the value is of the right kind and inside the bounds."""
        if self.choices or isinstance(self.default, str):
            return isinstance(value, str) and (not self.choices or value in self.choices)
        if isinstance(self.default, bool):
            return isinstance(value, bool)
        if isinstance(value, (bool, str)) or (self.integer and value != int(value)):
            return False
        if value in self.also:
            return True
        return (
            (self.above is None or value > self.above)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
        )


def _shown(bound: float) -> str:
    """Formats a bound; whole numbers are shown with all their digits."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def whole(low: int, high: int | None = None) -> KnobRule:
    """Returns the bounds of a whole number, for the type of a field: ``Annotated[int, whole(1, 4096)]``."""
    return KnobRule(low=low, high=high, integer=True)


MOST_SECONDS = 1e8
"""Three years, because clocks and timers may overflow with longer durations."""

Count = Annotated[int, whole(1)]
Natural = Annotated[int, whole(0)]
Positive = Annotated[float, KnobRule(above=0.0)]
NotNegative = Annotated[float, KnobRule(low=0.0)]
Share = Annotated[float, KnobRule(low=0.0, high=1.0)]
PositiveShare = Annotated[float, KnobRule(above=0.0, high=1.0)]
Decay = Annotated[float, KnobRule(low=0.0, high=0.999999)]
Seconds = Annotated[float, KnobRule(above=0.0, high=MOST_SECONDS)]
Seed = Annotated[int, whole(0, 2**32 - 1)]
Threads = Annotated[int, whole(1, 4096)]
Workers = Annotated[int, whole(1, 1024)]
Length = Annotated[int, whole(2)]
# All rows of a step and all samples of a row are in progress at once, so more than these would fill the memory.
Rows = Annotated[int, whole(1, 10**6)]
Samples = Annotated[int, whole(1, 2**16)]


@dataclass(frozen=True)
class PartRecord:
    """The record of one named part. Reasons complete a message that ends with "because"; an empty reason means no rule."""

    formula: str = ""
    """The first paragraph of the function's docstring, in the notation of `tandem algorithms`."""

    sources: tuple[str, ...] = ()
    """arXiv numbers."""

    knobs: Mapping[str, KnobRule] = field(default_factory=dict)
    """Name of a knob → its rule."""

    asks: tuple[str, ...] = ()
    """Names of the tensors that the function takes, from its signature."""

    on_policy: str = ""
    """Reason why the part requires one optimizer step per batch, on tokens sampled by the current weights."""

    no_weight: str = ""
    """Reason why `algorithm.correction.weight` must be none."""

    sequence_ratio: bool = False
    """True for a policy loss with one ratio per trajectory: a correction weight then needs
    `algorithm.correction.level=sequence`."""

    corrects_itself: bool = False
    """True if asynchronous training needs no further correction."""

    proportional: bool = False
    """True for a policy loss whose gradient is 0 where the advantage is 0; the backward pass of such tokens is skipped."""

    whitens: bool = False
    """True for an advantage that is whitened over the tokens of the batch, unless its knob `whitened` is false."""

    keeps_rewards: bool = False
    """True for a shaping that drops samples and does not change rewards."""

    drops_outside: bool = False
    """True for a correction weight that is 0 outside of `algorithm.correction.low` and `high`."""

    known: bool = True
    """False for a user's function whose file has not been loaded yet."""

    @property
    def needs_critic(self) -> bool:
        """True for an advantage that is computed from a critic's values."""
        return "values" in self.asks

    @property
    def needs_greedy(self) -> bool:
        """True for an advantage that compares with a greedy sample of each prompt."""
        return "greedy" in self.asks

    @property
    def needs_group(self) -> bool:
        """True for an advantage that compares the samples of a prompt, so that it is 0 with one sample."""
        return {"group_id", "in_statistics"} <= set(self.asks)

    @property
    def needs_named_rewards(self) -> bool:
        """True for an advantage computed from the named parts of the reward; changes to the whole reward have no effect."""
        return "named_rewards" in self.asks and "rewards" not in self.asks

    @property
    def needs_reference(self) -> bool:
        """True for a preference loss that compares with the frozen reference."""
        return not {"reference", "chosen_reference", "rejected_reference"}.isdisjoint(self.asks)

    @property
    def needs_baseline(self) -> bool:
        """True for a preference loss that needs the mean log-ratio of mismatched completions."""
        return "baseline" in self.asks

    @property
    def is_paired(self) -> bool:
        """True for a preference loss that compares two completions of one prompt."""
        return "chosen" in self.asks


PARTS: dict[str, dict[str, PartRecord]] = {
    "shaping": {},
    "filter": {},
    "advantage": {},
    "policy_loss": {},
    "token_filter": {},
    "correction.weight": {},
    "correction.reject": {},
    "kl.estimator": {},
    "aggregation": {},
    "loss": {},
}
"""Kind of part → name → record. The kinds are fields of `AlgorithmConfig`, in the order in which a batch passes them, and
`loss` of `PreferenceConfig`."""

_OF_FILES: dict[tuple[str, str], PartRecord] = {}


def part_of(kind: str, name: str) -> PartRecord:
    """Returns the record of a registered name, or of ``my_file.py:function`` if it has been loaded; otherwise a record that
    is not ``known``."""
    return PARTS[kind].get(name) or _OF_FILES.get((kind, os.path.abspath(name))) or PartRecord(known=False)


def keep_part(kind: str, name: str, part: PartRecord) -> None:
    """Stores the record of a user's function, ``my_file.py:function``, for `part_of`."""
    _OF_FILES[kind, os.path.abspath(name)] = part
