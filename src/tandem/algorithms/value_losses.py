"""The critic's loss."""

from __future__ import annotations

from tandem.api.lazy_torch import torch


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None = 0.2
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """½·max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²), 0 outside the mask (arXiv:1707.06347). All ``[T]``.

    ``clip``: None is ½(V − R)². Metrics: ``value_clip_fraction``, 1 where the clipped branch is the larger.
    """
    values, old_values, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, {}
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns).square()
    return torch.maximum(plain, bounded) / 2, {"value_clip_fraction": (bounded > plain).float().detach()}
