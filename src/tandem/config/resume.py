"""The keys that may change when a run is resumed."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tandem.config.coming_from import REMOVED

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
"""Keys that do not affect what is learnt; a resumed run takes the new value."""

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
    "actor.gradient_checkpointing",
    "actor.gradient_sync",
    "actor.logprob_chunk_tokens",
    "actor.max_tokens_per_micro_batch",
    "actor.offload",
    "actor.selective_checkpointing",
    "critic.backend",
    "critic.gradient_checkpointing",
    "critic.optimizer",
    "reference.backend",
    "teacher.backend",
)
"""Keys that affect what is learnt from now on, or how fast: learning rate, lengths, counts, layouts and engines. They may
change only with `--override`."""


FIXED = ("rollout.dtype",)
"""Keys that must not change, although the section above them may."""

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
"""Key → (default in an older version, default now). A run that began with the old default may be resumed with the new one,
because a command that leaves out the key does not request a change."""


AS_BEFORE = {"rollout.backend": "auto"}
"""Key → value that means "as the run began"."""


class KeyDifference(NamedTuple):
    """A key whose value differs from the one that the run began with."""

    path: tuple[str, ...]
    before: Any
    now: Any
    added: bool = False
    """True if the key is new, in a mapping whose keys the user chooses."""

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)

    @property
    def is_free(self) -> bool:
        """True if the key does not affect what is learnt."""
        return is_free(self.key)

    @property
    def passes(self) -> bool:
        """True if the change is allowed without `--override`."""
        return self.is_free or OTHER_DEFAULTS.get(self.key) == (self.before, self.now)

    @property
    def may_change(self) -> bool:
        """True if the change is allowed with `--override`."""
        return self.is_free or (_below(self.key, MAY_CHANGE) and not _below(self.key, FIXED))

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.now)}"


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any], outer: tuple[str, ...] = ()
) -> Iterator[KeyDifference]:
    """Yields the differences between two whole configurations, given as plain data. Of keys that have been removed since
    ``before`` only those on which a saved state depends are compared. ``defaults``: values of keys that the older
    configuration does not have yet. ``outer``: path of the section."""
    for name in {**now, **before}:
        end = REMOVED.get(".".join((*outer, name))) if name not in now else None
        if end is not None:
            if end.lasts and before[name] != end.was:
                yield KeyDifference((*outer, name), before[name], end.was)
            continue
        old, value = (side.get(name, defaults.get(name)) for side in (before, now))
        if isinstance(old, Mapping) and isinstance(value, Mapping) and old and value:
            inner = defaults.get(name)
            yield from differences(old, value, inner if isinstance(inner, Mapping) else {}, (*outer, name))
        elif old != value and AS_BEFORE.get(".".join((*outer, name)), old) != value:
            yield KeyDifference((*outer, name), old, value, added=name not in before and name not in defaults)


def is_free(key: str) -> bool:
    """True if a key does not affect what is learnt."""
    return _below(key, FREE)


def _below(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
