"""Finds what the user may have meant."""

import difflib
from collections.abc import Iterable, Sequence

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
