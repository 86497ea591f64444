"""Tensors for tests of losses: small, packed, in float64 where gradients are compared."""

import math

import torch


def policy_at(*ratios, proximal=-1.0, dtype=torch.float64):
    """Log-probabilities whose ratios to a constant proximal are these, and the proximal: ``[T]`` each."""
    return (
        torch.tensor([math.log(r) + proximal for r in ratios], dtype=dtype),
        torch.full((len(ratios),), proximal, dtype=dtype),
    )


def gradient(loss, policy, **tensors):
    """Losses [T], the gradient of their sum with respect to the policy [T], metrics."""
    policy = policy.clone().requires_grad_()
    losses, metrics = loss(policy=policy, **tensors)
    return losses.detach(), torch.autograd.grad(losses.sum(), policy)[0], metrics


def finite_difference(loss, policy, step=1e-6):
    """The same gradient by central differences; ``loss(policy)`` gives losses ``[T]``."""
    found = torch.zeros_like(policy)
    for t in range(len(policy)):
        up, down = policy.clone(), policy.clone()
        up[t] += step
        down[t] -= step
        found[t] = (loss(up).sum() - loss(down).sum()) / (2 * step)
    return found


def packed(sizes, seed=0, dtype=torch.float64, spread=0.3):
    """Random tensors of a batch with sequences of these sizes, all of them trained but for the first token of each."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    sequence = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    starts = torch.cat([torch.ones(1, dtype=torch.bool), sequence[1:] != sequence[:-1]])

    def normal(scale, mean=0.0):
        return mean + scale * torch.randn(total, generator=generator, dtype=dtype)

    proximal = normal(0.5, -2.0).clamp(max=-0.05)
    advantages = torch.randn(len(sizes), generator=generator, dtype=dtype)[sequence]
    return {
        "policy": (proximal + normal(spread)).clamp(max=-0.01),
        "proximal": proximal,
        "rollout": (proximal + normal(spread)).clamp(max=-0.01),
        "reference": normal(0.5, -2.0).clamp(max=-0.05),
        "advantages": advantages,
        "mask": ~starts,
        "sequence": sequence,
        "sample": sequence,
        "sample_lengths": torch.tensor(sizes)[sequence] - 1,
        "entropy": normal(1.0, 2.0).abs(),
        "noise": torch.rand(total, generator=generator, dtype=torch.float64),
        "ratio": torch.ones(total, dtype=dtype),
    }
