"""Metrics of a step, summed over micro-batches and ranks."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from tandem.api.activity import did


class Totals:
    """The loss, which is a sum, and metrics that are divided by their counts once, at the end."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._sums: dict[str, list[float]] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Adds a sum over ``count`` entries."""
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def add_all(self, metrics: Mapping[str, torch.Tensor], loss_mask: torch.Tensor, num_sequences: int) -> None:
        """Adds ``[T]`` metrics over the tokens of ``loss_mask [T]`` and ``[N]`` metrics over sequences; of names that end
        in ``/max`` the largest entry is kept.

        Raises:
            ValueError: a metric has neither length.
        """
        did()  # a micro-batch
        for name, value in metrics.items():
            if value.shape == loss_mask.shape:
                chosen = value[loss_mask]
            elif value.shape == (num_sequences,):
                chosen = value
            else:
                raise ValueError(
                    f"metric {name!r} must be [T] = [{len(loss_mask)}] or [N] = [{num_sequences}], got {list(value.shape)}"
                )
            if not name.endswith("/max"):
                self.add(name, float(chosen.double().sum()), chosen.numel())
            elif chosen.numel():
                self._maxima[name] = max(self._maxima.get(name, -math.inf), float(chosen.max()))

    def gather(self, group: dist.ProcessGroup | None, *, counts: bool = True) -> dict[str, float]:
        """``loss``, summed, and sum over count of each metric, over all ranks; what counted nothing is left out.

        ``counts``: false on a rank that has the same as another one.
        """
        mine = (self.loss, self._sums, self._maxima) if counts else (0.0, {}, {})
        parts = [mine]
        if group is not None:
            parts = [mine] * dist.get_world_size(group)
            dist.all_gather_object(parts, mine, group=group)
        together = Totals()
        for loss, sums, maxima in parts:
            together.loss += loss
            for name, value in maxima.items():
                together._maxima[name] = max(together._maxima.get(name, value), value)
            for name, (total, count) in sums.items():
                together.add(name, total, count)
        means = {name: total / count for name, (total, count) in together._sums.items() if count}
        return {"loss": together.loss, **means, **together._maxima}
