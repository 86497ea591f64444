"""The delivery of weights to the inference engines, and its proof."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class ChannelTerms(NamedTuple):
    """The needs of a channel. Whoever has to know asks this, and not for the channel's name."""

    reads: str = "disk"
    """Capability (`InferenceEngine.capabilities`) that a server needs to take weights from this channel."""

    folder: bool = True
    """True if servers read the weights from a folder, which then must be writable."""

    by_group: bool = False
    """True if tensors go to a server by a process group, which it joins."""

    on_gpu: bool = False
    """True if a version stays on the GPU of training until the next one, and the server opens that memory."""


CHANNELS = {
    "auto": ChannelTerms(),
    "disk": ChannelTerms(),
    "collective": ChannelTerms("shared_memory", folder=False, by_group=True),
    "ipc": ChannelTerms("ipc", folder=False, on_gpu=True),
}
"""Values of `rollout.weights.channel`; the classes are in `tandem.flow.delivery`."""

CANNOT_READ = {
    "ipc": "this run hands weights over in the memory of its GPU, which only a server that it started opens; leave "
    "rollout.weights.channel out, and they go by disk",
    "shared_memory": "this run hands weights over in shared memory, which it cannot read; set rollout.fleet.watch or "
    "rollout.fleet.servers, and they go by disk",
    "disk": "this run hands weights over in folders, and it reads none; start it with --weights-root and the folder that "
    "rollout.weights.folder names",
}
"""Ways to a server, the best first: the capability → why a server without it gets no weights."""


@dataclass(frozen=True)
class DeliveryConfig:
    """The delivery of new weights to the inference engines; see docs/weights.md."""

    channel: Literal["auto", "disk", "collective", "ipc"] = "auto"
    """`auto`: shared memory, or a folder if a server reads from one; `disk`: always the folder; `collective`: a process
    group (gloo, or nccl on GPUs), to one embedded engine or to vLLM and SGLang servers; `ipc`: handles of GPU memory,
    to one vLLM or SGLang server on the GPU of training."""

    folder: str | None = None
    """Folder that servers read weights from; they must see it under the same path. null takes `.weights` in `run.root`."""

    @property
    def terms(self) -> ChannelTerms:
        """The needs of the channel."""
        return CHANNELS[self.channel]

    def uses_folder(self, *, servers: bool) -> bool:
        """True if weights are written to the folder. ``servers``: the run has some that read from one."""
        return self.channel == "disk" or (servers and self.terms.folder)


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
    terms = CHANNELS[channel]
    if terms.on_gpu and watch is not None:
        yield (
            f"rollout.fleet.watch={watch} lets servers join, and rollout.weights.channel={channel} hands weights only to "
            "a server that the run starts on its own GPU; leave one of them out"
        )
    if terms.on_gpu and (backend not in ONE_SERVER or placement != "colocate" or attached):
        yield (
            f"rollout.weights.channel={channel} is for one server that the run starts on the GPU of training and that opens "
            f"this GPU's memory, and here rollout.backend={backend} with placement={placement}; set rollout.backend=vllm:d1 "
            "(or sglang:d1) and placement=colocate without rollout.fleet.servers, or leave rollout.weights.channel out"
        )
    if not terms.by_group:
        return
    kinds = [part.partition(":")[0] for part in backend.split("+") if part != "attached"]
    kinds += [text.partition("=")[0] for text in attached]
    alone = backend in ("embedded", "auto")
    if placement != "decoupled" if alone else not kinds or not set(kinds) <= set(JOINING):
        more = "" if alone else ", or for vLLM and SGLang servers only"
        yield (
            f"rollout.weights.channel={channel} is for one embedded engine in a process of its own{more}, and here "
            f"rollout.backend={backend} with placement={placement}; set rollout.backend=embedded and placement=decoupled, "
            "or leave rollout.weights.channel out"
        )
