"""Context parallelism: the tokens of one packed row are divided among ranks, whole sequences meet in attention.

Each rank has an equal piece of the row through embedding, norms, MLPs and head. For attention the ranks exchange: a rank
that had all heads of some tokens gets some heads of all tokens, attends as always, and exchanges back (arXiv:2309.14509).
So packing, shared prompts, windows and soft-caps need nothing of their own.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from tandem.config.errors import ConfigError
from tandem.models.architecture import Architecture
from tandem.models.exchanges import exchange, sum_parts


@dataclass(frozen=True)
class Context:
    """The ranks that divide a row of tokens, and this one among them."""

    group: dist.ProcessGroup
    index: int
    size: int

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

    def place(self, own: torch.Tensor) -> torch.Tensor:
        """``[own tokens]`` → ``[all tokens]``, of all ranks; on each the same."""
        each = len(own)
        return sum_parts(pad(own, (self.index * each, (self.size - 1 - self.index) * each)), self.group)


def refuse_uneven_heads(architecture: Architecture, tensor: int, context: int) -> None:
    """Passes if ``tensor`` ranks times ``context`` ranks can have as many heads each.

    Raises:
        ConfigError: they cannot; says how many heads there are.
    """
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % (tensor * context) or kv_heads % (tensor * context):
        fits = [n for n in range(2, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
        works = f"t times c may be {', '.join(map(str, fits))}" if fits else "t and c must be 1"
        raise ConfigError(
            f"actor.backend wants t{tensor} and c{context}, which divide attention by heads over {tensor * context} ranks, "
            f"but this {architecture.model_type} has {heads} heads on {kv_heads} key-value heads: {works} with it; use d "
            "instead, which works with every model"
        )
