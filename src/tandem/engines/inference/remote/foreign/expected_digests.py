"""The weights that a server should hold after an update, as checksums of the tensors in *its* layout."""

import hashlib
from collections.abc import Collection, Mapping

import torch

from tandem.api.failures import ServerFailed

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Name in the server → names of the parts in Hugging Face's files, one behind the other along the first dimension."""

VOCABULARY, MULTIPLE = ("embed_tokens.weight", "lm_head.weight"), 64
"""Matrices with a row for each token, and the number of rows that the server fills up to a multiple of, with zeros."""

_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}


class HeldDigests:
    """Collects the SHA-256 of each tensor that the server names, while the tensors of an update pass by.

    Only for a server on one device: a part of a tensor has no digest that we could know. ``dtype`` is the server's: what the
    update has in another precision (a model's own files, say) it holds converted.
    """

    def __init__(self, names: Collection[str], dtype: torch.dtype):
        self._names, self._dtype = frozenset(names), dtype
        self._parts: dict[str, dict[str, bytes]] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor, digest: str | None) -> None:
        """``digest``: SHA-256 of the tensor, None if nobody has computed it. Parts of a fused one are kept until the
        last has come."""
        if name in self._names:
            held = self._as_held(tensor)
            missing = -held.shape[0] % MULTIPLE if name.endswith(VOCABULARY) else 0
            if missing:
                held = torch.cat([held, held.new_zeros(missing, *held.shape[1:])])
            known = digest if held is tensor else None
            self._digests[name] = known or hashlib.sha256(tensor_bytes(held)).hexdigest()
            return
        before, _, end = name.rpartition(".")
        before, _, part = before.rpartition(".")
        fused = _FUSED_OF.get(part)
        whole = f"{before}.{fused}.{end}"
        if fused is None or whole not in self._names:
            return
        parts = self._parts.setdefault(whole, {})
        parts[part] = tensor_bytes(self._as_held(tensor))
        if len(parts) == len(FUSED[fused]):
            together = hashlib.sha256()
            for one in FUSED[fused]:
                together.update(parts[one])
            self._digests[whole] = together.hexdigest()
            del self._parts[whole]

    def _as_held(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    @property
    def digests(self) -> dict[str, str]:
        """Name in the server → SHA-256; without those that the update does not speak of."""
        return dict(self._digests)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def compare(held: Mapping[str, str], expected: Mapping[str, str], url: str) -> int:
    """Checks what a server holds against what it should; returns how many tensors agreed.

    ``held`` may have only the beginning of each digest.

    Raises:
        ServerFailed: a tensor differs, or none could be compared; names it.
    """
    agreed = 0
    for name, digest in sorted(expected.items()):
        if name in held:
            if not digest.startswith(held[name]):
                raise ServerFailed(
                    f"after the update it holds {name!r} with checksum {held[name][:12]}…, sent was {digest[:12]}…", url=url
                )
            agreed += 1
    if not agreed:
        raise ServerFailed("after the update none of its tensors could be compared with what was sent", url=url)
    return agreed


def changed(before: Mapping[str, str], after: Mapping[str, str], url: str) -> int:
    """For checksums of another kind: something must have changed; returns how many tensors did. Raises `ServerFailed`."""
    count = sum(after.get(name) != digest for name, digest in before.items())
    if not count:
        raise ServerFailed("after the update all its weights are what they were before", url=url)
    return count
