"""Limits of an engine's server, for one client and for all together."""

from dataclasses import dataclass

from tandem.protocol.limits import ServerLimits


@dataclass(frozen=True, kw_only=True)
class ServiceLimits(ServerLimits):
    """The limits of every server, and those on completions, weights and the owning run."""

    max_tokens: int
    """The model's context: most tokens of a prompt and its completion."""

    default_chat_tokens: int = 1024
    """Tokens of a chat answer whose request sets no limit. A request reserves cache for all tokens that it may generate."""

    max_completions: int = 128
    """Most completions of one request: prompts times `n`."""

    max_requests: int = 4096
    """Most completions at once, waiting ones included; further requests get status 503."""

    max_long_prompts: int = 16
    """Most prompts of more than 32,768 characters that are tokenised or wait for it; further ones get status 503."""

    max_weights_body_bytes: int = 64 << 20
    """Most bytes in the body that announces weights: a name and a digest for each tensor."""

    send_timeout_s: float = 60.0
    """Seconds after which a stream ends if its reader takes nothing."""

    request_timeout_s: float = 3600.0
    """Seconds after which a completion is ended, whatever deadline its request has."""

    control_timeout_s: float = 600.0
    """Seconds that a control request waits for the one before it."""

    owner_silent_s: float = 600.0
    """Seconds of silence, without completions under way, after which the owning run loses the server to the next that
    attaches."""

    ready_window_s: float = 30.0
    """Age in seconds up to which the last generated token counts for `/ready`; after that `/ready` generates one."""

    ready_timeout_s: float = 10.0
    """Seconds that `/ready` waits for that token."""
