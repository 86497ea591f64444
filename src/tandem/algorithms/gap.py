"""The gap between the engine that samples and the trainer that scores: the one definition of it."""

import torch


def gap(scored: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|scored − rollout| where ``mask`` is true, else 0; all ``[T]``, log-probabilities of the same tokens in nats."""
    return (scored - rollout).abs().masked_fill(~mask, 0.0)


def missing_share(rollout: torch.Tensor, scored: torch.Tensor, older: torch.Tensor) -> tuple[float, float]:
    """How much of the step from ``older`` to ``scored`` the sampler lacks: 0 none of it, 1 all of it; and its z-score.

    Least squares of (rollout − scored) on (older − scored), ``[K]`` log-probabilities of the same tokens under the sampler,
    the version that it names and the one before. Sees a missing update also where it is smaller than numeric noise,
    which does not point in its direction. Assumes that noise is independent between tokens.
    """
    residual, step = (rollout - scored).double(), (older - scored).double()
    square = float(step.square().sum())
    if square == 0:
        return 0.0, 0.0
    share = float((residual * step).sum()) / square
    noise = float((residual - share * step).square().mean())
    return share, share * (square / max(noise, 1e-20)) ** 0.5
