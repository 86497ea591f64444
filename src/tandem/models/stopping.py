"""The tokens that end a completion: the model's own, and the one with which its chat template ends a reply."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.api.chat_template import template_of
from tandem.config.errors import ConfigError
from tandem.models.foreign import read_generation_config
from tandem.models.tokenizer import load_tokenizer


def stop_ids(folder: Path, hf_config: Any) -> list[int]:
    """Tokens that end a completion of the model in ``folder``: those of its generation config, else of its configuration;
    then that of its chat template.

    Raises:
        ConfigError: the generation config cannot be read.
    """
    generation = read_generation_config(folder)
    own = as_list(None if generation is None else generation.eos_token_id)
    for part in (hf_config, hf_config.get_text_config()):  # a media model has it in one of them
        own = own or as_list(getattr(part, "eos_token_id", None))
    return list(dict.fromkeys([*own, *template_ends(folder)]))


def set_stop_ids(model: Any, folder: Path) -> None:
    """Writes `stop_ids` into the generation config of a transformers ``model``, which is saved with it, where its own lacks
    that of the template."""
    if not set(template_ends(folder)) <= {*as_list(model.generation_config.eos_token_id)}:
        model.generation_config.eos_token_id = stop_ids(folder, model.config)


def template_ends(folder: Path) -> Sequence[int]:
    """The special token that ends a reply in the chat template of the tokenizer in ``folder``, ``eos_token`` where it writes
    none; nothing without a template."""
    return _template_ends(folder, max((file.stat().st_mtime_ns for file in folder.glob("*.j*")), default=0))


@lru_cache(maxsize=64)
def _template_ends(folder: Path, newest: int) -> Sequence[int]:
    """``newest``: when its files were written; those written later may be of another tokenizer."""
    try:
        tokenizer = load_tokenizer(folder)
    except ConfigError:  # a model without one works with tokens; whoever needs text says so
        return ()
    end = template_of(tokenizer).end
    end = tokenizer.eos_token_id if end is None and tokenizer.chat_template else end
    return () if end is None else (end,)


def as_list(ids: int | Sequence[int] | None) -> list[int]:
    """Ids as a configuration of transformers has them: none, one or several."""
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
