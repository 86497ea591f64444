"""The machine, and what the libraries on it can do."""

import importlib.util
import inspect
from collections.abc import Iterator

from scripts.gpu_check import cuda_only
from scripts.gpu_check.place import Line, Place
from tandem.models import attention
from tandem.state.machine import PACKAGES, machine
from tandem.state.machine import versions as installed


def versions(place: Place) -> Iterator[Line]:
    """Names what is here; nothing of it can fail."""
    here = machine()
    yield Line("processor", f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB")
    found = installed((*PACKAGES, "triton", "flash-attn", "flash-attn-3", "vllm", "sglang"))
    yield Line("versions", ", ".join(f"{name} {version}" for name, version in found.items() if version))
    for what, told in cuda_only.described(place.device).items():
        yield Line(what, told)
    if importlib.util.find_spec("torch.nn.attention.varlen"):
        signature = inspect.signature(importlib.import_module("torch.nn.attention.varlen").varlen_attn)
        yield Line("torch's varlen_attn", str(signature))
    yield Line("attention of packed sequences", attention.KERNEL.__qualname__)
    yield Line("fewer heads of keys by torch's varlen_attn", cuda_only.fewer_heads(place.device))
