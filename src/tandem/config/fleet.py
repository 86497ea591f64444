"""Fleets of inference servers: parses `rollout.backend`, and defines `rollout.fleet`."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from tandem.config.errors import ConfigError, nearest_names
from tandem.config.parts import MOST_SECONDS, Knob, KnobRule, Natural, PositiveShare, Seconds

STARTED = ("embedded", "tandem", "vllm", "sglang")
"""Kinds of server that a run starts itself, ``KIND:dN`` in `rollout.backend`."""

TENSOR = ("vllm", "sglang")
"""Kinds of server that can use several GPUs each."""

ATTACHED = ("tandem", "vllm", "sglang")
"""Kinds of server that a run can attach to by their address."""

INSIDE = ("embedded", "auto")
"""Values of `rollout.backend` for the embedded engine. `auto` counts as embedded until it is resolved
(`tandem.config.allocation`)."""

ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")


@dataclass(frozen=True)
class Servers:
    """Servers of one kind that the run starts."""

    kind: str
    count: int
    tensor: int = 1
    """Number of GPUs of each server, by tensor parallelism."""

    @property
    def devices(self) -> int:
        """Number of GPUs of all servers together."""
        return self.count * self.tensor

    def __str__(self) -> str:
        return f"{self.kind}:d{self.count}" + (f"t{self.tensor}" if self.tensor > 1 else "")


class Address(NamedTuple):
    """Kind and URL of a server that the run did not start."""

    kind: str
    url: str

    def __str__(self) -> str:
        return f"{self.kind}={self.url}"


SUSPECT_AFTER_S = 4.0
"""Seconds without a token after which a server gets no new requests."""


@dataclass(frozen=True)
class FleetConfig:
    """Inference servers, for every `rollout.backend` except `embedded`."""

    servers: tuple[str, ...] = ()
    """Running servers to attach to, each as `KIND=URL` with KIND one of tandem, vllm, sglang."""

    watch: str | None = None
    """A file, or a folder of files, with one `KIND=URL` per line. It is read every second, so servers may join and leave
    during the run. null: the file `servers` in the run folder, which `tandem fleet add` writes."""

    vllm_python: str | None = None
    """Python interpreter of the environment that has vLLM, for `vllm:dN`; null takes the one that runs Tandem."""

    sglang_python: str | None = None
    """Python interpreter of the environment that has SGLang, for `sglang:dN`; null takes the one that runs Tandem."""

    token_file: str | None = None
    """File with the token (API key) of attached servers; null sends none."""

    admin_token_file: str | None = None
    """File with the token of the control routes of attached `tandem serve` servers; null sends none."""

    memory_share: PositiveShare | None = None
    """Share of a GPU's memory for a vLLM or SGLang server that the run starts; null: 0.9 on its own devices, 0.4 if it
    shares them with training (`placement=colocate`)."""

    sleep: bool | None = None
    """vLLM and SGLang servers on the training GPUs free the memory of their cache (sleep) while the models train. null: true
    if the run starts all its servers (`placement=colocate`). With `memory_limit_gib` they always sleep."""

    options: Mapping[str, Knob] = field(default_factory=dict)
    """Further command-line options of the servers that the run starts, without their dashes, such as
    `{max-num-batched-tokens: 8192, enforce-eager: true}`. Unknown options are refused before the run starts."""

    startup_timeout_s: Seconds = 600.0
    """Maximum seconds for a server that the run starts to load its model, and for requests to wait while no server is
    healthy; then the run ends."""

    stall_timeout_s: Annotated[float, KnobRule(above=SUSPECT_AFTER_S, high=MOST_SECONDS)] = 60.0
    """A server that has generated no token for this long is fenced: its requests move to other servers. After 4 s it gets
    no new requests."""

    max_restarts: Natural = 3
    """Maximum number of restarts per hour of a server that the run has started."""

    finish_before_update: bool = False
    """Before switching to new weights, hold new requests back and let running ones finish, instead of interrupting them."""

    drain_timeout_s: Seconds = 120.0
    """Maximum seconds for a leaving server to finish its requests, and for `finish_before_update` to wait. Requests that are
    still running afterwards are moved or interrupted."""


def parse_backend(backend: str) -> tuple[Servers, ...] | None:
    """Returns the servers that the run starts, in order; None for the embedded engine inside the run.

    Example: ``parse_backend("embedded:d1+vllm:d2t4") == (Servers("embedded", 1), Servers("vllm", 2, 4))``,
    ``parse_backend("attached") == ()``

    Raises:
        ConfigError: the text has none of these forms; the message lists them.
    """
    if backend in INSIDE:
        return None
    if backend == "attached":
        return ()
    started: list[Servers] = []
    for part in backend.split("+"):
        kind, _, count = part.partition(":")
        if kind not in STARTED or part in STARTED:
            raise ConfigError(_not_a_backend(backend, kind, part))
        sizes = re.fullmatch(r"d([1-9][0-9]{0,3})(?:t([1-9][0-9]?))?", count)
        if sizes is None:
            more = ", or :dNtT for N servers of T GPUs each" if kind in TENSOR else ""
            raise ConfigError(
                f"rollout.backend={backend}: {part} must be {kind}:dN with N at least 1 servers, for example {kind}:d2{more}"
            )
        servers = Servers(kind, int(sizes[1]), int(sizes[2] or 1))
        if servers.tensor > 1 and kind not in TENSOR:
            raise ConfigError(
                f"rollout.backend={backend}: a server of {kind} computes on one device; leave t{servers.tensor} out, or use "
                + " or ".join(TENSOR)
            )
        started.append(servers)
    return tuple(started)


def numbered(servers: Iterable[Servers]) -> list[tuple[str, Servers]]:
    """Returns (name, entry of ``servers``) of each single server; names are unique in the run, such as ``vllm-0``."""
    counts: Counter[str] = Counter()
    named = []
    for entry in servers:
        for _ in range(entry.count):
            named.append((f"{entry.kind}-{counts[entry.kind]}", entry))
            counts[entry.kind] += 1
    return named


def _not_a_backend(backend: str, kind: str, part: str) -> str:
    if part in STARTED:
        return f"rollout.backend={backend}: say how many servers of {part}, for example {part}:d1" + (
            ", or embedded alone for the engine inside the run" if part == "embedded" else ""
        )
    if part == "attached":
        return (
            f"rollout.backend={backend}: attached stands alone; servers of rollout.fleet.servers join those that are "
            f"started anyway, so write rollout.backend={backend.replace('+attached', '').replace('attached+', '')}"
        )
    return (
        f"rollout.backend={backend}: {kind!r} is not an inference backend; {nearest_names(kind, STARTED)}. Write embedded, "
        "auto, KIND:dN, a sum such as embedded:d1+vllm:d1, or attached"
    )


def parse_address(text: str) -> Address:
    """Parses ``KIND=URL``; a slash at the end of the URL is removed.

    Raises:
        ConfigError: the text has another form; the message says what is wrong.
    """
    kind, equals, url = text.strip().partition("=")
    if not equals or kind not in ATTACHED:
        raise ConfigError(
            f"{text.strip()!r} is not the address of a server: write KIND=URL with KIND one of {', '.join(ATTACHED)}, for "
            "example tandem=http://127.0.0.1:8000"
        )
    if not ADDRESS.fullmatch(url):
        raise ConfigError(f"{text.strip()!r}: {url!r} is not an address such as http://127.0.0.1:8000")
    return Address(kind, url.rstrip("/"))


def kinds_of(backend: str, fleet: FleetConfig) -> frozenset[str]:
    """Returns the kinds of servers that the configuration names. Invalid entries are ignored; `fleet_problems` reports
    them."""
    kinds = {"embedded"} if backend in INSIDE else {part.partition(":")[0] for part in backend.split("+")}
    return frozenset(STARTED) & (kinds | {address.partition("=")[0].strip() for address in fleet.servers})


def fleet_problems(backend: str, fleet: FleetConfig, min_new_tokens: int) -> Iterator[str]:
    """Yields a message for each setting of `rollout.backend` and `rollout.fleet` that cannot work, and one if a kind of
    server does not support `gconfig.min_new_tokens` for training."""
    try:
        started = parse_backend(backend)
    except ConfigError as error:
        yield str(error)
        return
    seen: list[str] = []
    for text in fleet.servers:
        try:
            address = str(parse_address(text))
        except ConfigError as error:
            yield f"rollout.fleet.servers: {error}"
            continue
        if address in seen:
            yield f"rollout.fleet.servers names {address} more than once; once is enough"
        seen.append(address)
    if started is None:
        return
    # the abilities of a vLLM server depend on its command line, so they are checked when the run attaches to it
    if "sglang" in kinds_of(backend, fleet) and min_new_tokens > 0:
        yield (
            f"gconfig.min_new_tokens={min_new_tokens} is refused by sglang, whose log-probabilities are those "
            "without the suppressed stop tokens: leave it out, or generate with embedded:dN, tandem:dN or vllm:dN"
        )
