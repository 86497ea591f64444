"""The layout of a model over ranks, parsed from `actor.backend`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.config.errors import ConfigError

if TYPE_CHECKING:
    from tandem.config.train_engine import TrainEngineConfig

_AXES = {"d": "data", "t": "tensor", "c": "context", "r": "replicas"}
_EXAMPLES = (
    "fsdp:d2 (sharded over 2 ranks), fsdp:d1t2 (tensor parallel), fsdp:d1c2 (context parallel), fsdp:d2r2 (replicas), "
    "deepspeed:zero2:d2 (DeepSpeed)"
)


@dataclass(frozen=True)
class Layout:
    """The division of a model and its batch over ranks.

    Example: ``fsdp:d2t2`` is 4 ranks in 2 pairs. Each pair trains on its own sequences; each rank of a pair has half of
    every matrix.
    """

    data: int = 1
    """Number of ranks that shard parameters; each trains on its own sequences."""

    tensor: int = 1
    """Number of ranks that divide every matrix; all train on the same sequences."""

    context: int = 1
    """Number of ranks that divide the tokens of the same sequences; they shard parameters too."""

    replicas: int = 1
    """Number of copies of the model over further ranks; each copy trains on its own sequences."""

    zero: int | None = None
    """DeepSpeed's ZeRO stage, 1 to 3; None with FSDP2."""

    first: int = 0
    """First rank of the run that this model uses."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.batches * self.context * self.tensor

    @property
    def batches(self) -> int:
        """Number of different micro-batches that are computed at the same time."""
        return self.data * self.replicas

    @property
    def shards(self) -> int:
        """Number of pieces into which a parameter (with tensor parallelism: a rank's part of it) is cut."""
        return self.data * self.context


def parse_layout(backend: str, key: str = "actor.backend") -> Layout:
    """Parses ``fsdp:d2t2``, ``fsdp:d1@3`` (from rank 3 on) or ``deepspeed:zero2:d2``. ``key``: the configuration key, for
    errors.

    Raises:
        ConfigError: the text is no layout, or one that Tandem does not have; the message says what to write.
    """
    name, _, axes = backend.partition(":")
    if name == "deepspeed":
        return _zero_layout(backend, axes, key)
    if name != "fsdp":
        what = "not in this version" if name == "megatron" else "not a training backend"
        raise ConfigError(f"{key}={backend}: {name!r} is {what}; use {_EXAMPLES}")
    if re.search(r"p\d", axes):
        raise ConfigError(
            f"{key}={backend}: pipeline parallelism (p) is not in this version: the layers stay together on a rank. "
            "Divide the model with d (parameters) and t (matrices) instead, for example fsdp:d4 or fsdp:d2t2"
        )
    axes, at, first = axes.partition("@")
    if at and not re.fullmatch(r"[0-9]{1,6}", first):
        raise ConfigError(f"{key}={backend}: behind @ stands the first rank of the model, as in fsdp:d1@3")
    found = re.findall(r"([a-z])([1-9][0-9]{0,5})", axes)
    letters = [letter for letter, _ in found]
    if "".join(letter + number for letter, number in found) != axes or len(set(letters)) != len(letters):
        raise ConfigError(
            f"{key}={backend} must be fsdp: and letters, each with a number of at least 1 (and six digits at most) behind "
            f"it: {_EXAMPLES}"
        )
    if letters[:1] != ["d"] or not set(letters) <= set(_AXES):
        raise ConfigError(f"{key}={backend} must begin with fsdp:dN, and t, c or r may follow: {_EXAMPLES}")
    return Layout(**{_AXES[letter]: int(number) for letter, number in found}, first=int(first or 0))


def _zero_layout(backend: str, rest: str, key: str) -> Layout:
    """Parses the part behind ``deepspeed:``, such as ``zero2:d2``."""
    found = re.fullmatch(r"zero([123]):d([1-9][0-9]{0,5})", rest)
    if found is not None:
        return Layout(data=int(found[2]), zero=int(found[1]))
    ranks = re.search(r"\bd([0-9]{1,6})\b", rest)
    raise ConfigError(
        f"{key}={backend} must be deepspeed:zero1, zero2 or zero3, and the number of ranks, all of which shard: "
        f"deepspeed:zero2:d{ranks[1] if ranks else 2}. Tensor and context parallelism (t, c) and replicas (r) are fsdp's"
    )


def fewer_ranks_problems(layout: Layout, written: str, config: "TrainEngineConfig") -> Iterator[str]:
    """Yields a message for each reason why a model of this layout cannot use a part of the actor's ranks. ``written``: the
    key and the backend, ``critic.backend=…``. ``config``: the actor's section."""
    there = parse_layout(config.backend).ranks
    if layout.ranks > there:
        yield (
            f"{written} is {layout.ranks} rank(s), but there are {there} (actor.backend={config.backend}); use at most as "
            "many, or leave it out"
        )
    elif layout.first + layout.ranks > there:
        yield (
            f"{written} needs ranks {layout.first} to {layout.first + layout.ranks - 1}, and those of the run are 0 to "
            f"{there - 1} (actor.backend={config.backend}); put a smaller number behind @"
        )
    elif layout.ranks < there:
        if layout != Layout(data=layout.ranks, first=layout.first):
            yield (
                f"{written} is on {layout.ranks} of {there} ranks (actor.backend={config.backend}), and a model on some of "
                f"them can only be sharded (d): use fsdp:d{layout.ranks}, or all ranks"
            )
        if config.offload and layout.ranks == 1:
            yield (
                f"{written} is on one of {there} ranks, which does not go with actor.offload=true: use fsdp:d2 or more, or "
                "leave one of them out"
            )


def layout_problems(layout: Layout, written: str, config: "TrainEngineConfig") -> Iterator[str]:
    """Yields a message for each setting that does not work with a layout. ``written``: the key and the backend,
    ``actor.backend=…``."""
    if layout.tensor > 1 and config.offload:
        yield (
            f"actor.offload=true does not work with {written}: ranks that share matrices (t) exchange gradients from "
            "GPU to GPU; use d alone, or leave it out"
        )
    if layout.zero is not None and config.offload:
        yield (
            f"actor.offload=true does not work with {written}: use fsdp:d{layout.data}, whose parameters, gradients and "
            "optimizer state can be in host memory, or leave it out"
        )
    if layout.zero == 3 and config.gradient_checkpointing and config.selective_checkpointing:
        yield (
            f"actor.selective_checkpointing=true does not work with {written}, which gathers parameters inside of what "
            "would be computed again: leave it out, actor.gradient_checkpointing alone works"
        )
    if config.compile and config.gradient_checkpointing and config.selective_checkpointing:
        yield (
            f"actor.selective_checkpointing=true does not work with actor.compile=true ({written}): what is kept is then "
            "the compiler's choice; leave one of them out: actor.gradient_checkpointing alone works"
        )
    if layout.zero == 3 and config.compile:
        yield (
            f"actor.compile=true does not work with {written}, which gathers parameters inside of what would be compiled: "
            f"use deepspeed:zero2:d{layout.data} or fsdp:d{layout.data}, or leave it out"
        )
