"""Which sequences go together into one forward pass, on which rank."""

import heapq
from collections import defaultdict
from collections.abc import Sequence


def plan(lengths: Sequence[int], units: Sequence[int], max_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Micro-batches of each rank: ``plan[rank][i]`` holds the indices of its sequences.

    ``lengths [N]`` tokens; ``units [N]``: sequences with equal numbers stay together. All ranks get the same number of
    micro-batches, some of them empty where there are fewer units than ranks. A micro-batch has at most ``max_tokens``,
    except that a unit which is longer has one of its own. Micro-batches have nearly equal numbers of tokens, those that
    run at the same time on different ranks most of all.

    Example: lengths 3, 4, 2, 5, units 0…3, 7 tokens, 2 ranks → [[[3, 2]], [[1, 0]]] up to order
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        members[unit].append(index)
    sized = sorted(((sum(lengths[i] for i in group), group) for group in members.values()), key=lambda x: (-x[0], x[1]))

    alone = [(tokens, [group]) for tokens, group in sized if tokens > max_tokens]
    rest = sized[len(alone) :]
    shared = -(-sum(tokens for tokens, _ in rest) // max_tokens)
    while True:
        shared += -(len(alone) + shared) % ranks  # every rank runs the same number
        bins = alone + _spread(rest, shared)
        if shared >= len(rest) or all(tokens <= max_tokens for tokens, _ in bins[len(alone) :]):
            break
        shared += 1

    bins.sort(key=lambda x: (-x[0], x[1]))
    # neighbours in length together, so that sequences of equal length share a call of attention
    ordered = [sorted((i for group in groups for i in group), key=lambda i: (lengths[i], i)) for _, groups in bins]
    rounds = [ordered[i : i + ranks] for i in range(0, len(bins), ranks)]
    # the larger ones go to the first ranks in one round and to the last ones in the next
    rounds = [part if i % 2 == 0 else part[::-1] for i, part in enumerate(rounds)]
    return [[part[rank] for part in rounds] for rank in range(ranks)]


def _spread(sized: list[tuple[int, list[int]]], count: int) -> list[tuple[int, list[list[int]]]]:
    """Puts units, largest first, into whichever of ``count`` bins has the fewest tokens."""
    heap: list[tuple[int, int]] = [(0, i) for i in range(count)]
    bins: list[list[list[int]]] = [[] for _ in range(count)]
    for tokens, group in sized:
        filled, i = heapq.heappop(heap)
        bins[i].append(group)
        heapq.heappush(heap, (filled + tokens, i))
    return [(tokens, bins[i]) for tokens, i in heap]
