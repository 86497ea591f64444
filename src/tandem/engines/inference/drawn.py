"""Tokens between the device that draws them and the host that writes them down."""

from dataclasses import dataclass

import torch

from tandem.engines.inference.sequences import Sequence
from tandem.models.upload import Download


@dataclass(frozen=True)
class DrawnTokens:
    """Tokens that a step has drawn, and that the host has perhaps not seen yet."""

    batch: list[Sequence]
    slots: torch.Tensor
    """``[B]``, as the tensors that follow."""

    counts: torch.Tensor
    """Tokens that each had drawn before."""

    version: int
    found: tuple[Download, ...]
    """Tokens and log-probabilities; from a device both in one float64 ``[2, B]``, which holds either exactly."""

    def home(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, on the host."""
        if len(self.found) == 2:
            return self.found[0].wait(), self.found[1].wait()
        both = self.found[0].wait()
        return both[0].long(), both[1].float()
