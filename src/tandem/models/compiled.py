"""Layers whose small operations torch.compile fuses."""

import os
import shutil

import torch

from tandem.config.errors import ConfigError
from tandem.models.packed import PackedModel


def refuse_without_compiler(device: torch.device) -> None:
    """Passes if `compile_layers` finds what it needs.

    Raises:
        ConfigError: there is no compiler for programs of a CPU.
    """
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    if device.type == "cpu" and not any(name and shutil.which(name) for name in names):
        raise ConfigError(
            "actor.compile=true needs a C++ compiler on a CPU, and neither $CXX nor g++ nor clang++ is there: install one "
            "(Debian: apt-get install g++), or leave actor.compile out"
        )


def compile_layers(model: PackedModel, device: torch.device) -> None:
    """From now on norms and MLPs, which are many small operations, run as `torch.compile` fuses them.

    Attention stays as it is: it is one large operation, and its plan is another one in each micro-batch. One program serves
    all layers and any number of tokens; the first pass waits for the compiler.

    Raises:
        ConfigError: see `refuse_without_compiler`.
    """
    refuse_without_compiler(device)
    for layer in model.model.model.layers:
        for name, module in layer.named_children():
            if name == "mlp" or name.endswith("norm"):
                module.compile(dynamic=True)
