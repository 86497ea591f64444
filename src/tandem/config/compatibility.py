"""What a named choice demands of the rest of the configuration, as data: what it cannot be combined with, and why."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Demands:
    """Of one choice; an empty text demands nothing. The texts complete "…, because"."""

    on_policy: str = ""
    """One optimizer step for each batch, of tokens that the same weights sampled."""

    no_weight: str = ""
    """`algorithm.correction.weight` is none."""

    sequence_weight: str = ""
    """Where there is a correction weight, `algorithm.correction.level` is sequence."""

    corrects_itself: bool = False
    """Asynchronous training needs no further correction."""

    named_rewards: str = ""
    """It takes the parts of the reward, so what changes the whole (shaping, KL in the reward) has no effect."""


_SEQUENCE = "its ratio is one for the whole trajectory, and a weight of single tokens would undo that"

POLICY_LOSSES: Mapping[str, Demands] = {
    "gspo": Demands(sequence_weight=_SEQUENCE),
    "gspo_token": Demands(sequence_weight=_SEQUENCE),
    "luspo": Demands(sequence_weight=_SEQUENCE),
    "gmpo": Demands(sequence_weight=_SEQUENCE),
    "sapo": Demands(no_weight="its gate is a trust region of its own, which a weight in front of it would move"),
    "m2po": Demands(no_weight="its ratio is that to the policy which sampled already", corrects_itself=True),
    "vespo": Demands(
        no_weight="its weight is made from the ratio to the policy which sampled already", corrects_itself=True
    ),
}

ADVANTAGES: Mapping[str, Demands] = {
    "opo": Demands(on_policy="its baseline is the best one only for the policy that sampled"),
    "gdpo": Demands(named_rewards="it judges each named reward by itself"),
}

NEEDS_CRITIC = ("gae",)
"""Advantages made from values: they need a critic."""

NEEDS_GREEDY = ("remax",)
"""Advantages measured against a greedy sample of each prompt."""


def demands(advantage: str, policy_loss: str) -> tuple[tuple[str, Demands], ...]:
    """(key=value, what it demands) of both choices."""
    return (
        (f"algorithm.advantage={advantage}", ADVANTAGES.get(advantage, Demands())),
        (f"algorithm.policy_loss={policy_loss}", POLICY_LOSSES.get(policy_loss, Demands())),
    )
