"""What a sequence scores when some of its keys and values were computed under older weights, as a cache leaves them."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

PROJECTIONS = ("k_proj", "v_proj", "k_norm")
"""Modules whose results, ``[1, T, …]``, go into the cache: behind them there are only rotations without weights."""


def _projections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS:
            yield name, module


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collects the keys and values of the forward pass inside, of one sequence."""
    found: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in _projections(model):

        def keep(module: nn.Module, inputs: object, output: torch.Tensor, name: str = name) -> None:
            found[name] = output.detach().clone()

        handles.append(module.register_forward_hook(keep))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def replaying(model: nn.Module, recorded: Mapping[str, torch.Tensor], tokens: int) -> Iterator[None]:
    """The forward pass inside takes the keys and values of the first ``tokens`` tokens from ``recorded``."""
    handles = []
    for name, module in _projections(model):

        def replace(module: nn.Module, inputs: object, output: torch.Tensor, name: str = name) -> torch.Tensor:
            return torch.cat([recorded[name][:, :tokens], output[:, tokens:]], 1)

        handles.append(module.register_forward_hook(replace))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
