"""The error of a wrong configuration, helpers for its messages, and the command that installs an optional library."""

import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


class TandemError(Exception):
    """Base class of all errors that Tandem raises on purpose."""

    may_pass: bool = False
    """True if a run that ended with this error may succeed when it is started again, as after a fault of a machine."""


class ConfigError(TandemError, ValueError):
    """A configuration that cannot work; the message names the key, the value, the rule and the remedy."""

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that a notebook shows instead of a traceback."""
        return [f"ConfigError: {self}"]


def refuse(problems: Iterable[str]) -> None:
    """Raises an error with all messages in ``problems``, if there are any.

    Raises:
        ConfigError: there are problems; the message lists each once.
    """
    texts = list(dict.fromkeys(problems))
    if texts:
        raise ConfigError(texts[0] if len(texts) == 1 else f"{len(texts)} problems:\n" + "\n".join(f"- {p}" for p in texts))


def kind_and_text(error: BaseException) -> str:
    """Returns an error's type and text, ``ValueError: bad``, or only the type if it has no text."""
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
"""Common synonym → Tandem's key, or its last part. Names of other systems are in `coming_from.md`."""


def nearest_names(name: str, names: Iterable[str]) -> str:
    """Returns `did you mean 'x'? There are: x, y, z`; if no name is close, `there are: x, y, z`. For use after a
    semicolon."""
    names = sorted(names)
    begins = [other for other in names if other.startswith(name)]
    close = begins or difflib.get_close_matches(name, names, n=3)
    close.sort(key=lambda other: sorted(other) != sorted(name))  # names with the same letters (swapped ones) come first
    return (f"did you mean {close[0]!r}? There" if close else "there") + f" are: {', '.join(names) or 'none'}"


def nearest_keys(key: str, keys: Sequence[str]) -> list[str]:
    """Returns at most three of ``keys`` that may be meant by ``key``: a similar key in the same section, else keys of the
    same name in other sections, else a similar key."""
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
        cutoff = 0.85 if inside else 0.75  # the names of a section that exists say more than a far likeness elsewhere
        close = difflib.get_close_matches(last, {k.rpartition(".")[2] for k in keys}, n=1, cutoff=cutoff)
        elsewhere = [k for k in keys if close and k.rpartition(".")[2] == close[0]]
    deeper = [k for k in elsewhere if section and k.startswith(f"{section}.")]
    elsewhere = deeper or elsewhere
    elsewhere.sort(key=lambda k: (-difflib.SequenceMatcher(None, k, key).ratio(), k))
    return elsewhere[:3] or ([] if inside else difflib.get_close_matches(key, keys, n=1, cutoff=0.6))


_CLONE = Path(__file__).parents[3]


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra of Tandem into this interpreter, from the clone if Tandem runs from one."""
    is_clone = (_CLONE / "pyproject.toml").is_file()
    package = f"-e '{_shown(_CLONE)}[{extra}]'" if is_clone else f"'tandem-rl[{extra}]'"
    return f"{_shown(Path(sys.executable))} -m pip install {package}"


def _shown(path: Path) -> str:
    """Returns a path relative to the current folder if it is below. Links are not resolved, because the Python of a virtual
    environment is a link."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
