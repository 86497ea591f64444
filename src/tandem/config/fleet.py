"""Fleets: several inference servers behind one engine; what `rollout.backend` may say, and `rollout.fleet`."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.config.errors import ConfigError, nearest_names
from tandem.config.generation import GenerationConfig
from tandem.config.parts import Knob

STARTED = ("embedded", "tandem", "vllm", "sglang")
"""Kinds of server that a run starts itself, ``KIND:dN`` in `rollout.backend`."""

TENSOR = ("vllm", "sglang")
"""Kinds of which one server can use several GPUs."""

ATTACHED = ("tandem", "vllm", "sglang")
"""Kinds of server that a run attaches to by their address."""

INSIDE = ("embedded", "auto")
"""Values of `rollout.backend` for the one engine inside the run. `auto` is one as long as nobody has decided otherwise
(`tandem.config.choose_backend`)."""

ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")


@dataclass(frozen=True)
class Servers:
    """Servers of one kind that the run starts."""

    kind: str
    count: int
    tensor: int = 1
    """GPUs of each, by tensor parallelism."""

    @property
    def devices(self) -> int:
        """GPUs of all of them."""
        return self.count * self.tensor

    def __str__(self) -> str:
        return f"{self.kind}:d{self.count}" + (f"t{self.tensor}" if self.tensor > 1 else "")


class Address(NamedTuple):
    """A server that somebody else started."""

    kind: str
    url: str

    def __str__(self) -> str:
        return f"{self.kind}={self.url}"


@dataclass(frozen=True)
class FleetConfig:
    """Inference servers, for every `rollout.backend` except `embedded`."""

    servers: tuple[str, ...] = ()
    """Running servers to attach to, each as `KIND=URL` with KIND one of tandem, vllm, sglang."""

    watch: str | None = None
    """A file, or a folder of files, with one `KIND=URL` a line. It is read every second, so servers may join and leave
    during the run. null: the file `servers` in the run folder, which `tandem fleet add` writes."""

    vllm_python: str | None = None
    """Python of the environment that has vLLM, for `vllm:dN`; null takes the one that runs Tandem."""

    sglang_python: str | None = None
    """Python of the environment that has SGLang, for `sglang:dN`; null takes the one that runs Tandem."""

    token_file: str | None = None
    """File with the token (API key) of attached servers; null sends none."""

    admin_token_file: str | None = None
    """File with the token of the control routes of attached `tandem serve` servers; null sends none."""

    memory_share: float | None = None
    """Part of a GPU's memory that a vLLM or SGLang server which the run starts may take; null: 0.9 on devices of its own,
    0.4 where it shares them with training (`placement=colocate`)."""

    sleep: bool | None = None
    """vLLM and SGLang servers on the GPUs of training give the memory of their cache back while the models train. null: they
    do where the run starts all its servers (`placement=colocate`). With `memory_limit_gib` they do in any case."""

    options: Mapping[str, Knob] = field(default_factory=dict)
    """More options for the command of the servers that the run starts, by their names in that command without dashes, such
    as `{max-num-batched-tokens: 8192, enforce-eager: true}`. Unknown ones are refused before the run starts."""

    startup_timeout_s: float = 600.0
    """Seconds that a server which the run starts may take to load its model."""

    probe_every_s: float = 2.0
    """A server that shows no progress for this long is asked for one token, as a test."""

    suspect_after_s: float = 4.0
    """A server that has made no token for this long gets no new requests until it makes tokens again."""

    stall_timeout_s: float = 60.0
    """A server that has made no token for this long is fenced: its requests move to other servers."""

    request_timeout_s: float = 600.0
    """A request that a server has not answered within this time moves to another server."""

    max_server_retries: int = 3
    """Number of times that a request moves to another server before it counts as failed."""

    max_restarts: int = 3
    """Number of times an hour that a server of this run may be started again."""

    empty_timeout_s: float = 300.0
    """The run ends if no server was healthy for this long while requests were waiting."""

    finish_before_update: bool = False
    """Before switching to new weights, hold new requests back and let the running ones finish, instead of interrupting
    them."""

    drain_timeout_s: float = 120.0
    """Seconds that a server which leaves may take to finish its requests, and that `finish_before_update` waits.
    Requests that are left then are moved or interrupted."""


def parse_backend(backend: str) -> tuple[Servers, ...] | None:
    """The servers that the run starts, in order; None for the one engine inside the run.

    Example: ``parse_backend("embedded:d1+vllm:d2t4") == (Servers("embedded", 1), Servers("vllm", 2, 4))``,
    ``parse_backend("attached") == ()``

    Raises:
        ConfigError: it is none of the forms; says which there are.
    """
    if backend in INSIDE:
        return None
    if backend == "attached":
        return ()
    found: list[Servers] = []
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
        found.append(servers)
    return tuple(found)


def numbered(servers: Iterable[Servers]) -> list[tuple[str, Servers]]:
    """Each single server by its name in the run, such as ``vllm-0``, with the group that it is one of."""
    counts: Counter[str] = Counter()
    found = []
    for one in servers:
        for _ in range(one.count):
            found.append((f"{one.kind}-{counts[one.kind]}", one))
            counts[one.kind] += 1
    return found


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
    """``KIND=URL``, the URL without its last slash.

    Raises:
        ConfigError: it is not that; says what is wrong.
    """
    kind, found, url = text.strip().partition("=")
    if not found or kind not in ATTACHED:
        raise ConfigError(
            f"{text.strip()!r} is not the address of a server: write KIND=URL with KIND one of {', '.join(ATTACHED)}, for "
            "example tandem=http://127.0.0.1:8000"
        )
    if not ADDRESS.fullmatch(url):
        raise ConfigError(f"{text.strip()!r}: {url!r} is not an address such as http://127.0.0.1:8000")
    return Address(kind, url.rstrip("/"))


def kinds_of(backend: str, fleet: FleetConfig) -> frozenset[str]:
    """Kinds of the servers that the configuration names; without what cannot be read of it, which others complain of."""
    kinds = {"embedded"} if backend in INSIDE else {part.partition(":")[0] for part in backend.split("+")}
    return frozenset(STARTED) & (kinds | {address.partition("=")[0].strip() for address in fleet.servers})


def sampling_problems(backend: str, fleet: FleetConfig, gconfig: GenerationConfig) -> Iterator[str]:
    """Yields one message for each setting of `gconfig` that no server of a kind can sample for training.

    What a vLLM server can depends on how it was started, so it is asked when the run attaches to it.
    """
    if "sglang" in kinds_of(backend, fleet) and gconfig.min_new_tokens > 0:
        yield (
            f"gconfig.min_new_tokens={gconfig.min_new_tokens} is refused by sglang, whose log-probabilities are those "
            "without the suppressed stop tokens: leave it out, or generate with embedded:dN, tandem:dN or vllm:dN"
        )


def fleet_problems(backend: str, fleet: FleetConfig, gconfig: GenerationConfig) -> Iterator[str]:
    """Yields what of `rollout.backend` and `rollout.fleet` cannot work; one message each."""
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
    yield from sampling_problems(backend, fleet, gconfig)
    if fleet.suspect_after_s < fleet.probe_every_s:
        yield (
            f"rollout.fleet.suspect_after_s must be at least rollout.fleet.probe_every_s ({fleet.probe_every_s:g}), got "
            f"{fleet.suspect_after_s:g}; a server that idles would be suspected before it is asked"
        )
    if fleet.stall_timeout_s <= fleet.suspect_after_s:
        yield (
            f"rollout.fleet.stall_timeout_s must exceed rollout.fleet.suspect_after_s ({fleet.suspect_after_s:g}), got "
            f"{fleet.stall_timeout_s:g}"
        )
