"""The command of a program that plays an episode: its words, with places that each row fills."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from tandem.api.failures import DataFailure, WrongWorkflow
from tandem.config.errors import ConfigError

_PLACE = re.compile(r"\{\{\w+\}\}|\{(\w+)\}")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh")
_TAKES_SCRIPT = re.compile(r"-\w*c")

LONGEST_WORD = 128 << 10
"""Bytes of one argument that Linux hands to a program, its end included."""


class Command:
    """A command line, cut into words as a shell would; ``{name}`` in a word is filled, and ``{{name}}`` is ``{name}``.

    The words are cut before they are filled, and no shell reads them: whatever a row says stays inside its word.

    Example: ``Command("python3 agent.py --question {prompt}").words({"prompt": "What is 2 + 2?"})``
    """

    def __init__(self, text: str):
        try:
            self._words = tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigError(f"workflow=program: command {text!r} cannot be cut into words: {error}") from None
        if not self._words:
            raise ConfigError("workflow=program: command is empty; write one, such as command='python3 agent.py {prompt}'")
        for before, word in zip(self._words, self._words[1:], strict=False):
            if _TAKES_SCRIPT.fullmatch(before) and any(PurePath(w).name in _SHELLS for w in self._words) and places(word):
                name = places(word)[0]
                raise ConfigError(
                    f"workflow=program: a shell would read what a row puts at {{{name}}} as a command; give it to the "
                    f"script as an argument: sh -c '… \"$1\" …' sh {{{name}}}"
                )

    def words(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The words with every place filled: text as it is, anything else as JSON.

        Raises:
            WrongWorkflow: nobody gives a value of that name.
            DataFailure: ``prompt_too_long``, a word that no program can be given.
        """
        words = tuple(filled(word, values) for word in self._words)
        for word in words:
            if len(word.encode(errors="surrogateescape")) >= LONGEST_WORD or "\0" in word:
                raise DataFailure("prompt_too_long", "an argument of a command has 128 KiB at most; let it read {row}")
        return words


def places(text: str) -> list[str]:
    """The names of its places."""
    return [match[1] for match in _PLACE.finditer(text) if match[1]]


def filled(text: str, values: Mapping[str, Any]) -> str:
    """The text with its places filled.

    Raises:
        WrongWorkflow: nobody gives a value of that name.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][1:-1]
        if name not in values:
            raise WrongWorkflow(
                f"workflow=program: nothing fills {{{name}}}; a row fills {', '.join(sorted(values))}. For the text itself "
                f"write {{{{{name}}}}}"
            )
        value = values[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return _PLACE.sub(fill, text)
