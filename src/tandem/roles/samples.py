"""A packed batch by samples, each of which may be held in several trajectories, and by optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tandem.api.batch import num_sequences, select, sum_by_sequence
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.requests import StopReason


class Samples(NamedTuple):
    """The M distinct samples of a batch, in the order of their numbers."""

    of_sequence: torch.Tensor
    """[N] int64, the row of each trajectory's sample here."""

    first: torch.Tensor
    """[M] int64, its first trajectory."""

    last: torch.Tensor
    """[M] int64, its last trajectory, which says how the sample ended."""

    lengths: torch.Tensor
    """[M] int64, T_i: trained tokens of all its trajectories."""


def samples_of(batch: TensorDict) -> Samples:
    """Finds them by ``sample_id``."""
    ids, of_sequence = torch.unique(batch["sample_id"], return_inverse=True)
    position = torch.arange(num_sequences(batch), device=ids.device)
    first = ids.new_full((len(ids),), num_sequences(batch)).scatter_reduce(0, of_sequence, position, "amin")
    last = ids.new_zeros(len(ids)).scatter_reduce(0, of_sequence, position, "amax")
    trained = sum_by_sequence(batch, trained_tokens(batch).to(torch.int64))
    return Samples(of_sequence, first, last, ids.new_zeros(len(ids)).index_add(0, of_sequence, trained))


def truncated(batch: TensorDict, samples: Samples) -> torch.Tensor:
    """True if each sample was cut by its length: by its last trajectory's stop reason, not by a count. ``[M]`` bool."""
    return batch["stop_reason"][samples.last] == StopReason.LENGTH


def trained_tokens(batch: TensorDict) -> torch.Tensor:
    """``loss_mask [T]`` without the first token of each sequence, which nothing predicts."""
    mask, starts = batch["loss_mask"], batch["cu_seqlens"][:-1]
    first = mask.new_zeros(len(mask) + 1).index_fill(0, starts, True)  # one more: an empty sequence may begin at the end
    return mask & ~first[:-1]


def with_fields(batch: TensorDict, **fields: torch.Tensor) -> TensorDict:
    """A new batch with more (or other) fields; tensors are shared."""
    return TensorDict(dict(batch.items()) | fields, batch_size=[])


def mini_batches(batch: TensorDict, count: int, epochs: int, seed: int) -> Iterator[TensorDict]:
    """The batch cut into optimizer steps; groups are never divided.

    ``count`` parts an epoch whose numbers of groups differ by one at most; fewer parts where there are fewer groups.

    One epoch takes groups in the order of the batch; several take them in a new order each, which follows from the seed, the
    batch's first group and the epoch alone, so that a resumed run repeats it.
    """
    ids = torch.tensor(list(dict.fromkeys(batch["group_id"].tolist())), dtype=torch.int64)  # in order of appearance
    parts = min(count, len(ids))
    for epoch in range(epochs if parts else 0):
        order = ids
        if epochs > 1:
            key = hash((seed, int(ids.min()), epoch)) % 2**63  # of integers: the same in every process
            order = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(key))]
        for chosen in torch.tensor_split(order, parts):
            yield batch if parts == 1 else select(batch, torch.isin(batch["group_id"], chosen))
