"""The division of an episode's time (`rollout.episode_timeout_s`): inner work ends before the work around it.

A call of a tool or an environment ends before the play does: the chat with tools, the agent, the program. The play leaves
time for the reward, and all of it is the episode's.
"""

from tandem.api.workflow import GeneratesTokens
from tandem.config.errors import ConfigError

PLAY = 0.9
"""The share of an episode's time that a play has; the rest is for its reward."""

PROGRAM = 0.8
"""The share of a program, whose sandbox is opened and closed within the play."""

TOOL = 0.25
"""The share of the time that is left for the play which a call of a tool has."""

RESET, STEP, CLOSE = (1 / 10, 60.0), (1 / 20, 30.0), (1 / 120, 5.0)
"""Limits of an environment's calls: the share of the episode's time, and the most seconds."""


def left_for_play(engine: GeneratesTokens) -> float:
    """Seconds that are left for the play of an episode; infinity where the engine knows no deadline."""
    return max(0.0, getattr(engine, "remaining_s", float("inf"))) * PLAY


def inside(name: str, seconds: float | None, most_s: float, episode_timeout_s: float) -> float:
    """The deadline that was set, or else ``most_s``, what follows from the episode's time.

    Raises:
        ConfigError: the deadline is not inside the episode's; ``name`` is its key.
    """
    if seconds is None:
        return most_s
    if not 0 < seconds < episode_timeout_s:
        raise ConfigError(
            f"{name} must be above 0 and below rollout.episode_timeout_s ({episode_timeout_s:g}), got {seconds:g}; leave it "
            f"out for {most_s:g}"
        )
    return seconds


def of_environment(call: tuple[float, float], episode_timeout_s: float) -> float:
    """The deadline of an environment's call."""
    share, most_s = call
    return min(share * episode_timeout_s, most_s)
