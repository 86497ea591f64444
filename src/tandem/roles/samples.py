"""Groups the sequences of a packed batch by sample (a sample may have several trajectories) and by optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tandem.api.batch import num_sequences, select, sum_by_sequence
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.requests import StopReason


class Samples(NamedTuple):
    """The M distinct samples of a batch, in ascending order of ``sample_id``."""

    of_sequence: torch.Tensor
    """[N] int64, index (0 to M − 1) of each trajectory's sample."""

    first: torch.Tensor
    """[M] int64, index of the sample's first trajectory."""

    last: torch.Tensor
    """[M] int64, index of the sample's last trajectory, whose stop reason is the sample's."""

    lengths: torch.Tensor
    """[M] int64, T_i: number of trained tokens in all trajectories of the sample."""


def samples_of(batch: TensorDict) -> Samples:
    """Returns the samples of a batch, by ``sample_id``."""
    ids, of_sequence = torch.unique(batch["sample_id"], return_inverse=True)
    position = torch.arange(num_sequences(batch), device=ids.device)
    first = ids.new_full((len(ids),), num_sequences(batch)).scatter_reduce(0, of_sequence, position, "amin")
    last = ids.new_zeros(len(ids)).scatter_reduce(0, of_sequence, position, "amax")
    trained = sum_by_sequence(batch, trained_tokens(batch).to(torch.int64))
    return Samples(of_sequence, first, last, ids.new_zeros(len(ids)).index_add(0, of_sequence, trained))


def truncated(batch: TensorDict, samples: Samples) -> torch.Tensor:
    """True for each sample that the length limit cut off, by the stop reason of its last trajectory; ``[M]`` bool."""
    return batch["stop_reason"][samples.last] == StopReason.LENGTH


def trained_tokens(batch: TensorDict) -> torch.Tensor:
    """Returns ``loss_mask [T]`` without the first token of each sequence, which is not predicted."""
    mask, starts = batch["loss_mask"], batch["cu_seqlens"][:-1]
    first = mask.new_zeros(len(mask) + 1).index_fill(0, starts, True)  # T + 1: an empty sequence may start at T
    return mask & ~first[:-1]


def with_fields(batch: TensorDict, **fields: torch.Tensor) -> TensorDict:
    """Returns a new batch with fields added or replaced; other tensors are shared."""
    return TensorDict(dict(batch.items()) | fields, batch_size=[])


def mini_batches(batch: TensorDict, count: int, epochs: int, seed: int) -> Iterator[TensorDict]:
    """Yields the batch of each optimizer step. Groups are never split.

    Each epoch has ``count`` parts, or one per group if there are fewer groups; parts differ by at most one group.

    A single epoch takes groups in the order of the batch. With several, each epoch has its own random order, which depends
    only on the seed, the smallest group id and the epoch, so that a resumed run repeats it.
    """
    ids = torch.tensor(list(dict.fromkeys(batch["group_id"].tolist())), dtype=torch.int64)  # in order of appearance
    parts = min(count, len(ids))
    for epoch in range(epochs if parts else 0):
        order = ids
        if epochs > 1:
            key = hash((seed, int(ids.min()), epoch)) % 2**63  # a hash of integers is the same in every process
            order = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(key))]
        for chosen in torch.tensor_split(order, parts):
            yield batch if parts == 1 else select(batch, torch.isin(batch["group_id"], chosen))
