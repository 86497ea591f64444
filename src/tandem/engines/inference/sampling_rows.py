"""How the rows of one step sample."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class SamplingRows:
    """What the sampler needs to know of the rows of one step; ``[B]`` unless said otherwise."""

    temperatures: torch.Tensor
    """float32."""

    uniform_temperature: bool = False
    """True: all temperatures are 1."""

    first_temperatures: torch.Tensor | None = None
    """float32, those of a reply's first token; None: no row has another one for it."""

    greedy: torch.Tensor | None = None
    """bool; None: no row is greedy."""

    top_p: torch.Tensor | None = None
    """float32; None: no row truncates by top-p or top-k. With it ``top_k`` is set, too."""

    top_k: torch.Tensor | None = None
    """int64, the vocabulary's size where it is off."""

    truncated: torch.Tensor | None = None
    """int64 ``[R]``, the rows that truncate; None: all that do are looked for."""

    minimums: bool = False
    """Whether some row has a least number of tokens."""


class Forbidden(NamedTuple):
    """Tokens that some rows may not draw."""

    rows: torch.Tensor
    """``[F]``"""

    tokens: torch.Tensor
    """``[F]``: one of those that the row may not draw."""

    limited: torch.Tensor
    """The rows, each once."""
