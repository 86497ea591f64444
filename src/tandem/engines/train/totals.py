"""Metrics of a step, summed over micro-batches and ranks."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from tandem.api.activity import did

Numbers = tuple[float, dict[str, tuple[float, int]], dict[str, float]]
"""The loss, sums with the counts that divide them, and maxima."""


class Totals:
    """The loss, which is a sum, and metrics that are divided by their counts once, at the end.

    Until then all of it stays on the device, in float64, so that the host need not wait for a micro-batch.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(
        self,
        loss: torch.Tensor,
        metrics: Mapping[str, torch.Tensor],
        trained: torch.Tensor,
        num_tokens: int,
        num_sequences: int,
    ) -> None:
        """Adds a loss, ``[T]`` metrics over the tokens ``trained [K]`` and ``[N]`` metrics over sequences; of names that end
        in ``/max`` the largest entry is kept.

        Raises:
            ValueError: a metric has neither length.
        """
        did()  # a micro-batch
        self._loss = loss.double() if self._loss is None else self._loss + loss.double()
        for name, value in metrics.items():
            if value.shape == (num_tokens,):
                chosen = value[trained]
            elif value.shape == (num_sequences,):
                chosen = value
            else:
                raise ValueError(
                    f"metric {name!r} must be [T] = [{num_tokens}] or [N] = [{num_sequences}], got {list(value.shape)}"
                )
            if not name.endswith("/max"):
                total = chosen.double().sum()
                self._sums[name] = self._sums[name] + total if name in self._sums else total
                self._counts[name] = self._counts.get(name, 0) + chosen.numel()
            elif chosen.numel():
                largest = chosen.max().double()
                before = self._maxima.get(name, torch.full_like(largest, -math.inf))
                self._maxima[name] = torch.fmax(before, largest)  # a NaN counts for nothing

    def _numbers(self) -> Numbers:
        """All of it as plain numbers: here the host waits for the device, once."""
        if self._loss is None:
            return 0.0, {}, {}
        found = torch.stack([self._loss, *self._sums.values(), *self._maxima.values()]).tolist()
        sums, maxima = found[1 : 1 + len(self._sums)], found[1 + len(self._sums) :]
        counted = {name: (total, self._counts[name]) for name, total in zip(self._sums, sums, strict=True)}
        return found[0], counted, dict(zip(self._maxima, maxima, strict=True))

    def gather(self, group: dist.ProcessGroup | None, *, counts: bool = True) -> dict[str, float]:
        """``loss``, summed, and sum over count of each metric, over all ranks; what counted nothing is left out.

        ``counts``: false on a rank that has the same as another one.
        """
        mine: Numbers = self._numbers() if counts else (0.0, {}, {})
        parts = [mine]
        if group is not None:
            parts = [mine] * dist.get_world_size(group)
            dist.all_gather_object(parts, mine, group=group)
        sums: dict[str, tuple[float, int]] = {}
        maxima: dict[str, float] = {}
        for _, its_sums, its_maxima in parts:
            for name, value in its_maxima.items():
                maxima[name] = max(maxima.get(name, value), value)
            for name, (total, count) in its_sums.items():
                before = sums.get(name, (0.0, 0))
                sums[name] = before[0] + total, before[1] + count
        means = {name: total / count for name, (total, count) in sums.items() if count}
        return {"loss": sum(loss for loss, _, _ in parts), **means, **maxima}
