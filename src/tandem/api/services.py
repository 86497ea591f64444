"""Constructs each service of a run once, from its name and knobs; a service may request others by argument name.

Also loads, checks and constructs the classes and functions in a user's file that replace a part of Tandem.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from tandem.api.engines import EngineWrapper
from tandem.api.plugins import in_user_code, interrupted_after, load_object, warn_if_slow
from tandem.config.errors import ConfigError, install_extra, nearest_names
from tandem.config.keys import coerce, without_none
from tandem.config.services import Kind, service_of
from tandem.config.terms import Term, read_term

log = logging.getLogger(__name__)

T = TypeVar("T")

NOTHING: Mapping[str, Any] = MappingProxyType({})

ONLY_BY_NAME = ("engine", "sandbox", "recorder", "services", "episode_timeout_s")
"""Arguments that a factory gets only if it names them; `**rest` alone does not request them."""

CLOSING_S = 10.0
"""Seconds that the end of a run waits for an asynchronous `close`."""

LONGEST_CLOSING_S = 60.0
"""Seconds that the end of a run waits for any other `close`."""


def factory_of(kind: Kind, name: str, key: str = "") -> Callable[..., Any]:
    """Imports the class or function behind a name, registered or `my_file.py:Name`. ``key``: configuration key of the name.

    Raises:
        ConfigError: the name is unknown (the message names the nearest), its file raises, or its library is missing (the
            message says what to install).
    """
    if Term(name).is_file:
        return cast(Callable[..., Any], load_object(name))
    service = service_of(kind, Term(name).registered, key)
    if service.package and importlib.util.find_spec(service.package) is None:
        where = f"{key}: " if key else ""
        raise ConfigError(f"{where}{kind} {service.name!r} needs a library that is missing: {install_extra(service.name)}")
    module, _, attribute = service.factory.partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), attribute))


@dataclass(frozen=True)
class FactoryArguments:
    """The arguments that a factory takes, including those of base classes if it passes ``**rest`` on."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    types: Mapping[str, Any]
    open: bool
    """True if the factory takes arguments of any name."""


def arguments_of(make: Callable[..., Any], who: str, skip: int = 0) -> FactoryArguments:
    """Reads the signature of a factory, without its first ``skip`` arguments.

    Raises:
        ConfigError: ``make`` cannot be called, or has no signature.
    """
    if not callable(make):
        raise ConfigError(f"{who} is a {type(make).__name__}; name a class or a function")
    classes = make.__mro__ if inspect.isclass(make) else ()
    bases = [vars(base)["__init__"] for base in classes if "__init__" in vars(base)] or [make]
    names: dict[str, inspect.Parameter] = {}
    types: dict[str, Any] = {}
    is_open = True
    for function in bases:
        if function is object.__init__:
            is_open = is_open and bool(names or len(bases) > 1)
            break
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            raise ConfigError(f"{who} has no signature that can be read; write a class with an __init__") from None
        for parameter in parameters[1 if inspect.isclass(make) else skip :]:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                names.setdefault(parameter.name, parameter)
        with contextlib.suppress(NameError, TypeError, AttributeError):  # an annotation that only a type checker reads
            types = get_type_hints(function) | types
        is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if not is_open:
            break
    required = tuple(name for name, parameter in names.items() if parameter.default is parameter.empty)
    kinds = {name: _kind(types.get(name), parameter.default) for name, parameter in names.items()}
    return FactoryArguments(
        tuple(names), required, {name: kind for name, kind in kinds.items() if kind is not None}, is_open
    )


def _kind(annotation: Any, default: Any) -> Any:
    """Returns the type that a knob must have; None if any type is accepted."""
    plain, _ = without_none(annotation)
    if plain in (bool, int, float, str) or get_origin(plain) is Literal:
        return annotation
    if annotation is None and isinstance(default, bool):
        return bool
    return float | int if annotation is None and isinstance(default, (int, float)) else None


def check_methods(who: str, factory: Callable[..., Any], lacks: Collection[str]) -> None:
    """Checks that a class has all methods that it needs. ``lacks``: the names of those that it does not have. ``who``: the
    key and its value, ``key=my_file.py:Name``.

    Raises:
        ConfigError: methods are missing; the message names the file, the class and the methods.
    """
    if lacks:
        file, _, name = who.partition("=")[2].rpartition(":")
        base = next((parent for parent in getattr(factory, "__mro__", ())[1:] if set(lacks) <= set(dir(parent))), None)
        whose = "" if base is None else f", which every {base.__name__} has"
        where = f" in {file}" if file else ""
        raise ConfigError(f"{who}: class {name}{where} has no method {', '.join(sorted(lacks))}{whose}; write it there")


def read_knobs(
    who: str, arguments: FactoryArguments, knobs: Mapping[str, Any], given: Collection[str] = ()
) -> dict[str, Any]:
    """Converts knobs to the types of the arguments. ``given``: names that the run provides, so that they cannot be knobs.

    Raises:
        ConfigError: a knob is unknown (the message names the nearest), or has another type.
    """
    knob_names = [name for name in arguments.names if name not in given]
    read = {}
    for name, value in knobs.items():
        if name in given and name in arguments.names:
            raise ConfigError(f"{who}: {name} is no knob: the run passes it to every argument of this name; leave it out")
        if name in given or (name not in knob_names and not arguments.open):
            words = nearest_names(name, knob_names)
            known = words if words.startswith("did") else f"it has: {', '.join(sorted(knob_names)) or 'none'}"
            raise ConfigError(f"{who} has no knob {name!r}; {known}")
        read[name] = _as(arguments.types[name], value, who, name) if name in arguments.types else value
    return read


def _as(kind: Any, value: Any, who: str, name: str) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if get_origin(kind) is not Literal and str in (kind, *get_args(kind)) and is_number:
        return str(value)  # text that looks like a number
    if kind == float | int:
        if is_number:
            return value
        raise ConfigError(f"{who}: {name} must be a number, got {value!r}")
    try:
        return coerce(kind, value)
    except ConfigError as error:
        raise ConfigError(f"{who}: {name} {error}") from None


class PerEpisode:
    """Makes a service for each episode: ``async with environment() as world`` constructs one, and closes it at the end.

    A service whose methods block runs in worker processes instead; `shared` returns the object that runs these processes.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        spec: str,
        knobs: Mapping[str, Any],
        asked: Sequence[str] = (),
        lacks: Sequence[str] = (),
    ):
        """``spec``: name by which a worker process loads the class. ``asked``: services that it requests. ``lacks``:
        required methods of an environment that it does not have."""
        self.make, self.name = make, name
        self._spec, self._knobs, self._requested, self._lacks = spec, knobs, asked, lacks
        self._shared: Any = None

    def shared(self, make: Callable[[str, Mapping[str, Any]], T]) -> T:
        """Returns ``make(spec, knobs)``, which the first call constructs and later calls share. The object is closed at the
        end of the run.

        Raises:
            ConfigError: the environment requests services of the run, which cannot go to another process; or lacks a method.
        """
        if self._lacks:
            raise ConfigError(f"environment={self.name} has no method {' and no '.join(map(repr, self._lacks))}; add it")
        if self._requested:
            raise ConfigError(
                f"environment={self.name} asks for {', '.join(map(repr, self._requested))}, and runs in worker "
                "processes, which have only its knobs; leave the argument out, or write a workflow of your own "
                "(docs/writing_a_workflow.md)"
            )
        if self._shared is None:
            self._shared = make(self._spec, self._knobs)
        return cast(T, self._shared)

    def close(self) -> None:
        """Closes the shared object; idempotent."""
        if self._shared is not None:
            self._shared.close()

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[Any]:
        """A block with a new object, which is closed at its end."""
        service = self.make()
        try:
            yield service
        finally:
            with _logged(service):
                ended = service.close() if hasattr(service, "close") else None
                if inspect.isawaitable(ended):
                    async with asyncio.timeout(CLOSING_S):
                        await ended


class Services:
    """The services of a run. A context manager: on leaving all are closed, the last one first, also after errors.

    Example::

        with Services({"judge": "my_judge.py:Judge(words=3)"}, tokenizer=tokenizer) as services:
            reward = services.make("reward=math", MathReward, {"workers": 2}, {"timeout_s": 5.0})
    """

    def __init__(self, named: Mapping[str, str | None] | None = None, **given: Any):
        """``named``: argument name → spec of a service, which is constructed at its first request; None if the configuration
        names none. ``given``: argument name → an existing object."""
        self._named = tuple(named or ())
        self._terms = {name: read_term(spec, name) for name, spec in (named or {}).items() if spec is not None}
        self._objects = {"services": self, **given}
        self._shared_objects: dict[str, Any] = {}
        self.asked: set[str] = set()
        """Names that some factory has requested so far."""

        self._asking: list[str] = []
        self._stack = contextlib.ExitStack()

    def make(
        self, who: str, factory: Callable[..., Any], knobs: Mapping[str, Any], more: Mapping[str, Any] = NOTHING
    ) -> Any:
        """Calls a factory with its knobs and the services that its arguments name. ``who``: its name in errors. ``more``:
        argument name → object, for this call only.

        Raises:
            ConfigError: see `check`; or the factory raises.
        """
        spec, arguments = who.partition("=")[2] or who, self.arguments(who, factory, knobs, more)
        with warn_if_slow(spec):
            return in_user_code(spec, factory, **arguments)

    def arguments(
        self,
        who: str,
        factory: Callable[..., Any],
        knobs: Mapping[str, Any],
        more: Mapping[str, Any] = NOTHING,
        *,
        skip: int = 0,
    ) -> dict[str, Any]:
        """Returns the keyword arguments with which `make` would call the factory, except for its first ``skip`` arguments.

        Raises:
            ConfigError: see `check`.
        """
        requested, read = self.check(who, factory, knobs, more, skip=skip)
        self.asked.update(requested)
        return {name: more[name] if name in more else self.get(name) for name in requested} | read

    def check(
        self,
        who: str,
        factory: Callable[..., Any],
        knobs: Mapping[str, Any],
        more: Collection[str] = (),
        *,
        skip: int = 0,
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Returns the names of the services that a factory requests, and its converted knobs. Constructs nothing.

        Raises:
            ConfigError: the factory requests a service that does not exist, or a knob is wrong.
        """
        check_methods(who, factory, getattr(factory, "__abstractmethods__", ()))
        arguments = arguments_of(factory, who, skip)
        available = [*more, *self._objects, *self._terms]
        names = {*available, *self._named}
        read = read_knobs(who, arguments, knobs, names)
        for name in arguments.required:
            if name in self._named and name not in available:
                raise ConfigError(f"{who} asks for {name!r}, and the configuration names none: set {name}=my_file.py:Name")
            if name not in (*available, *knobs) and who.startswith("workflow=") and not Term(who.partition("=")[2]).is_file:
                raise ConfigError(f"{who} needs {name!r}; set workflow_args.{name}=…")
            if name not in (*available, *knobs):
                others = f"; {nearest_names(name, names)}" if names else ""
                raise ConfigError(
                    f"{who} asks for {name!r}, which nobody gives it{others}. Give {name!r} a default, or set it as a knob"
                )
        requested = [name for name in available if name in arguments.names or (arguments.open and name not in ONLY_BY_NAME)]
        return tuple(dict.fromkeys(requested)), read

    def given(self, name: str) -> Any:
        """Returns the existing object of this name; None if there is none."""
        return self._objects.get(name)

    def get(self, name: str) -> Any:
        """Returns the service of this argument name. A service of the configuration is constructed at the first call. An
        ``async def`` is returned with its knobs bound. For the class of an environment, an object is constructed and closed
        as a trial, and a `PerEpisode` is returned."""
        if name in self._objects:
            return self._objects[name]
        if name in self._asking:
            circle = " and ".join(self._asking[self._asking.index(name) :])
            raise ConfigError(f"{circle} ask for each other, so none can be made first; leave one of the arguments out")
        term = self._terms[name]
        who, kind = f"{name}={term.name}", cast(Kind, name)
        factory, knobs = factory_of(kind, term.name, name), term.arguments
        self._asking.append(name)
        try:
            if inspect.iscoroutinefunction(factory):
                self._objects[name] = partial(factory, **read_knobs(who, arguments_of(factory, who), knobs))
            elif kind == "environment":
                make = partial(factory, **self.arguments(who, factory, knobs))
                # a trial: an environment that cannot be constructed ends the run here, not in the episodes
                with warn_if_slow(term.name):
                    trial = in_user_code(term.name, make)
                lacks = [name for name in ("reset", "step") if not callable(getattr(trial, name, None))]
                _close(trial)
                requested, knob_values = self.check(who, factory, knobs)
                spec = term.name if term.is_file else service_of(kind, term.registered, name).factory
                self._objects[name] = self.keep(PerEpisode(make, term.name, spec, knob_values, requested, lacks))
            else:
                self._objects[name] = self.keep(self.make(who, factory, knobs))
        finally:
            self._asking.pop()
        return self._objects[name]

    def unused(self) -> tuple[str, ...]:
        """Returns the services that the configuration names and no factory has requested."""
        return tuple(name for name in self._terms if name not in self._objects)

    def add(self, given: Mapping[str, Any]) -> None:
        """Adds existing objects by name; a name that is in use keeps its object."""
        self._objects = {name: item for name, item in given.items() if name not in self._named} | self._objects

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Returns the object of this name, which ``make`` constructs at the first call; it closes with the services."""
        if name not in self._shared_objects:
            self._shared_objects[name] = self.keep(make())
        return cast(T, self._shared_objects[name])

    def keep(self, service: Any) -> Any:
        """Registers a service to be closed with the others, before those that were added earlier; returns it."""
        if hasattr(service, "close"):
            self._stack.callback(_close, service)
        return service

    def close(self) -> None:
        """Closes all services, the newest first, also if one fails to close; idempotent."""
        self._stack.close()

    def __enter__(self) -> "Services":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _logged(service: Any) -> Iterator[None]:
    """A block that closes a service. An error becomes a warning: the run's work is done, and other services must close
    too."""
    name = type(service).__name__
    try:
        yield
    except TimeoutError:
        log.warning("a %s took longer than %g s to close, and was left", name, CLOSING_S)
    except (Exception, SystemExit) as error:  # the boundary of a user's code
        log.warning("a %s did not close: %s: %s", name, type(error).__name__, error, exc_info=error)


def _close(service: Any) -> None:
    """Closes a service; an error becomes a warning. An ``async def close`` runs in a thread with an event loop of its own,
    because the caller may be inside a loop already (a notebook)."""

    async def wait(ended: Awaitable[Any]) -> None:
        async with asyncio.timeout(CLOSING_S):
            await ended

    with _logged(service), interrupted_after(type(service).__name__, LONGEST_CLOSING_S):
        ended = service.close() if hasattr(service, "close") else None
        if inspect.isawaitable(ended):
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, wait(ended)).result()


@dataclass(frozen=True)
class OwnClass:
    """A user's class that has been checked, with its knobs."""

    spec: str
    """File and name of the class, ``my_file.py:Name``."""

    kind: type
    asked: tuple[str, ...]
    """Names of the available arguments that the constructor takes."""

    knobs: Mapping[str, Any]

    def __call__(self, **given: Any) -> Any:
        """Constructs an object with its knobs and those arguments of ``given`` that are in `asked`.

        Raises:
            ConfigError: the constructor raised (the message has the error and its line), or a subclass of `EngineWrapper`
                did not set its ``engine``.
        """
        with warn_if_slow(self.spec):
            made = in_user_code(self.spec, self.kind, **{name: given[name] for name in self.asked}, **self.knobs)
        if isinstance(made, EngineWrapper) and not hasattr(made, "engine"):
            raise ConfigError(f"{self.spec}: its __init__ must call super().__init__(engine)")
        return made


def own_object(spec: str, key: str) -> tuple[Term, Any]:
    """Loads the object that the configuration names at ``key``; returns the parsed spec (file, name, knobs) and the object.

    Raises:
        ConfigError: the spec is not written as ``my_file.py:Name``, or the object cannot be loaded.
    """
    term = read_term(spec, key)
    if not term.is_file:
        raise ConfigError(f"{key}={spec}: name an object in a file of yours, as my_file.py:Name")
    return term, load_object(term.name)


def own_class(spec: str, key: str, base: type, given: Collection[str]) -> OwnClass:
    """Loads and checks the class that the configuration names at ``key``. ``given``: names of the available arguments.

    Raises:
        ConfigError: the class is missing, is not derived from ``base``, lacks an abstract method, needs an argument that is
            not available, or has no such knob.
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
    """Loads the function that the configuration names at ``key``, with its knobs bound. ``arguments``: number of positional
    arguments that it must take. ``form``: its expected signature, for the message.

    Raises:
        ConfigError: the function is missing, or its signature does not fit.
    """
    term, function = own_object(spec, key)
    file, _, name = term.name.rpartition(":")
    try:
        inspect.signature(function).bind(*range(arguments), **term.arguments)
    except TypeError as error:
        raise ConfigError(f"{key}={term.name}: {name} in {file} must be written as `{form}`: {error}") from None
    return partial(function, **term.arguments) if term.arguments else cast(Callable[..., Any], function)
