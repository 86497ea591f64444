"""Divides the sequences of a batch into micro-batches (forward passes) for each rank."""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from tandem.api.batch import lengths, num_sequences, sum_by_sequence
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict
from tandem.models.attention import number_prompts, prompt_keys


class PlannedSequence(NamedTuple):
    """The facts about a sequence that `plan` uses."""

    prompt: int
    """Number of the sequence's prompt; a micro-batch computes a prompt once for all sequences with this number."""

    prompt_tokens: int
    completion: int
    """Number of tokens after the prompt."""

    unit: int | None = None
    """Number of the unit: sequences of one unit stay in one micro-batch. None: the sequence is a unit by itself."""


def micro_batches(
    batch: "TensorDict", max_tokens: int, rank: int, ranks: int, chosen: torch.Tensor | None = None
) -> list[list[int]]:
    """Returns the indices of the sequences in each micro-batch of this rank, by `plan`. ``chosen [N]`` bool: only these.
    Raises `BatchError` if the batch has no sequences."""
    count = num_sequences(batch)
    if count == 0:
        raise BatchError("the batch has no sequences")
    if chosen is not None and not bool(chosen.any()):
        return []
    keys = prompt_keys(batch["input_ids"], batch["media"] if "media" in batch.keys() else None)
    prompts, sizes = number_prompts(keys, batch["cu_seqlens"].tolist(), batch["loss_mask"])
    tails = [length - size for length, size in zip(lengths(batch).tolist(), sizes, strict=True)]  # completions
    units = batch["unit_id"].tolist() if "unit_id" in batch.keys() else [None] * count
    index = list(range(count)) if chosen is None else chosen.nonzero().flatten().tolist()
    planned = plan([PlannedSequence(prompts[i], sizes[i], tails[i], units[i]) for i in index], max_tokens, ranks)[rank]
    return [[index[i] for i in micro_batch] for micro_batch in planned]


def has_weight(batch: "TensorDict") -> torch.Tensor:
    """Returns ``[N]`` bool: True where the sequence's unit has a weight other than 0, for a loss may read its whole unit."""
    weighted = (batch["loss_weights"] != 0).float()
    if len(weighted) != num_sequences(batch):
        weighted = sum_by_sequence(batch, weighted)
    if "unit_id" in batch.keys():
        unit = batch["unit_id"].unique(return_inverse=True)[1]
        weighted = weighted.new_zeros(int(unit.max()) + 1).index_add(0, unit, weighted)[unit]
    return weighted > 0


def filler() -> "TensorDict":
    """Returns a batch of two tokens, for a rank without a micro-batch that must take part in communication."""
    columns = {
        "input_ids": torch.zeros(2, dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, 2]),
        "loss_mask": torch.tensor([False, True]),
    }
    return TensorDict(columns, batch_size=[])


def plan(items: Sequence[PlannedSequence], max_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Plans the micro-batches of each rank: ``plan[rank][i]`` has the indices of the sequences in micro-batch i.

    All ranks get the same number of micro-batches, some of them empty if there are fewer units than ranks. A micro-batch
    computes at most ``max_tokens``, or one longer unit. Micro-batches have nearly equal numbers of tokens, and most nearly
    those that run at the same time on different ranks.

    Example: completions of 3, 4, 2, 5 tokens without prompts, 7 tokens, 2 ranks → [[[3, 2]], [[1, 0]]] up to order
    """
    blocks = _blocks(items, max_tokens, ranks)
    sized = sorted(((_cost(items, block), block) for block in blocks), key=lambda x: (-x[0], x[1]))
    wanted = -(-sum(min(cost, max_tokens) for cost, _ in sized) // max_tokens)
    count = ranks * max(1, -(-wanted // ranks))
    while True:
        bins = _spread(sized, count)
        if count >= len(sized) or all(tokens <= max_tokens or len(groups) == 1 for tokens, groups in bins):
            break
        count += ranks

    bins.sort(key=lambda x: (-x[0], x[1]))
    # sorted by length, so that sequences of equal length share a call of attention
    ordered = [
        sorted((i for group in groups for i in group), key=lambda i: (items[i].prompt_tokens + items[i].completion, i))
        for _, groups in bins
    ]
    rounds = [ordered[i : i + ranks] for i in range(0, count, ranks)]
    # the larger ones go to the first ranks in one round and to the last ones in the next
    rounds = [part if i % 2 == 0 else part[::-1] for i, part in enumerate(rounds)]
    return [[part[rank] for part in rounds] for rank in range(ranks)]


def _cost(items: Sequence[PlannedSequence], indices: Sequence[int]) -> int:
    """Returns the number of tokens that a micro-batch of these sequences computes."""
    prompts = {items[i].prompt: items[i].prompt_tokens for i in indices}
    return sum(prompts.values()) + sum(items[i].completion for i in indices)


def _blocks(items: Sequence[PlannedSequence], max_tokens: int, ranks: int) -> list[list[int]]:
    """Joins units of one prompt to blocks, up to ``max_tokens`` or an even share of tokens per rank, whichever is less."""
    units: dict[Hashable, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        units[("alone", index) if item.unit is None else item.unit].append(index)
    of_prompt: dict[Hashable, list[list[int]]] = defaultdict(list)
    for number, unit in units.items():
        first = items[unit[0]]
        common = first.prompt_tokens > 0 and all(items[i].prompt == first.prompt for i in unit)
        of_prompt[first.prompt if common else ("nothing shared", number)].append(unit)

    limit = min(max_tokens, max(1, -(-_cost(items, range(len(items))) // ranks)))
    blocks: list[list[int]] = []
    for parts in of_prompt.values():
        block: list[int] = []
        for unit in parts:
            if block and _cost(items, block + unit) > limit:
                blocks.append(block)
                block = []
            block = block + unit
        blocks.append(block)
    return blocks


def _spread(sized: list[tuple[int, list[int]]], count: int) -> list[tuple[int, list[list[int]]]]:
    """Puts each block, largest first, into the emptiest of ``count`` bins; returns (tokens, blocks) of each bin."""
    heap: list[tuple[int, int]] = [(0, i) for i in range(count)]
    bins: list[list[list[int]]] = [[] for _ in range(count)]
    for tokens, group in sized:
        filled, i = heapq.heappop(heap)
        bins[i].append(group)
        heapq.heappush(heap, (filled + tokens, i))
    return [(tokens, bins[i]) for tokens, i in heap]
