"""Asks a server for a few tokens to find out of which distribution its log-probabilities are."""

import math
import uuid
from dataclasses import dataclass
from typing import Any

from tandem.api.failures import ServerFailed
from tandem.config.errors import ConfigError
from tandem.config.generation import GenerationConfig
from tandem.engines.inference.remote.foreign.protocol import Draw, ServerProtocol

PROBE_IDS = tuple(range(1, 9))

LEAST_SHIFT = 0.02
"""Nats; below this a log-probability that was normalised anew cannot be told from one of the whole distribution."""


@dataclass(frozen=True)
class Whole:
    """Says whether log-probabilities stay those of softmax(logits / temperature) with two options of sampling."""

    truncated: bool
    """With top-p and top-k."""

    suppressed: bool
    """With stop tokens suppressed for a minimum of tokens."""

    def lacks(self, gconfig: GenerationConfig) -> str | None:
        """In words, the log-probabilities that a server does not give where it samples so; None where it gives all."""
        if (gconfig.top_p < 1.0 or gconfig.top_k > 0) and not self.truncated:
            return (
                f"gives log-probabilities after top-p and top-k, not before (gconfig.top_p={gconfig.top_p}, "
                f"top_k={gconfig.top_k})"
            )
        if gconfig.min_new_tokens > 0 and not self.suppressed:
            return (
                "gives log-probabilities without the stop tokens that it suppresses "
                f"(gconfig.min_new_tokens={gconfig.min_new_tokens})"
            )
        return None


def ask(protocol: ServerProtocol, temperature: float, **changes: Any) -> Any:
    """The answer to a request for one token of a fixed prompt; ``changes``: fields of `Draw`."""
    draw = Draw(temperature, False, 1.0, 0, 0, 1, (), ())._replace(**changes)
    body = protocol.body(uuid.uuid4().hex, PROBE_IDS, draw)
    return protocol.call(protocol.generate_path, body)


def try_logprobs(protocol: ServerProtocol, name: str) -> Whole:
    """Log-probabilities must be those of softmax(logits / temperature): half of it doubles every difference.

    What is drawn from fewer tokens should keep its log-probability, too: a server that normalises anew adds
    -log(probability of what is left) to all of them. Where that cannot be told it counts as one that does.

    Raises:
        ConfigError: they ignore the temperature; with the remedy.
        ServerFailed: its most probable tokens are others at each request.
    """
    plain, cold = (protocol.top(ask(protocol, t, top_logprobs=5)) for t in (1.0, 0.5))
    both = sorted(plain.keys() & cold.keys(), key=plain.__getitem__, reverse=True)
    url = protocol.http.base_url
    if len(both) < 2:
        raise ServerFailed(f"the most probable tokens of {url} are others at each request", url=url)
    ratio = (cold[both[0]] - cold[both[-1]]) / max(plain[both[0]] - plain[both[-1]], 1e-6)
    if not 1.8 < ratio < 2.2:
        raise ConfigError(f"{name} at {url} gives log-probabilities that ignore the temperature; {protocol.remedy}")
    first, second = both[:2]
    truncated = protocol.top(ask(protocol, 1.0, top_logprobs=5, top_k=2))
    suppressed = protocol.top(ask(protocol, 0.5, top_logprobs=5, min_tokens=1, stop_ids=(first,)))
    return Whole(
        _keeps(truncated.get(first), plain[first], math.exp(plain[first]) + math.exp(plain[second])),
        _keeps(suppressed.get(second), cold[second], 1.0 - math.exp(cold[first])),
    )


def _keeps(logprob: float | None, whole: float, left: float) -> bool:
    """True if a log-probability is that of the whole distribution, not of one normalised over the share ``left`` of it."""
    shift = -math.log(min(1.0, max(left, 1e-9)))
    return logprob is not None and shift >= LEAST_SHIFT and abs(logprob - whole) < shift / 2
