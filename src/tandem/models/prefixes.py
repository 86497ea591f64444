"""Prompts that several sequences share, computed once.

The samples of a group begin with the same prompt. Causal attention makes the hidden states of a prompt the same in all of
them, so a forward pass needs them once, and the gradients of all samples meet there: exact, and with eight samples to a
prompt most of the work on prompts is gone.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIN_SAVING = 0.05
"""Sharing is worth its gathers from this share of tokens on."""


@dataclass(frozen=True)
class PromptCompletions:
    """One prompt and the completions behind it, in the order in which their tokens lie in the compact row.

    Example: three samples of a prompt of 40 tokens, of 3, 9 and 5 tokens → ``PromptCompletions(40, (3, 9, 5))``, 57 compact
    tokens
    """

    length: int
    completions: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Compact tokens."""
        return self.length + sum(self.completions)


@dataclass(frozen=True)
class Compact:
    """A packed batch without repeated prompts: C tokens for T."""

    prompts: tuple[PromptCompletions, ...]
    tokens: torch.Tensor
    """``[C]``: which token of the batch stands here."""

    place: torch.Tensor
    """``[T]``: where each token of the batch stands in the compact row."""


def prompt_keys(input_ids: torch.Tensor, media: torch.Tensor | None) -> torch.Tensor:
    """The numbers that tell prompts apart, ``[T]``: `tandem.api.media.prompt_key` of tokens that lie behind each other.
    ``media [T]``: their media numbers; None: all are text."""
    return input_ids if media is None else torch.where(media != 0, media, input_ids)


def number_prompts(input_ids: torch.Tensor, bounds: Sequence[int], loss_mask: torch.Tensor) -> tuple[list[int], list[int]]:
    """A number for the prompt of each sequence, equal for equal prompts, and its length, both ``[N]``.

    The prompt is all tokens before the first one in ``loss_mask``; a sequence that has none there is all prompt. ``bounds``
    is ``cu_seqlens`` as a list; where there are media, ``input_ids`` are `prompt_keys`. Every prompt is read once: what
    comes after compares numbers.
    """
    ids, edges = input_ids.cpu().numpy(), torch.tensor(bounds)
    trained = torch.cat([loss_mask.cpu().nonzero().flatten(), edges[-1:]])
    first = trained[torch.searchsorted(trained, edges[:-1])]
    sizes = (first.minimum(edges[1:]) - edges[:-1]).tolist()
    numbers: dict[bytes, int] = {}
    prompts = (ids[start : start + size].tobytes() for start, size in zip(bounds, sizes, strict=False))
    return [numbers.setdefault(prompt, len(numbers)) for prompt in prompts], sizes


def compact(input_ids: torch.Tensor, bounds: Sequence[int], loss_mask: torch.Tensor) -> Compact | None:
    """The compact form of a packed batch; None where sharing would save too little.

    ``input_ids [T]``, as `number_prompts` takes them, ``loss_mask [T]``; ``bounds`` is ``cu_seqlens`` as a list.
    """
    numbers, sizes = number_prompts(input_ids, bounds, loss_mask)
    members: dict[int, list[int]] = defaultdict(list)
    for i, number in enumerate(numbers):
        if bounds[i] < bounds[i + 1]:
            members[number if sizes[i] else -1 - i].append(i)
    total = bounds[-1]
    saved = sum(sizes[group[0]] * (len(group) - 1) for group in members.values())
    if saved < MIN_SAVING * total or saved == 0:
        return None

    prompts, tokens, place = [], [], torch.empty(total, dtype=torch.int64)
    filled = 0
    for group in members.values():
        size, first = sizes[group[0]], bounds[group[0]]
        completions = [torch.arange(bounds[i] + size, bounds[i + 1]) for i in group]
        for i in group:
            place[bounds[i] : bounds[i] + size] = torch.arange(filled, filled + size)
        prompts.append(PromptCompletions(size, tuple(len(part) for part in completions)))
        tokens += [torch.arange(first, first + size), *completions]
        filled += size
        for part in completions:
            place[part] = torch.arange(filled, filled + len(part))
            filled += len(part)
    device = input_ids.device
    return Compact(tuple(prompts), torch.cat(tokens).to(device), place.to(device))
