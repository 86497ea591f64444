"""Refuses a batch that the actor cannot train on."""

from __future__ import annotations

from tandem.api.batch import per_token, trained_tokens
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict


def require(batch: TensorDict, field: str, remedy: str) -> None:
    """Raises `BatchError` if the batch lacks a field that the algorithm needs. ``remedy``: the call that adds it."""
    if field not in batch.keys():
        raise BatchError(f"the batch has no {field}, which this algorithm needs; call {remedy} before")


def check_age(batch: TensorDict, version: int, bound: int) -> None:
    """Raises `BatchError` if a token in the loss is more than ``bound`` versions older than ``version``. The rollout marks
    such tokens as expired when it makes a batch, so this is the last guard."""
    if "versions" not in batch.keys():
        return
    trained = trained_tokens(batch) & ~batch["dropped"] & per_token(batch, batch["in_loss"])
    age = version - int(batch["versions"][trained].min()) if bool(trained.any()) else 0
    if age > bound:
        raise BatchError(
            f"a trained token is {age} versions old, and max_head_offpolicyness is {bound}; publish weights after each "
            "ppo_update, or mark older tokens in the field 'expired'"
        )
