"""Decoder layers that torch.compile fuses, around attention that it does not look into."""

import functools
import os
import shutil

import torch
from torch import nn
from torch.utils._triton import has_triton

from tandem.config.errors import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.models.packed import PackedModel


def compiles(config: TrainEngineConfig, device: torch.device) -> bool:
    """`actor.compile`, or its default: on a GPU, where a compiler is there, results may differ in their last digits, and
    nothing else in the configuration refuses it."""
    if config.compile is not None:
        return config.compile
    refused = config.selective_checkpointing or config.backend.startswith("deepspeed:zero3")
    exact = torch.are_deterministic_algorithms_enabled()
    return device.type == "cuda" and not (refused or exact) and has_triton() and has_compiler()


def has_compiler() -> bool:
    """True if there is the C compiler that Triton needs."""
    return _has(os.environ.get("CC"), "gcc", "clang")


def _has(*names: str | None) -> bool:
    return any(name and shutil.which(name) for name in names)


def refuse_without_compiler(device: torch.device) -> None:
    """Passes if `compile_layers` finds what it needs.

    Raises:
        ConfigError: there is no compiler for programs of a CPU.
    """
    if device.type == "cpu" and not _has(os.environ.get("CXX"), "g++", "clang++"):
        raise ConfigError(
            "actor.compile=true needs a C++ compiler on a CPU, and neither $CXX nor g++ nor clang++ is there: install one "
            "(Debian: apt-get install g++), or leave actor.compile out"
        )


def compile_layers(model: PackedModel, device: torch.device) -> None:
    """From now on each layer runs as `torch.compile` fuses it: norms, rotary embeddings, activations and residuals; and the
    head's softmax.

    Attention stays as it is (`packed_attention`): it is one large operation, and its plan is another one in each
    micro-batch. Layers of a kind share their programs, for any number of tokens; the first pass waits for the compiler.

    Raises:
        ConfigError: see `refuse_without_compiler`.
    """
    refuse_without_compiler(device)
    model.compiled = True
    for layer in model.decoder.layers:
        layer.__class__ = _compiled_kind(type(layer))


@functools.cache
def _compiled_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The same layer with a compiled pass. transformers wraps the pass of each subclass with checkpointing, which no program
    may contain; so the one below is compiled, and is wrapped again."""
    inner = getattr(kind.forward, "__wrapped__", kind.forward)
    return type(f"Compiled{kind.__name__}", (kind,), {"forward": torch.compile(inner, dynamic=True)})
