"""Families of models that a user's file describes: computed as one that is known, with other facts."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tandem.api.extensions import own_object
from tandem.api.plugins import in_user_code
from tandem.config.errors import ConfigError, nearest_names

KEY = "extend.model_family"
VARIABLE = "TANDEM_MODEL_FAMILY"
"""The environment variable that names the file to the processes that a run starts, and to other commands."""


def _nothing(config: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class ModelFamily:
    """A family of decoders whose layers are those of a known family, with the same names of tensors.

    Example: ``ministral = ModelFamily("ministral", like="mistral")``
    """

    model_type: str
    """``model_type`` in the models' `config.json`."""

    like: str
    """The known family, such as ``llama``, as which its configuration is read and its layers are computed."""

    facts: Callable[[Any], Mapping[str, Any]] = _nothing
    """Gives the facts that differ, which are fields of `tandem.models.architecture.Architecture`, from a configuration of
    transformers: ``lambda config: {"qk_norm": True}``."""

    config: type | None = None
    """Its configuration class, where transformers does not know the type."""

    model: type | None = None
    """Its class of causal language models, likewise."""


FAMILIES: dict[str, ModelFamily] = {}
"""``model_type`` → the family of the user's that has it."""

_loaded: dict[str, ModelFamily] = {}


def use_family(spec: str) -> ModelFamily:
    """From now on, here and in processes that this one starts, models of the family that ``spec`` names can be opened.
    Returns the family.

    Raises:
        ConfigError: the file has no such `ModelFamily`, or it does not say what it is like.
    """
    file, _, name = spec.rpartition(":")
    spec = f"{os.path.abspath(os.path.expanduser(file))}:{name}" if file.endswith(".py") else spec
    family = _load(spec)
    os.environ[VARIABLE] = spec  # only what can be loaded: whoever reads it has not written it
    return family


def load_family() -> None:
    """Brings in the family that the environment names. Raises as `use_family`."""
    if os.environ.get(VARIABLE):
        _load(os.environ[VARIABLE])


def _load(spec: str) -> ModelFamily:
    """Brings in a family, once in a process."""
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
            f"{where}: like={family.like!r} is no family that is known; {nearest_names(family.like, SUPPORTED)}"
        )
    if family.model_type in SUPPORTED:
        raise ConfigError(f"{where}: model_type={family.model_type!r} is a family that Tandem has; leave it out")
    if (family.config is None) != (family.model is None):
        raise ConfigError(f"{where}: config and model go together: give both, or none where transformers knows the type")


def with_facts(family: ModelFamily, config: Any, usual: Any) -> Mapping[str, Any]:
    """The facts of a family for a configuration. ``usual``: the architecture without them.

    Raises:
        ConfigError: a fact that an architecture does not have; or the user's function raised, or gave no dict.
    """
    found = in_user_code(f"{KEY}: facts of {family.model_type}", family.facts, config)
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{KEY}: facts of the family {family.model_type} gave a {type(found).__name__}; return a dict of facts"
        )
    known = [field.name for field in fields(usual)]
    wrong = next((name for name in found if name not in known), None)
    if wrong is not None:
        raise ConfigError(f"{KEY}: the family {family.model_type} has a fact {wrong!r}; {nearest_names(wrong, known)}")
    return found
