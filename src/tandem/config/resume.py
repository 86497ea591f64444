"""The keys that may differ between the beginning of a run and its continuation."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

FREE = (
    "experiment_name",
    "trial_name",
    "run",
    "tracking",
    "checkpoint",
    "recover",
    "memory_limit_gib",
    "reward_timeout_s",
    "reward_workers",
    "rollout.wait_timeout_s",
    "rollout.episode_timeout_s",
    "rollout.max_retries",
    "rollout.max_data_failures",
    "rollout.verify",
    "rollout.fleet",
    "rollout.weights",
    "rollout.workers",
    "allocation",
    "runner",
)
"""Change nothing that is learnt: a run goes on with the new value."""

MAY_CHANGE = (
    "total_train_steps",
    "total_train_epochs",
    "evaluate",
    "valid_dataset",
    "batch_size",
    "threads",
    "device",
    "rollout",
    "gconfig",
    "reward",
    "actor.optimizer",
    "actor.backend",
    "actor.compile",
    "actor.context_parallel",
    "actor.gradient_checkpointing",
    "actor.gradient_sync",
    "actor.logprob_chunk_tokens",
    "actor.max_tokens_per_micro_batch",
    "actor.offload",
    "actor.selective_checkpointing",
    "critic.backend",
    "critic.gradient_checkpointing",
    "critic.optimizer",
    "critic.max_tokens_per_micro_batch",
    "reference.backend",
    "teacher.backend",
)
"""Change what is learnt from here on, or how fast: the learning rate, lengths and counts, and what computes. By
`--override`."""


FIXED = ("rollout.dtype",)
"""Keys that may not change, although they stand below a key that may."""

OTHER_DEFAULTS = {
    "actor.max_tokens_per_micro_batch": (4096, None),
    "actor.compile": (False, None),
    "actor.logprob_chunk_tokens": (1024, None),
    "actor.gradient_sync": ("step", None),
    "rollout.min_group_size": (1, None),
    "rollout.engine.max_running": (128, None),
    "rollout.engine.kv_cache_gib": (2.0, None),
    "rollout.engine.prefill_chunk_tokens": (1024, None),
}
"""Key → its default in an older version, and now. A run that began with the one goes on with the other: a command that does
not write the key asks for nothing new."""


AS_BEFORE = {"rollout.backend": "auto"}
"""Key → its value that asks for whatever the run began with."""


class KeyDifference(NamedTuple):
    """One key that a run began with another value of."""

    path: tuple[str, ...]
    before: Any
    now: Any
    added: bool = False
    """True if there was no such key before, in a mapping whose keys are the user's own."""

    @property
    def key(self) -> str:
        """The key as it is written."""
        return ".".join(self.path)

    @property
    def is_free(self) -> bool:
        """True if it changes nothing that is learnt."""
        return is_free(self.key)

    @property
    def passes(self) -> bool:
        """True if the change needs nobody's consent."""
        return self.is_free or OTHER_DEFAULTS.get(self.key) == (self.before, self.now)

    @property
    def may_change(self) -> bool:
        """True if `--override` lets it pass."""
        return self.is_free or (_below(self.key, MAY_CHANGE) and not _below(self.key, FIXED))

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.now)}"


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any], outer: tuple[str, ...] = ()
) -> Iterator[KeyDifference]:
    """Between two whole configurations as plain data. ``defaults``: what a key has that the older one does not know yet."""
    for name in {**now, **before}:
        old, value = (side.get(name, defaults.get(name)) for side in (before, now))
        if isinstance(old, Mapping) and isinstance(value, Mapping) and old and value:
            inner = defaults.get(name)
            yield from differences(old, value, inner if isinstance(inner, Mapping) else {}, (*outer, name))
        elif old != value and AS_BEFORE.get(".".join((*outer, name)), old) != value:
            yield KeyDifference((*outer, name), old, value, added=name not in before and name not in defaults)


def is_free(key: str) -> bool:
    """True if a key changes nothing that is learnt."""
    return _below(key, FREE)


def _below(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
