"""The inference engine of `rollout.backend=auto`."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tandem.config.arithmetic import placement
from tandem.config.check import problems
from tandem.config.extras import install_extra
from tandem.config.preference import DistillConfig, training_config


@dataclass(frozen=True)
class BackendMachine:
    """The machine, as far as it decides which engine generates."""

    gpus: int = 0
    """GPUs that the run may use; 0: it runs on a CPU."""

    ranks: int = 1
    """Ranks of training on this machine, each with a GPU of its own."""

    installed: tuple[str, ...] = ()
    """Kinds of server whose library is there, of `vllm` and `sglang`; the first one is preferred."""

    machines: int = 1
    """Such machines that the run has."""


class BackendChoice(NamedTuple):
    """A `rollout.backend`, and why."""

    backend: str
    reason: str


def choose_backend(
    config: Any, machine: BackendMachine, before: str | None = None, written: Iterable[str] = ()
) -> BackendChoice:
    """``config``: of a run that generates, with `rollout.backend=auto`. ``before``: what the run that goes on has
    generated with so far. ``written``: the keys that the user set himself.

    A server is taken only where it does everything that the configuration asks for: what `check` refuses with it, such as
    `deterministic=true` or a setting of the embedded engine that it would not read, keeps the embedded engine.
    """
    trained = training_config(config) if isinstance(config, DistillConfig) else config
    if before is not None:
        return BackendChoice(before, "as the run began")
    if machine.gpus == 0:
        return BackendChoice("embedded", "there is no GPU")
    if not machine.installed:
        return BackendChoice(
            "embedded", f"neither vLLM nor SGLang is installed ({install_extra('vllm')}, or docs/servers.md)"
        )
    if trained.memory_limit_gib is not None:
        limit = f"memory_limit_gib={trained.memory_limit_gib:g}"
        return BackendChoice("embedded", f"{limit}, and a server would take a fixed share of the device while it generates")
    kind = machine.installed[0]
    shared = placement(trained) == "colocate"
    count = machine.ranks if shared else machine.gpus - machine.ranks
    if count < 1:
        return BackendChoice("embedded", f"training has all {machine.gpus} GPUs, which leaves none for {kind}")
    choice = BackendChoice(f"{kind}:d{count * machine.machines}", f"{kind} is installed, and there are GPUs")
    on_gpu = replace(config, device="cuda")
    known = set(problems(on_gpu, written := tuple(written)))
    served = replace(on_gpu, rollout=replace(config.rollout, backend=choice.backend))
    refused = next((problem for problem in problems(served, written) if problem not in known), None)
    return choice if refused is None else BackendChoice("embedded", refused)
