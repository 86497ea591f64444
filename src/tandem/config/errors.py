"""The error that every wrong configuration ends in."""

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar


class TandemError(Exception):
    """Root of all errors that Tandem raises on purpose."""

    may_pass: ClassVar[bool] = False
    """True if a run that ended with it may succeed when it is started again: machines fail so, configurations do not."""


class ConfigError(TandemError, ValueError):
    """A configuration that cannot work; the message names the key, the value, the rule and the remedy."""

    def _render_traceback_(self) -> list[str]:
        """A notebook shows these lines in place of a traceback, which tells a user nothing."""
        return [f"ConfigError: {self}"]


def refuse(problems: Iterable[str]) -> None:
    """Passes if there are none.

    Raises:
        ConfigError: all of them together, each once.
    """
    found = list(dict.fromkeys(problems))
    if found:
        raise ConfigError(found[0] if len(found) == 1 else f"{len(found)} problems:\n" + "\n".join(f"- {p}" for p in found))


def kind_and_text(error: BaseException) -> str:
    """An error in words: its type and its text, or its type alone if it has no text."""
    try:
        text = str(error)
    except Exception:  # the boundary of a user's code: its own __str__ may raise
        text = "it has a __str__ that raises"
    return f"{type(error).__name__}{': ' if text else ''}{text}"


OTHER_WORDS = {
    "model": "actor.path",
    "model_path": "actor.path",
    "max_tokens": "max_new_tokens",
    "max_staleness": "max_head_offpolicyness",
    "epochs": "total_train_epochs",
    "steps": "total_train_steps",
    "dataset": "train_dataset.path",
    "r": "rank",
}
"""A usual word for it → our key, or its last part. Names of other systems are in `coming_from.md`."""


def nearest_names(name: str, names: Iterable[str]) -> str:
    """`did you mean 'x'? There are: x, y, z`; or, to follow a semicolon, `there are: x, y, z`."""
    names = sorted(names)
    begins = [other for other in names if other.startswith(name)]
    close = begins or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    close.sort(key=lambda other: sorted(other) != sorted(name))  # two letters that changed places, before another letter
    return (f"did you mean {close[0]!r}? There" if close else "there") + f" are: {', '.join(names) or 'none'}"


def nearest_keys(key: str, keys: Sequence[str]) -> list[str]:
    """At most three keys that ``key`` may stand for: a typing error in its section first, then the same name elsewhere."""
    section, _, last = key.rpartition(".")
    inside = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    close = difflib.get_close_matches(last, inside, n=1, cutoff=0.75)
    if close:
        return [inside[close[0]]]
    last = OTHER_WORDS.get(last, last)
    if last in keys:
        return [last]
    elsewhere = [k for k in keys if k.rpartition(".")[2] == last]
    if not elsewhere:
        close = difflib.get_close_matches(last, {k.rpartition(".")[2] for k in keys}, n=1, cutoff=0.75)
        elsewhere = [k for k in keys if close and k.rpartition(".")[2] == close[0]]
    deeper = [k for k in elsewhere if section and k.startswith(f"{section}.")]
    elsewhere = deeper or elsewhere
    elsewhere.sort(key=lambda k: (-difflib.SequenceMatcher(None, k, key).ratio(), k))
    return elsewhere[:3] or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
