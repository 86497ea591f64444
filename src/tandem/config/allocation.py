"""Resolves `allocation` (servers and training ranks in one text) and `rollout.backend=auto`."""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tandem.config.arithmetic import placement
from tandem.config.check import problems
from tandem.config.errors import ConfigError, install_extra, nearest_names, refuse
from tandem.config.fleet import STARTED, parse_backend
from tandem.config.preference import DistillConfig, training_config
from tandem.config.train_engine import parse_layout

log = logging.getLogger(__name__)

TRAINING = ("fsdp", "deepspeed")
EXAMPLES = "vllm:d4t2+fsdp:d8 (devices of their own) or vllm:d4|fsdp:d4 (the same devices)"
LETTERS = {"d": "data", "t": "tensor", "c": "context"}
MISSING = {"p": "pipeline parallelism (p)", "e": "expert parallelism (e)", "r": "r, which actor.backend alone has,"}
AREAL = re.compile(r"(?:(?P<kind>[a-z]+)[.:])?(?P<axes>(?:[a-z][0-9]+)+)")


def resolve_allocation(text: str) -> dict[str, str]:
    """Returns the keys that an allocation sets, and their values.

    Example: ``resolve_allocation("vllm:d4t2+fsdp:d8") == {"rollout.backend": "vllm:d4t2", "actor.backend": "fsdp:d8",
    "placement": "decoupled"}``

    Raises:
        ConfigError: the text is not an allocation; the message says what to write.
    """
    if "+" in text and "|" in text:
        raise ConfigError(_malformed(text, "servers and ranks have either devices of their own (+) or the same ones (|)"))
    parts = re.split(r"[+|]", text)
    training = [part for part in parts if part.partition(":")[0] in TRAINING]
    if not training or any("." in part for part in parts):
        parts = _of_areal(text, parts)
        training = parts[-1:]
    if len(training) != 1 or parts[-1] != training[0] or len(parts) < 2:
        raise ConfigError(_malformed(text, "it is one server, or several, and then the ranks that train"))
    for part in parts:
        _refuse_letters(text, part)
    servers, actor = "+".join(parts[:-1]), parts[-1]
    together = "|" in text
    kinds = [part.partition(":")[0] for part in parts[:-1]]
    unknown = next((kind for kind in kinds if kind not in STARTED), None)
    if unknown is not None:
        raise ConfigError(_malformed(text, f"{unknown!r} is not a kind of server; {nearest_names(unknown, STARTED)}"))
    started, ranks = parse_backend(servers) or (), parse_layout(actor, "allocation").ranks
    devices = sum(kind.devices for kind in started)
    if together and devices > ranks:
        each = " + ".join(f"{kind.count} × {kind.tensor} ({kind})" for kind in started)
        raise ConfigError(
            _malformed(
                text,
                f"on the same devices (|), servers need {each} = {devices} of them, and {actor} has {ranks}: use fewer "
                f"servers, fsdp:d{devices}, or +, which needs {devices} + {ranks} = {devices + ranks} devices",
            )
        )
    return {"rollout.backend": servers, "actor.backend": actor, "placement": "colocate" if together else "decoupled"}


def check_allocation(text: str, written: Mapping[str, Any]) -> dict[str, str]:
    """Resolves an allocation as `resolve_allocation` does. ``written``: all keys that the user set → their values.

    Raises:
        ConfigError: the text is not an allocation, or one of the keys that it sets is set to another value.
    """
    keys = resolve_allocation(text)
    refuse(
        f"allocation={text} means {key}={value}, and {key}={written[key]} stands beside it: leave one of them out"
        for key, value in keys.items()
        if written.get(key, value) != value
    )
    return keys


def _of_areal(text: str, parts: list[str]) -> list[str]:
    """Converts AReaL's spelling, ``sglang.d4p1t1+d4p1t1`` or with m for t, to Tandem's; returns its parts."""
    converted = []
    for number, part in enumerate(parts):
        match = AREAL.fullmatch(part)
        last = number == len(parts) - 1
        if match is None or len(parts) != 2 or (match["kind"] is None) != last:
            raise ConfigError(_malformed(text, f"{part!r} is not understood"))
        pairs = re.findall(r"([a-z])([0-9]+)", match["axes"].replace("m", "t"))
        axes = dict(pairs)
        strange = sorted(axes.keys() - {*LETTERS, *MISSING})
        if strange or len(axes) < len(pairs):
            raise ConfigError(
                _malformed(text, f"{part}: {f'there is no letter {strange[0]}' if strange else 'a letter comes twice'}")
            )
        sizes = {letter: size for letter, size in axes.items() if letter == "d" or int(size) != 1}
        converted.append(
            f"{match['kind'] or 'fsdp'}:" + "".join(f"{letter}{sizes[letter]}" for letter in sorted(sizes, key="dtc".find))
        )
    log.warning("allocation=%s is AReaL's spelling, read as %s", text, ("|" if "|" in text else "+").join(converted))
    return converted


def _refuse_letters(text: str, part: str) -> None:
    for letter in re.findall(r"([a-z])[0-9]", part.rpartition(":")[2]):
        if letter in MISSING:
            raise ConfigError(_malformed(text, f"{part}: {MISSING[letter]} is not in this version's allocations"))
        if letter not in LETTERS:
            raise ConfigError(_malformed(text, f"{part}: there is no letter {letter}; use {', '.join(LETTERS)}"))


def _malformed(text: str, why: str) -> str:
    return f"allocation={text}: {why}. Write it as {EXAMPLES}, with d (data), t (tensor) and c (context) as letters"


@dataclass(frozen=True)
class BackendMachine:
    """The facts about the machines of a run that decide which engine generates."""

    gpus: int = 0
    """Number of GPUs that the run may use on this machine; 0: it runs on a CPU."""

    ranks: int = 1
    """Number of training ranks on this machine, each with its own GPU."""

    installed: tuple[str, ...] = ()
    """Kinds of server whose library is installed, of `vllm` and `sglang`; the first one is preferred."""

    machines: int = 1
    """Number of such machines."""


class BackendChoice(NamedTuple):
    """A value of `rollout.backend`, and the reason for it."""

    backend: str
    reason: str


def choose_backend(
    config: Any, machine: BackendMachine, before: str | None = None, written: Iterable[str] = ()
) -> BackendChoice:
    """Chooses the inference engine for `rollout.backend=auto`. ``config``: configuration of a run that generates.
    ``before``: the backend of a run that is resumed. ``written``: the keys that the user set.

    A server is chosen only if it supports the whole configuration. If `check` would refuse the configuration with a server,
    for example because of `deterministic=true` or a setting that only the embedded engine reads, the embedded engine is
    used.
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
