"""How weights reach the inference engines, and the proof that they did."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DeliveryConfig:
    """How new weights reach the inference engines; see docs/weights.md."""

    channel: Literal["auto", "disk", "collective"] = "auto"
    """`auto` takes shared memory on this machine, and a folder as soon as a server reads from one; `disk` takes the folder
    always, `collective` a process group (gloo, or nccl on GPUs)."""

    folder: str | None = None
    """Folder for weights that servers read, which they must see under the same path; null takes `.weights` in `run.root`."""


@dataclass(frozen=True)
class VerifyConfig:
    """Proof of delivery: some trajectories are scored again by the trainer, under the weights that they are stamped with."""

    every_steps: int | None = 20
    """At steps 1 and 3, and then every so many steps; null never verifies."""

    trajectories: int = 8
    """Trajectories of the batch that are scored again, of as many groups as there are."""

    tolerance: float | None = None
    """Largest mean difference of log-probabilities, in nats, before the run ends with a diagnosis; null means 0.001 where
    generation and training are in float32, and 0.1 in bfloat16."""


def delivery_problems(channel: str, backend: str, placement: str) -> Iterator[str]:
    """What of `rollout.weights` contradicts the rest; one message each."""
    if channel == "collective" and (backend != "embedded" or placement != "decoupled"):
        yield (
            f"rollout.weights.channel=collective is for one embedded engine in a process of its own, and here "
            f"rollout.backend={backend} with placement={placement}; set rollout.backend=embedded and placement=decoupled, "
            "or leave rollout.weights.channel out"
        )
