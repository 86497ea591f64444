"""What `actor.backend` says: how a model is laid over ranks."""

import re
from dataclasses import dataclass

from tandem.config.errors import ConfigError

_AXES = {"d": "data", "t": "tensor", "c": "context", "r": "replicas"}
_EXAMPLES = "fsdp:d2 (sharded over 2 ranks), fsdp:d1t2 (tensor parallel), fsdp:d1c2 (context parallel), fsdp:d2r2 (replicas)"


@dataclass(frozen=True)
class Layout:
    """Ranks by what they divide among themselves.

    Example: ``fsdp:d2t2`` is 4 ranks: 2 with other sequences, and of each of them 2 with a half of every matrix.
    """

    data: int = 1
    """Ranks that shard parameters, each with sequences of its own."""

    tensor: int = 1
    """Ranks that share every matrix, with the same sequences."""

    context: int = 1
    """Ranks that share the tokens of the same sequences; they shard parameters too."""

    replicas: int = 1
    """Copies of all the rest, each with sequences of its own."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.batches * self.context * self.tensor

    @property
    def batches(self) -> int:
        """How many different micro-batches are computed at a time."""
        return self.data * self.replicas

    @property
    def shards(self) -> int:
        """Pieces that a parameter, or a rank's part of it, is kept in."""
        return self.data * self.context


def parse_layout(backend: str, key: str = "actor.backend") -> Layout:
    """``fsdp:d2t2`` → its layout; ``key`` is where it stands.

    Raises:
        ConfigError: it is none, or one that is not there; says what to write.
    """
    name, _, axes = backend.partition(":")
    if name != "fsdp":
        what = "not in this version" if name in ("deepspeed", "megatron") else "not a training backend"
        raise ConfigError(f"{key}={backend}: {name!r} is {what}; use {_EXAMPLES}")
    if re.search(r"p\d", axes):
        raise ConfigError(
            f"{key}={backend}: pipeline parallelism (p) is not in this version: the layers stay together on a rank. "
            "Divide the model with d (parameters) and t (matrices) instead, for example fsdp:d4 or fsdp:d2t2"
        )
    found = re.findall(r"([a-z])([1-9]\d*)", axes)
    letters = [letter for letter, _ in found]
    if "".join(letter + number for letter, number in found) != axes or len(set(letters)) != len(letters):
        raise ConfigError(
            f"{key}={backend} must be fsdp: and letters, each with a number of at least 1 behind it: {_EXAMPLES}"
        )
    if letters[:1] != ["d"] or not set(letters) <= set(_AXES):
        raise ConfigError(f"{key}={backend} must begin with fsdp:dN, and t, c or r may follow: {_EXAMPLES}")
    return Layout(**{_AXES[letter]: int(number) for letter, number in found})
