"""Limits of one client, and of all together, of the server of an engine."""

from dataclasses import dataclass

from tandem.protocol.limits import ServerLimits


@dataclass(frozen=True, kw_only=True)
class ServiceLimits(ServerLimits):
    """The bounds of every server, and those on completions, weights and the run that owns the engine."""

    max_tokens: int
    """Context of the model: most tokens of a prompt, and of a completion."""

    default_chat_tokens: int = 1024
    """Tokens that a chat answer may have if its request does not say; a request reserves cache for all that it may have."""

    max_completions: int = 128
    """Most completions of one request: prompts times `n`."""

    max_requests: int = 4096
    """Most completions under way at once, waiting ones included; the next is refused with status 503."""

    max_long_prompts: int = 16
    """Most prompts of more than 32,768 characters that are tokenised or wait for it; the next is refused with status 503."""

    max_weights_body_bytes: int = 64 << 20
    """Longest body of the route that announces weights: a name and a digest for each tensor."""

    send_timeout_s: float = 60.0
    """A stream whose reader takes nothing for this long is ended."""

    request_timeout_s: float = 3600.0
    """A completion that takes longer is ended, whatever deadline it brought."""

    control_timeout_s: float = 600.0
    """Seconds that a control request waits for the one before it."""

    owner_silent_s: float = 600.0
    """A run that says nothing for this long, with no completions under way, loses the server to the next that attaches."""

    ready_window_s: float = 30.0
    """`/ready` wants a token that was generated at most this long ago; without one it generates one."""

    ready_timeout_s: float = 10.0
    """Seconds that generating that token may take."""
