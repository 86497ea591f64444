"""Model families that a user's file describes: computed like a supported family, with other architecture properties."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tandem.api.plugins import in_user_code
from tandem.api.services import own_object
from tandem.config.errors import ConfigError, nearest_names

KEY = "extend.model_family"
VARIABLE = "TANDEM_MODEL_FAMILY"
"""Environment variable that names the user's family to the processes that a run starts, and to other commands."""


def _nothing(config: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class ModelFamily:
    """A family of decoders that has the layers and tensor names of a supported family.

    Example: ``ministral = ModelFamily("ministral", like="mistral")``
    """

    model_type: str
    """The ``model_type`` in the models' `config.json`."""

    like: str
    """The supported family, such as ``llama``, that this family resembles: its configuration is read and its layers are
    computed in the same way."""

    facts: Callable[[Any], Mapping[str, Any]] = _nothing
    """Function that takes a transformers configuration and returns the fields of `tandem.models.architecture.Architecture`
    that differ from the supported family: ``lambda config: {"qk_norm": True}``."""

    config: type | None = None
    """Configuration class of these models, needed only if transformers does not know the type."""

    model: type | None = None
    """Class of the causal language models of this family, needed together with ``config``."""


FAMILIES: dict[str, ModelFamily] = {}
"""``model_type`` → the user's family."""

_loaded: dict[str, ModelFamily] = {}


def use_family(spec: str) -> ModelFamily:
    """Registers the family that ``spec`` names, for this process and the processes that it starts, and returns it.

    Raises:
        ConfigError: the file has no such `ModelFamily`, or the family is not valid.
    """
    file, _, name = spec.rpartition(":")
    spec = f"{os.path.abspath(os.path.expanduser(file))}:{name}" if file.endswith(".py") else spec
    family = _load(spec)
    os.environ[VARIABLE] = spec  # set only after loading succeeded, since other processes rely on it
    return family


def load_family() -> None:
    """Registers the family that the environment variable names, if it is set. Raises as `use_family`."""
    if os.environ.get(VARIABLE):
        _load(os.environ[VARIABLE])


def _load(spec: str) -> ModelFamily:
    """Loads and registers a family, once per process."""
    if spec in _loaded:
        return _loaded[spec]
    term, family = own_object(spec, KEY)
    file, _, name = term.name.rpartition(":")
    if term.arguments:
        raise ConfigError(f"{KEY}={spec}: a family has no knobs; name it as {term.name}")
    if not isinstance(family, ModelFamily):
        raise ConfigError(
            f"{KEY}={spec}: {name} in {file} is a {type(family).__name__}; write {name} = ModelFamily(model_type, like=…)"
        )
    _check(family, f"{KEY}={spec}")
    if family.config is not None and family.model is not None:
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 — plans are made without torch

        AutoConfig.register(family.model_type, family.config, exist_ok=True)
        AutoModelForCausalLM.register(family.config, family.model, exist_ok=True)
    FAMILIES[family.model_type] = _loaded[spec] = family
    return family


def _check(family: ModelFamily, where: str) -> None:
    from tandem.models.architecture import SUPPORTED  # noqa: PLC0415 — plans are made without torch

    if family.like not in SUPPORTED:
        raise ConfigError(
            f"{where}: like={family.like!r} is not a supported family; {nearest_names(family.like, SUPPORTED)}"
        )
    if family.model_type in SUPPORTED:
        raise ConfigError(f"{where}: model_type={family.model_type!r} is already supported by Tandem; leave the family out")
    if (family.config is None) != (family.model is None):
        raise ConfigError(f"{where}: config and model go together: give both, or neither if transformers knows the type")


def with_facts(family: ModelFamily, config: Any, usual: Any) -> Mapping[str, Any]:
    """Returns the facts of a family for a configuration. ``usual``: the architecture of the supported family.

    Raises:
        ConfigError: a fact is not a field of an architecture; or the user's function raised, or returned no dict.
    """
    facts = in_user_code(f"{KEY}: facts of {family.model_type}", family.facts, config)
    if not isinstance(facts, Mapping):
        raise ConfigError(
            f"{KEY}: facts of the family {family.model_type} returned a {type(facts).__name__}; return a dict of facts"
        )
    known = [field.name for field in fields(usual)]
    wrong = next((name for name in facts if name not in known), None)
    if wrong is not None:
        raise ConfigError(f"{KEY}: the family {family.model_type} has no fact {wrong!r}; {nearest_names(wrong, known)}")
    return facts
