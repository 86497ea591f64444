"""Low-rank adapters: small trained matrices beside weights that stay frozen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.config.backend import parse_layout
from tandem.config.errors import ConfigError
from tandem.config.keys import leaves
from tandem.config.overlay import either

if TYPE_CHECKING:
    from tandem.config.experiment import BaseConfig

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): only they are trained; see docs/lora.md."""

    rank: int | None = None
    """Rank of each adapter, for example 16; null trains all weights."""

    alpha: float | None = None
    """The adapter's output is multiplied by alpha / rank; null takes twice the rank."""

    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Matrices that get an adapter: `all-linear` for all of every layer, or the ends of their names, `[q_proj, v_proj]`."""

    towers: tuple[str, ...] = ()
    """Parts of a media model whose matrices get adapters too, such as `[vision]`; docs/media_models.md names them."""

    dropout: float = 0.0
    """Dropout of the adapter's inputs; for `tandem sft` and `tandem reward` only."""

    @property
    def scaling(self) -> float:
        """The factor on an adapter's output, alpha / rank; 0 without adapters."""
        return 0.0 if self.rank is None else (2.0 if self.alpha is None else self.alpha / self.rank)


def lora_problems(config: "BaseConfig", *, compares: bool) -> Iterator[str]:
    """Yields a message for each broken rule of `actor.lora` and `critic.lora`. ``compares``: True if the loss compares
    log-probabilities of several passes."""
    for role in ("actor", "critic"):
        part: Any = getattr(config, role, None)
        if part is None:
            continue
        lora: LoRAConfig = part.lora
        key = f"{role}.lora"
        if lora.rank is None:
            default = dict(leaves(LoRAConfig()))
            for name, value in leaves(lora):
                if value != default[name]:
                    shown = f"[{', '.join(value)}]" if isinstance(value, tuple) else value
                    yield f"{key}.{name}={shown} is not used because {key}.rank is null: set it, for example to 16"
            continue
        if not lora.target_modules:
            yield f"{key}.target_modules is empty, so nothing would be trained; name matrices, or write {ALL_LINEAR}"
        elif ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1:
            yield f"{key}.target_modules has {ALL_LINEAR}, which is all of them, and more; keep one"
        for tower in lora.towers:
            if tower in getattr(part, "freeze", ()):
                yield f"{role}.freeze and {key}.towers both name {tower!r}: its adapters would learn nothing; keep one"
        if lora.dropout and compares:
            yield (
                f"{key}.dropout={lora.dropout:g} would make log-probabilities random, and this training compares those of "
                "one pass with another's: leave it out"
            )
        yield from _cut(key, f"{role}.backend", either(part, config.actor, "backend"))


def _cut(key: str, name: str, backend: str) -> Iterator[str]:
    if not backend.startswith("fsdp:"):
        yield f"{key} goes with {name}=fsdp:dN, got {backend}: other backends have no adapters here"
        return
    try:
        cut = parse_layout(backend).tensor
    except ConfigError:
        return  # told elsewhere
    if cut > 1:
        yield (
            f"{key} does not go with {name}={backend}: t cuts every matrix, and an adapter's two are not cut with it. Use "
            "d, which shards the base, with c or r where they are needed"
        )
