"""The optimizer step: clipped, scheduled, or skipped."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tandem.api.activity import did
from tandem.api.failures import ConfigError, NonFinite
from tandem.config.train_engine import OptimizerConfig
from tandem.engines.train.holders import Holder
from tandem.engines.train.ranks import Ranks, sum_over_ranks
from tandem.engines.train.schedule import learning_rate

MOVED = "actor/update_ratio"
LOOKED_AT = 4096
"""Weights of each master by which it is measured how far a step moves them."""


class Optimizer:
    """AdamW over the masters of a holder; matrices decay, vectors do not. The schedule counts calls, taken or skipped."""

    def __init__(self, holder: Holder, options: OptimizerConfig, total_steps: int, ranks: Ranks):
        """``total_steps``: of the run, for the schedule. ``ranks``: those over which the model is spread."""
        self._holder, self._options, self._total_steps, self._ranks = holder, options, total_steps, ranks
        matrices: list[torch.Tensor] = []
        vectors: list[torch.Tensor] = []
        for name, p in holder.masters.items():
            (matrices if len(holder.shape(name)) >= 2 else vectors).append(p)
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = holder.adamw(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps)
        self._moved: torch.Tensor | None = None
        """The sums behind `moved` of the last step, ``[2]``; None if it changed nothing, or nothing is known of it."""

        self._step = 0
        self._skips_in_a_row = 0

    def zero_grad(self) -> None:
        """Frees the gradients."""
        self.adamw.zero_grad()

    def move(self, device: torch.device) -> None:
        """Moves the moments, unless they step in host memory."""
        if self._holder.in_host_memory:
            return
        for state in self.adamw.state.values():
            state.update({name: x.to(device) for name, x in state.items() if isinstance(x, torch.Tensor) and x.dim()})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of the moments that there are, with their names."""
        for name, master in self._holder.masters.items():
            for what, x in self.adamw.state.get(master, {}).items():
                if isinstance(x, torch.Tensor) and x.dim():
                    yield f"{name}/{what}", x.to_local() if isinstance(x, DTensor) else x

    def step(self, loss: float) -> dict[str, float]:
        """Clips and steps, or skips; every rank decides the same, from the same numbers. The gradients are finished.

        A gradient that is exactly 0 leaves weights and moments as they are: no decay, no momentum.

        Raises:
            NonFinite: too many steps in a row had a loss or gradient that was not finite.
        """
        did()
        self._moved = None
        options, norm = self._options, self._gradient_norm()
        rate = learning_rate(self._step, self._total_steps, options)
        self._step += 1
        report = {"grad_norm": norm, "lr": rate, "skipped": 0.0}
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.adamw.zero_grad()
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= options.max_consecutive_skips:
                raise NonFinite(
                    f"{self._skips_in_a_row} optimizer steps in a row had a loss or gradient that is not finite "
                    f"(loss {loss}, gradient norm {norm}); lower actor.optimizer.lr, or look at the rewards and advantages"
                )
            return report | {"skipped": 1.0}
        self._skips_in_a_row = 0
        if norm > 0:
            if options.max_grad_norm is not None and norm > options.max_grad_norm:
                for gradient in self._holder.local_gradients():
                    gradient.mul_(options.max_grad_norm / norm)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            before = self._looked_at()
            self.adamw.step()
            self._holder.publish()
            if before is not None:
                self._moved = self._squares(before)
        self.adamw.zero_grad()
        return report

    def state_dict(self) -> dict[str, Any]:
        """Steps, and the moments of each master that has any; see `Holder.moments`."""
        moments = self._holder.moments(self.adamw)
        return {"step": self._step, "skips_in_a_row": self._skips_in_a_row, "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes whole moments; each rank cuts its part out of them. Learning rates are those of the options here.

        Raises:
            ConfigError: moments of a master that is not here, or that this backend cannot take.
        """
        unknown = sorted(set(state["moments"]) - set(self._holder.masters))
        if unknown:
            raise ConfigError(f"the saved optimizer state is of another model, which has {unknown[0]!r}")
        self._step, self._skips_in_a_row = int(state["step"]), int(state["skips_in_a_row"])
        self._holder.take_moments(self.adamw, state["moments"])

    def _looked_at(self) -> torch.Tensor | None:
        """Some thousand weights of each of this rank's masters, always the same ones; None where they are rounded."""
        masters = [x.to_local() if isinstance(x, DTensor) else x for x in self._holder.masters.values()]
        if any(x.dtype != torch.float32 for x in masters):
            return None
        return torch.cat([x.detach().flatten()[:: x.numel() // LOOKED_AT + 1] for x in masters])

    def moved(self) -> dict[str, float]:
        """The norm of what the last step changed of some weights, over their own; empty where no rank has them, or nothing
        was changed."""
        moved, size = (0.0, 0.0) if self._moved is None else self._moved.tolist()
        return {MOVED: math.sqrt(moved / size)} if size else {}

    def _squares(self, before: torch.Tensor) -> torch.Tensor:
        """The two sums behind `moved`, ``[2]``; the host does not wait for them."""
        after = self._looked_at()
        assert after is not None, "masters keep their type"
        sums = torch.stack([(after - before).double().square().sum(), before.double().square().sum()])
        return sum_over_ranks(sums.to(self._holder.device), self._ranks.group)

    def _gradient_norm(self) -> float:
        """Global L2 norm; on a CPU summed in float64, so that it does not depend on how parameters are cut."""
        counted = [gradient for name, gradient in self._holder.named_local_gradients() if self._counts(name)]
        total = self._holder.square_sums(counted)
        return math.sqrt(float(sum_over_ranks(total.to(self._holder.device), self._ranks.group)))

    def _counts(self, name: str) -> bool:
        """True if this rank is the one to count its part of a gradient, which others may have too."""
        pieces = self._holder.pieces
        is_cut = pieces is not None and name in pieces.dims
        return self._ranks.is_in_first_replica if is_cut else self._ranks.is_first_with_shard
