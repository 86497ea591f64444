"""The records of the named parts of an algorithm: what the configuration knows of a loss, an advantage, a filter …

Each stands beside its function in `algorithms/`, which registers it; importing `tandem` registers them all, without torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

Knob = float | int | bool | str


@dataclass(frozen=True)
class KnobRule:
    """One knob: its default, and the values that it may have."""

    default: Knob | None = None
    """The default in the function's signature. None: filled in from the rest of the configuration, see ``meaning``."""

    low: float | None = None
    """Smallest value."""

    high: float | None = None
    """Largest value."""

    above: float | None = None
    """The value must be greater than this."""

    at_most: str = ""
    """Another knob of the same part, which it must not exceed."""

    also: tuple[float, ...] = ()
    """Single values outside the bounds that are fine too, such as 0 for off."""

    integer: bool = False
    """Whole numbers only."""

    choices: tuple[str, ...] = ()
    """The words that it may be, instead of a number. A knob whose default is true or false, or text, takes only such."""

    meaning: str = ""
    """One sentence."""

    def rule(self) -> str:
        """The bounds in words, empty if there are none."""
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
    """Whole numbers with all their digits."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


@dataclass(frozen=True)
class PartRecord:
    """The record of one named part. The reasons complete "…, because"; an empty one demands nothing."""

    formula: str = ""
    """The first paragraph of the function's docstring, in the notation of `tandem algorithms`."""

    sources: tuple[str, ...] = ()
    """arXiv numbers."""

    knobs: Mapping[str, KnobRule] = field(default_factory=dict)
    """Knob → rule; the signature has the defaults."""

    asks: tuple[str, ...] = ()
    """The tensors that the function asks for, read from its signature."""

    on_policy: str = ""
    """Reason why each batch takes one optimizer step, of tokens that the same weights sampled."""

    no_weight: str = ""
    """Reason why `algorithm.correction.weight` must be none."""

    sequence_ratio: bool = False
    """It has one ratio for a whole trajectory: a correction weight must have `algorithm.correction.level=sequence`."""

    corrects_itself: bool = False
    """Asynchronous training needs no further correction."""

    proportional: bool = False
    """A policy loss without a gradient where the advantage is 0: the backward pass of such tokens is spared."""

    whitens: bool = False
    """An advantage that is whitened over the tokens of the batch, unless its knob `whitened` is false."""

    keeps_rewards: bool = False
    """A shaping that drops samples and leaves the rewards as they are."""

    drops_outside: bool = False
    """A correction weight that is 0 outside of `algorithm.correction.low` and `high`."""

    known: bool = True
    """False for a function of the user's whose file has not been loaded yet."""

    @property
    def needs_critic(self) -> bool:
        """True for an advantage made from values."""
        return "values" in self.asks

    @property
    def needs_greedy(self) -> bool:
        """True for an advantage measured against a greedy sample of each prompt."""
        return "greedy" in self.asks

    @property
    def needs_group(self) -> bool:
        """True for an advantage that compares the samples of a prompt: with one sample it is 0."""
        return {"group_id", "in_statistics"} <= set(self.asks)

    @property
    def needs_named_rewards(self) -> bool:
        """True for an advantage made from the parts of the reward: what changes the whole has no effect."""
        return "named_rewards" in self.asks and "rewards" not in self.asks

    @property
    def needs_reference(self) -> bool:
        """True for a preference loss that compares with the frozen reference."""
        return not {"reference", "chosen_reference", "rejected_reference"}.isdisjoint(self.asks)

    @property
    def needs_baseline(self) -> bool:
        """True for a preference loss that asks for the mean log-ratio of mismatched completions."""
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
"""Field of `AlgorithmConfig`, in the order in which a batch meets them, or `loss` of `PreferenceConfig` → name → record."""

_OF_FILES: dict[tuple[str, str], PartRecord] = {}


def part_of(kind: str, name: str) -> PartRecord:
    """The record of a registered name, or of ``my_file.py:function`` once it was loaded; else one that says nothing."""
    return PARTS[kind].get(name) or _OF_FILES.get((kind, os.path.abspath(name))) or PartRecord(known=False)


def keep_part(kind: str, name: str, part: PartRecord) -> None:
    """Keeps the record of a function in a file, ``my_file.py:function``, for `part_of`."""
    _OF_FILES[kind, os.path.abspath(name)] = part
