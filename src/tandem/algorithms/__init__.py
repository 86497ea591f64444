"""Mathematics by name: tensors in, tensors out. Importing the room registers everything in it."""

from tandem.algorithms import (
    advantages,
    aggregation,
    behaviour_losses,
    correction,
    covariance,
    filters,
    kl,
    policy_losses,
    preference,
    returns,
    selection,
    sequence_losses,
    shaping,
)

__all__ = [
    "advantages",
    "aggregation",
    "behaviour_losses",
    "correction",
    "covariance",
    "filters",
    "kl",
    "policy_losses",
    "preference",
    "returns",
    "selection",
    "sequence_losses",
    "shaping",
]
