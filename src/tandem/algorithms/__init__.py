"""Mathematics by name: tensors in, tensors out. Importing the room registers everything in it."""

from tandem.algorithms import (
    advantages,
    aggregation,
    correction,
    filters,
    kl,
    policy_losses,
    shaping,
)

__all__ = ["advantages", "aggregation", "correction", "filters", "kl", "policy_losses", "shaping"]
