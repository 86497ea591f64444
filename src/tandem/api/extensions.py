"""Classes and functions in a user's file that take the place of a part of Tandem's: read, checked and made."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from tandem.api.engines import EngineWrapper
from tandem.api.plugins import in_user_code, load_object, told_if_slow
from tandem.api.services import Services
from tandem.config.errors import ConfigError
from tandem.config.terms import Term, read_term


@dataclass(frozen=True)
class OwnClass:
    """A class of the user's that was checked, with its knobs."""

    spec: str
    """Its name, ``my_file.py:Name``."""

    kind: type
    asked: tuple[str, ...]
    """The arguments that it takes of those that are there for it."""

    knobs: Mapping[str, Any]

    def __call__(self, **given: Any) -> Any:
        """Makes one. ``given``: name → argument; it gets those that it asks for.

        Raises:
            ConfigError: it raised; says what, and in which line of the file. Or a wrapper of an engine has none.
        """
        with told_if_slow(self.spec):
            made = in_user_code(self.spec, self.kind, **{name: given[name] for name in self.asked}, **self.knobs)
        if isinstance(made, EngineWrapper) and not hasattr(made, "engine"):
            raise ConfigError(f"{self.spec}: its __init__ must call super().__init__(engine)")
        return made


def own_object(spec: str, key: str) -> tuple[Term, Any]:
    """The file and name, with knobs, that the configuration has at ``key``; and the object there.

    Raises:
        ConfigError: it is not written as ``my_file.py:Name``, or cannot be loaded.
    """
    term = read_term(spec, key)
    if not term.is_file:
        raise ConfigError(f"{key}={spec}: name an object in a file of yours, as my_file.py:Name")
    return term, load_object(term.name)


def own_class(spec: str, key: str, base: type, given: Collection[str]) -> OwnClass:
    """The class that the configuration names at ``key``. ``given``: the arguments that are there for it.

    Raises:
        ConfigError: it is missing, is not derived from ``base`` or lacks a method of it; or an argument that nobody gives
            it, or a knob that it does not have.
    """
    term, kind = own_object(spec, key)
    file, _, name = term.name.rpartition(":")
    where, public = f"{key}={term.name}", f"tandem.{base.__name__}"
    if not inspect.isclass(kind) or not issubclass(kind, base):
        what = "a class" if inspect.isclass(kind) else f"a {type(kind).__name__}"
        raise ConfigError(
            f"{where}: {name} in {file} is {what} that is not derived from {public}; write class {name}({public})"
        )
    asked, knobs = Services().check(where, kind, term.arguments, given)
    return OwnClass(term.name, kind, tuple(name for name in asked if name in given), knobs)


def own_function(spec: str, key: str, form: str, arguments: int) -> Callable[..., Any]:
    """The function that the configuration names at ``key``; ``form``: how it is to be written, with so many ``arguments``.

    Raises:
        ConfigError: it is missing, no function, or takes other arguments.
    """
    term, function = own_object(spec, key)
    file, _, name = term.name.rpartition(":")
    try:
        inspect.signature(function).bind(*range(arguments), **term.arguments)
    except TypeError as error:
        raise ConfigError(f"{key}={term.name}: {name} in {file} must be written as `{form}`: {error}") from None
    return partial(function, **term.arguments) if term.arguments else cast(Callable[..., Any], function)
