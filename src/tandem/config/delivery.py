"""The delivery of weights to the inference engines, and its proof."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DeliveryConfig:
    """The delivery of new weights to the inference engines; see docs/weights.md."""

    channel: Literal["auto", "disk", "collective", "ipc"] = "auto"
    """`auto`: shared memory, or a folder if a server reads from one; `disk`: always the folder; `collective`: a process
    group (gloo, or nccl on GPUs), to one embedded engine or to vLLM and SGLang servers; `ipc`: handles of GPU memory,
    to one vLLM or SGLang server on the GPU of training."""

    digest: Literal["sum", "sha256"] = "sum"
    """The proof that a tensor arrived: `sum`, 64 bits by keys, computed on its device; or `sha256`, on the CPU. Folders
    have `sha256` in any case."""

    folder: str | None = None
    """Folder that servers read weights from; they must see it under the same path. null takes `.weights` in `run.root`."""


@dataclass(frozen=True)
class VerifyConfig:
    """Proof of delivery: the trainer scores some trajectories again, with the weights whose version they carry."""

    every_steps: int | None = 20
    """Verify at steps 1 and 3, and then every so many steps; null turns it off."""

    trajectories: int = 8
    """Number of trajectories that are scored again, from different groups if possible."""

    tolerance: float | None = None
    """Largest mean difference of log-probabilities, in nats; beyond it the run ends, and says why if it can. null takes
    0.001 if generation and training are in float32, else 0.1."""


JOINING = ("vllm", "sglang")
"""Kinds of servers that take weights by a process group."""


ONE_SERVER = tuple(f"{kind}:{one}" for kind in JOINING for one in ("d1", "d1t1"))
"""Forms of `rollout.backend` that are one such server on one GPU."""


def delivery_problems(
    channel: str, backend: str, placement: str, attached: Sequence[str], watch: str | None
) -> Iterator[str]:
    """A message for each setting of `rollout.weights` that contradicts the rest. ``attached``: `rollout.fleet.servers`;
    ``watch``: `rollout.fleet.watch`."""
    if channel == "ipc" and watch is not None:
        yield (
            f"rollout.fleet.watch={watch} lets servers join, and rollout.weights.channel=ipc hands weights only to a server "
            "that the run starts on its own GPU; leave one of them out"
        )
    if channel == "ipc" and (backend not in ONE_SERVER or placement != "colocate" or attached):
        yield (
            "rollout.weights.channel=ipc is for one server that the run starts on the GPU of training and that opens "
            f"this GPU's memory, and here rollout.backend={backend} with placement={placement}; set rollout.backend=vllm:d1 "
            "(or sglang:d1) and placement=colocate without rollout.fleet.servers, or leave rollout.weights.channel out"
        )
    if channel != "collective":
        return
    kinds = [part.partition(":")[0] for part in backend.split("+") if part != "attached"]
    kinds += [text.partition("=")[0] for text in attached]
    alone = backend in ("embedded", "auto")
    if placement != "decoupled" if alone else not kinds or not set(kinds) <= set(JOINING):
        more = "" if alone else ", or for vLLM and SGLang servers only"
        yield (
            f"rollout.weights.channel=collective is for one embedded engine in a process of its own{more}, and here "
            f"rollout.backend={backend} with placement={placement}; set rollout.backend=embedded and placement=decoupled, "
            "or leave rollout.weights.channel out"
        )
