"""The optimizer: AdamW with gradient clipping and a schedule, which skips steps that are not finite."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tandem.api.activity import did
from tandem.api.failures import NonFinite
from tandem.config.errors import ConfigError
from tandem.config.train_engine import OptimizerConfig
from tandem.engines.train.holders import Holder
from tandem.engines.train.spread import Ranks, sum_over_ranks
from tandem.engines.train.step_size import StepSize


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Returns the learning rate of optimizer step ``step`` (from 0) of ``total_steps``: a linear warm-up to the peak at step
    ``warmup_steps - 1``, then a fall towards ``min_lr_ratio`` of the peak, which the step after the last one would have."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


MOST_SKIPS = 3
"""The run stops after this many steps in a row whose loss or gradient was not finite."""


class Optimizer:
    """AdamW over the masters of a holder, with weight decay on matrices only. The schedule also counts skipped steps."""

    def __init__(self, holder: Holder, options: OptimizerConfig, total_steps: int, ranks: Ranks):
        """``total_steps``: steps of the run, for the schedule. ``ranks``: the ranks that hold the model."""
        self._holder, self._options, self._total_steps, self._ranks = holder, options, total_steps, ranks
        matrices = [p for name, p in holder.masters.items() if len(holder.shape(name)) >= 2]
        vectors = [p for name, p in holder.masters.items() if len(holder.shape(name)) < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = holder.adamw(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps)
        self.step_size = StepSize(holder, ranks)
        self._step = self._skips_in_a_row = 0

    def zero_grad(self) -> None:
        """Frees the gradients."""
        self.adamw.zero_grad()

    def move(self, device: torch.device) -> None:
        """Moves the moments to a device, unless the optimizer always runs in host memory."""
        if self._holder.in_host_memory:
            return
        for state in self.adamw.state.values():
            state.update({name: x.to(device) for name, x in state.items() if isinstance(x, torch.Tensor) and x.dim()})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, this rank's part) of each existing moment."""
        for name, master in self._holder.masters.items():
            for what, x in self.adamw.state.get(master, {}).items():
                if isinstance(x, torch.Tensor) and x.dim():
                    yield f"{name}/{what}", x.to_local() if isinstance(x, DTensor) else x

    def step(self, loss: float) -> dict[str, float]:
        """Clips the gradients and steps, or skips; returns metrics. All ranks have equal losses and norms, and decide alike.
        If the gradient is exactly 0, weights and moments do not change (no weight decay, no momentum).

        Raises:
            NonFinite: too many steps in a row had a loss or gradient that was not finite.
        """
        did()
        self.step_size.forget()
        options, norm = self._options, self._gradient_norm()
        rate = learning_rate(self._step, self._total_steps, options)
        self._step += 1
        report = {"grad_norm": norm, "lr": rate, "skipped": 0.0}
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.adamw.zero_grad()
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= MOST_SKIPS:
                raise NonFinite(
                    f"{self._skips_in_a_row} optimizer steps in a row had a loss or gradient that is not finite "
                    f"(loss {loss}, gradient norm {norm}); lower actor.optimizer.lr, or look at the rewards and advantages"
                )
            return report | {"skipped": 1.0}
        self._skips_in_a_row = 0
        if norm > 0:
            if options.max_grad_norm is not None and norm > options.max_grad_norm:
                for _, gradient in self._holder.named_local_gradients():
                    gradient.mul_(options.max_grad_norm / norm)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            with self.step_size.measured():
                self.adamw.step()
                self._holder.publish()
        self.adamw.zero_grad()
        return report

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers of steps and skips, and the moments of the masters, see `Holder.moments`."""
        moments = self._holder.moments(self.adamw)
        return {"step": self._step, "skips_in_a_row": self._skips_in_a_row, "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state with whole moments, of which each rank takes its part. Learning rates are not restored. Raises
        `ConfigError` if the state has an unknown master, or this backend cannot load its moments."""
        unknown = sorted(set(state["moments"]) - set(self._holder.masters))
        if unknown:
            raise ConfigError(f"the saved optimizer state is of another model, which has {unknown[0]!r}")
        self._step, self._skips_in_a_row = int(state["step"]), int(state["skips_in_a_row"])
        self._holder.take_moments(self.adamw, state["moments"])

    def _gradient_norm(self) -> float:
        """Returns the global L2 norm. On a CPU it is summed in float64, so that it does not depend on the sharding."""
        ranks, pieces = self._ranks, self._holder.pieces
        cut = {} if pieces is None else pieces.dims
        counted = [
            gradient  # of ranks with the same part of a gradient, only one counts it
            for name, gradient in self._holder.named_local_gradients()
            if (ranks.is_in_first_replica if name in cut else ranks.is_first_with_shard)
        ]
        total = self._holder.square_sums(counted)
        return math.sqrt(float(sum_over_ranks(total.to(self._holder.device), ranks.group)))
