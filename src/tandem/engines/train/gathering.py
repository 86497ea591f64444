"""Whole tensors out of the rows that each rank has, many small ones by one exchange."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

BUCKET_BYTES = 32 * 2**20
"""Most bytes that travel together, unless a single tensor is larger."""

ALIGNED = 16
"""Each tensor begins at a multiple of so many bytes, where every dtype may."""


def buckets(names: Iterable[str], num_bytes: Callable[[str], int], most: int = BUCKET_BYTES) -> Iterator[list[str]]:
    """The names in their order, cut so that each part has at most so many bytes, or one name."""
    bucket: list[str] = []
    filled = 0
    for name in names:
        more = num_bytes(name)
        if bucket and filled + more > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(name)
        filled += more
    if bucket:
        yield bucket


gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Tensors of one size from all ranks; newer versions of torch warn of the second name."""


def gather_rows(
    shards: Sequence[torch.Tensor], shapes: Sequence[torch.Size], group: dist.ProcessGroup | None
) -> Iterator[torch.Tensor]:
    """The whole tensors, one after another; collective, all of it before the first.

    ``shards``: this rank's rows of each, as FSDP2 cuts them: equal numbers, the last ranks fewer or none. They travel in the
    dtype that they have.
    """
    size = dist.get_world_size(group)
    rows = [-(-shape[0] // size) for shape in shapes]
    widths = [count * shape[1:].numel() * shard.itemsize for count, shape, shard in zip(rows, shapes, shards, strict=True)]
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + -(-width // ALIGNED) * ALIGNED)
    own = shards[0].new_empty(starts[-1], dtype=torch.uint8)
    for start, shard in zip(starts, shards, strict=False):
        data = shard.contiguous().flatten().view(torch.uint8)
        own[start : start + len(data)] = data
    everybody = own.new_empty(size * len(own))
    gather_equal(everybody, own, group=group)  # as bytes: gloo does not know every dtype
    del own
    kinds = [shard.dtype for shard in shards]
    by_rank = everybody.view(size, -1)

    def wholes() -> Iterator[torch.Tensor]:
        for start, width, shape, dtype in zip(starts, widths, shapes, kinds, strict=False):
            filled = by_rank[:, start : start + width].reshape(-1).view(dtype)  # what is filled up comes last
            yield filled[: shape.numel()].view(shape)

    return wholes()
