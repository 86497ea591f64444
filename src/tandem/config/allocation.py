"""`allocation`: which servers generate and which ranks train, in one word, and the keys that it stands for."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from tandem.config.backend import parse_layout
from tandem.config.errors import ConfigError, nearest_names, refuse
from tandem.config.fleet import STARTED, parse_backend

log = logging.getLogger(__name__)

TRAINING = ("fsdp", "deepspeed")
EXAMPLES = "vllm:d4t2+fsdp:d8 (devices of their own) or vllm:d4|fsdp:d4 (the same devices)"
LETTERS = {"d": "data", "t": "tensor", "c": "context"}
MISSING = {"p": "pipeline parallelism (p)", "e": "expert parallelism (e)", "r": "r, which actor.backend alone has,"}
AREAL = re.compile(r"(?:(?P<kind>[a-z]+)[.:])?(?P<axes>(?:[a-z][0-9]+)+)")


def resolve_allocation(text: str) -> dict[str, str]:
    """The keys that an allocation sets, and their values.

    Example: ``resolve_allocation("vllm:d4t2+fsdp:d8") == {"rollout.backend": "vllm:d4t2", "actor.backend": "fsdp:d8",
    "placement": "decoupled"}``

    Raises:
        ConfigError: it is none; says what to write.
    """
    if "+" in text and "|" in text:
        raise ConfigError(_told(text, "servers and ranks have either devices of their own (+) or the same ones (|)"))
    parts = re.split(r"[+|]", text)
    training = [part for part in parts if part.partition(":")[0] in TRAINING]
    if not training or any("." in part for part in parts):
        parts = _of_areal(text, parts)
        training = parts[-1:]
    if len(training) != 1 or parts[-1] != training[0] or len(parts) < 2:
        raise ConfigError(_told(text, "it is one server, or several, and then the ranks that train"))
    for part in parts:
        _refuse_letters(text, part)
    servers, actor = "+".join(parts[:-1]), parts[-1]
    together = "|" in text
    kinds = [part.partition(":")[0] for part in parts[:-1]]
    unknown = next((kind for kind in kinds if kind not in STARTED), None)
    if unknown is not None:
        raise ConfigError(_told(text, f"{unknown!r} is no server; {nearest_names(unknown, STARTED)}"))
    started, ranks = parse_backend(servers) or (), parse_layout(actor, "allocation").ranks
    devices = sum(one.devices for one in started)
    if together and devices > ranks:
        each = " + ".join(f"{one.count} × {one.tensor} ({one})" for one in started)
        raise ConfigError(
            _told(
                text,
                f"on the same devices (|), servers need {each} = {devices} of them, and {actor} has {ranks}: use fewer "
                f"servers, fsdp:d{devices}, or +, which needs {devices} + {ranks} = {devices + ranks} devices",
            )
        )
    return {"rollout.backend": servers, "actor.backend": actor, "placement": "colocate" if together else "decoupled"}


def check_allocation(text: str, written: Mapping[str, Any]) -> dict[str, str]:
    """The same; ``written``: the keys that stand beside it, with their values.

    Raises:
        ConfigError: it is none, or one of the keys says something else.
    """
    found = resolve_allocation(text)
    refuse(
        f"allocation={text} means {key}={value}, and {key}={written[key]} stands beside it: leave one of them out"
        for key, value in found.items()
        if written.get(key, value) != value
    )
    return found


def _of_areal(text: str, parts: list[str]) -> list[str]:
    """AReaL's spelling, ``sglang.d4p1t1+d4p1t1`` or with m for t, in ours."""
    found = []
    for number, part in enumerate(parts):
        match = AREAL.fullmatch(part)
        last = number == len(parts) - 1
        if match is None or len(parts) != 2 or (match["kind"] is None) != last:
            raise ConfigError(_told(text, f"{part!r} is not understood"))
        pairs = re.findall(r"([a-z])([0-9]+)", match["axes"].replace("m", "t"))
        axes = dict(pairs)
        strange = sorted(axes.keys() - {*LETTERS, *MISSING})
        if strange or len(axes) < len(pairs):
            raise ConfigError(
                _told(text, f"{part}: {f'there is no letter {strange[0]}' if strange else 'a letter comes twice'}")
            )
        kept = {letter: size for letter, size in axes.items() if letter == "d" or int(size) != 1}
        found.append(
            f"{match['kind'] or 'fsdp'}:" + "".join(f"{letter}{kept[letter]}" for letter in sorted(kept, key="dtc".find))
        )
    log.warning("allocation=%s is AReaL's spelling, read as %s", text, ("|" if "|" in text else "+").join(found))
    return found


def _refuse_letters(text: str, part: str) -> None:
    for letter in re.findall(r"([a-z])[0-9]", part.rpartition(":")[2]):
        if letter in MISSING:
            raise ConfigError(_told(text, f"{part}: {MISSING[letter]} is not in this version's allocations"))
        if letter not in LETTERS:
            raise ConfigError(_told(text, f"{part}: there is no letter {letter}; use {', '.join(LETTERS)}"))


def _told(text: str, why: str) -> str:
    return f"allocation={text}: {why}. Write it as {EXAMPLES}, with d (data), t (tensor) and c (context) as letters"
