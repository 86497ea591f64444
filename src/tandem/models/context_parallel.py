"""Context parallelism: the tokens of one packed row are divided among ranks, whole sequences meet in attention.

Each rank has an equal piece of the row through embedding, norms, MLPs and head. For attention there are two ways:

- ``all_to_all``: a rank that had all heads of some tokens gets some heads of all tokens, attends as always, and exchanges
  back (arXiv:2309.14509). Packing, shared prompts, windows and soft-caps need nothing of their own.
- ``gather``: a rank gets the keys and values of all tokens, and attends with its own queries. Any number of heads; more to
  send where queries and keys have as many, and prompts are not shared.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from tandem.config.errors import ConfigError
from tandem.models.architecture import Architecture
from tandem.models.exchanges import exchange, gather, sum_parts


@dataclass(frozen=True)
class Context:
    """The ranks that divide a row of tokens, and this one among them."""

    group: dist.ProcessGroup
    index: int
    size: int
    way: Literal["all_to_all", "gather"] = "all_to_all"

    def padding(self, total: int) -> int:
        """Tokens to add so that every rank has as many."""
        return -total % self.size

    def rows(self, padded: int) -> slice:
        """This rank's tokens of a padded row."""
        each = padded // self.size
        return slice(self.index * each, (self.index + 1) * each)

    def tokens_for_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """``[1, heads, own tokens, D]`` → ``[1, own heads, all tokens, D]``."""
        blocks = heads[0].unflatten(0, (self.size, -1))  # [ranks, own heads, own tokens, D]
        return exchange(blocks, self.group).transpose(0, 1).flatten(1, 2)[None]

    def heads_for_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[1, all tokens, own heads, D]`` → ``[1, own tokens, heads, D]``."""
        blocks = tokens[0].unflatten(0, (self.size, -1))  # [ranks, own tokens, own heads, D]
        return exchange(blocks, self.group).transpose(0, 1).flatten(1, 2)[None]

    def gather_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """``[1, heads, own tokens, D]`` → ``[1, heads, all tokens, D]``."""
        return gather(heads[0], self.group).transpose(0, 1).flatten(1, 2)[None]

    def place(self, own: torch.Tensor) -> torch.Tensor:
        """``[own tokens]`` → ``[all tokens]``, of all ranks; on each the same."""
        each = len(own)
        return sum_parts(pad(own, (self.index * each, (self.size - 1 - self.index) * each)), self.group)


def divides_heads(architecture: Architecture, ranks: int) -> bool:
    """True if each of ``ranks`` can have as many heads."""
    return architecture.num_heads % ranks == 0 and architecture.num_kv_heads % ranks == 0


def refuse_uneven_heads(heads: int, kv_heads: int, tensor: int, context: int, key: str = "actor.backend") -> None:
    """Passes if ``tensor`` ranks times ``context`` ranks, those that exchange heads, can have as many heads each.
    ``key``: where the layout was written.

    Raises:
        ConfigError: they cannot; says how many heads there are.
    """
    if heads % (tensor * context) or kv_heads % (tensor * context):
        fits = [n for n in range(2, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
        works = f"into {', '.join(map(str, fits))} parts" if fits else "not at all"
        remedy = "actor.context_parallel=gather, which divides no heads" if tensor == 1 else "d instead of t"
        raise ConfigError(
            f"{key} with t{tensor} and c{context} divides attention by heads over {tensor * context} ranks, but "
            f"this model has {heads} heads on {kv_heads} key-value heads, which can be divided {works}; "
            f"use {remedy}"
        )
