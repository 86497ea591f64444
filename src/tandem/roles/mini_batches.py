"""A batch cut into optimizer steps: groups are never divided."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.api.batch import select
from tandem.api.lazy_torch import TensorDict, torch


def mini_batches(batch: TensorDict, count: int, epochs: int, seed: int) -> Iterator[TensorDict]:
    """``count`` parts an epoch whose numbers of groups differ by one at most; fewer parts where there are fewer groups.

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
