"""Weight versions, and the description of an update for its receivers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import safe_open

from tandem.api.keyed_sum import keyed_sum
from tandem.api.lazy_torch import torch
from tandem.api.weight_files import weight_files

VALUE_FILE = "value_head.safetensors"
"""The file of the value head of an actor that is a critic too; the language model beside it opens without this file."""


@dataclass(frozen=True)
class WeightVersion:
    """Identity of weights: number of updates published so far, and a digest of all tensors."""

    number: int
    digest: str = ""
    run: str = ""
    model: str = "actor"


class WeightSource(ABC):
    """The receiving end of a channel. Picklable where the engine lives in another process."""

    is_private: ClassVar[bool] = False
    """True if `tensors` yields memory of the receiver's own, which nobody else writes to."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, tensor) for every tensor of the update, each valid until the next is asked for."""

    def received_on(self, device: torch.device) -> WeightSource:
        """The source for an engine on ``device``: tensors that must be moved or read arrive there."""
        return self

    def place(self) -> Mapping[str, Any] | None:
        """The place of the tensors as JSON, for a process without Tandem; None if only `tensors` can reach them.

        ``{"folder": path}``; or of a file to be mapped ``{"memory": path, "tensors": [[name, shape, dtype, offset], …]}``;
        or of memory on a GPU ``{"handles": [handle of a bucket, …], "tensors": [[name, shape, dtype, bucket, offset], …]}``.
        """
        return None


@dataclass(frozen=True)
class FolderSource(WeightSource):
    """A Hugging Face model folder on a disk that the engine's machine sees under the same path."""

    folder: Path
    """Folder with weights (`weight_files`), ``config.json`` and the tokenizer's files, so that any server can open it."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, one file after another. Raises `OSError` if the folder is gone."""
        files = weight_files(self.folder)
        if not files:
            raise OSError(f"no weights in {self.folder}: the update was removed before it was read")
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    yield name, opened.get_tensor(name)

    def place(self) -> Mapping[str, Any]:
        """The folder, as JSON."""
        return {"folder": str(self.folder.resolve())}


@dataclass(frozen=True)
class Adapter:
    """Low-rank matrices and the weights of the model that they belong to: ``W + scaling · B A``.

    Their names are those of W with ``.lora_A.weight [r, in]`` and ``.lora_B.weight [out, r]`` at the end; both are float32.
    """

    scaling: float
    dtype: torch.dtype
    """Dtype to which the trainer rounds every W that is in the model's files."""


@dataclass(frozen=True)
class WeightUpdate:
    """One update: version, where its tensors are, and the digest of each."""

    version: WeightVersion
    source: WeightSource
    digests: Mapping[str, str]
    """Hugging Face name → hex digest of the bytes in the dtype that is delivered."""

    adapter: Adapter | None = None
    """Set if the tensors are an adapter of the model that the engine was made with; None if they are all weights."""

    key: int | None = None
    """The key of the digests: keyed sums, 16 hex digits each; None: SHA-256."""


def tensor_digest(tensor: torch.Tensor, key: int | None = None) -> str:
    """Hex digest of a tensor's bytes, row by row, in the dtype it has. Releases the GIL while it reads.

    ``key``: the digest is a keyed sum, computed where the tensor lies; None: SHA-256, computed on the CPU.
    """
    if key is not None:
        return f"{keyed_sum(tensor.detach().contiguous(), key):016x}"
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def version_digest(digests: Mapping[str, str]) -> str:
    """Hex digest of a whole version, from the name and digest of each tensor, in the order of the names."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
