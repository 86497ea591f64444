"""To mean 0 and variance 1, over the entries that count."""

from __future__ import annotations

from tandem.algorithms.groups import group_statistics
from tandem.api.lazy_torch import torch

EPSILON = 1e-8


def whiten(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """(x − μ)/√(σ² + 1e-8), μ and the unbiased σ² over the entries with ``counted``; all arguments of one shape, → float64.

    Exactly 0 where the entries that count are all equal, and where there are fewer than two.
    """
    inside = values[counted].double()
    # compared exactly: the mean of equal values is rounded, and differences from it are no spread
    if len(inside) < 2 or bool(inside.max() == inside.min()):
        return torch.zeros_like(values, dtype=torch.float64)
    return (values.double() - inside.mean()) / (inside.var() + EPSILON).sqrt()


def whiten_within(values: torch.Tensor, counted: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """`whiten` of each group by itself; ``group`` numbers the group of an entry. All arguments ``[T]``, → float64."""
    own = group_statistics(values, group, counted)
    return ((values.double() - own.mean) / (own.std.square() + EPSILON).sqrt()).masked_fill(~own.has_spread, 0.0)
