"""The weights of a model with adapters: merged for readers of whole weights, or the adapter alone."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from tandem.api.engines import TrainedAdapter
from tandem.api.failures import ConfigError
from tandem.api.state import Parted
from tandem.api.team import Team
from tandem.api.weights import VALUE_FILE, Adapter
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.folder import read_tensor
from tandem.engines.train.holders import Holder
from tandem.engines.train.named_weights import PREFIX, VALUE, NamedWeights, together_of
from tandem.models.adapter_beside import ADAPTER, digest_of_base
from tandem.models.adapter_folder import Base, read_adapter, write_adapter
from tandem.models.catalog import resolve
from tandem.models.heads import HEAD
from tandem.models.lora import A, B, lora_matrices, merged, without_adapters
from tandem.models.packed import PackedModel
from tandem.models.streaming import tensors_of

SAMPLED = 4
"""Number of matrices that `EngineAdapters.surviving` looks at."""


def named_weights(config: TrainEngineConfig, holder: Holder, model: PackedModel, team: Team) -> NamedWeights:
    """The named weights of a train engine: `AdaptedWeights` if it trains adapters, else `NamedWeights`."""
    kind = AdaptedWeights if config.lora.rank is not None and holder.masters else NamedWeights
    return kind(config, holder, model, team)


class EngineAdapters(TrainedAdapter):
    """The adapters of one model; see `TrainedAdapter`."""

    def __init__(self, config: TrainEngineConfig, holder: Holder, model: PackedModel):
        self._config, self._holder, self._model = config, holder, model
        self.layers = {name.removeprefix(PREFIX): layer for name, layer in lora_matrices(model).items()}
        """Hugging Face name of a module with an adapter → the module."""

        self.places = {f"{name}.{which}.weight": f"{PREFIX}{name}.{which}" for name in self.layers for which in (A, B)}
        """Published and saved name of an adapter tensor → its name in the holder."""

        inside = set(self.places.values())
        order = (name for name, _ in model.named_parameters())
        self.names = [n.removeprefix(PREFIX) for n in order if n.startswith(PREFIX) and n not in inside]
        """Hugging Face names of all weights of the merged model."""

    @property
    def terms(self) -> Adapter:
        return Adapter(self._config.lora.scaling, next(iter(self.layers.values())).weight.dtype)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, place in self.places.items():
            yield name, self._holder.full(place)

    def merged(
        self, tensors: Mapping[str, torch.Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields merged weights, see `TrainedAdapter.merged`. ``tensors``: adapter tensors; None: those that are trained
        here. ``dtype``: None keeps each tensor's own."""
        for name in self.names:
            module = name.removesuffix(".weight")
            if module in self.layers:
                whole = self.merge(module, self._holder.full(PREFIX + name), tensors)
                yield name, whole if dtype is None else whole.to(dtype)
            else:
                yield name, self._holder.full(PREFIX + name, dtype)

    def merge(self, module: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The merged matrix of one module, float32. A matrix without an adapter, or with B = 0, is returned as it is."""
        if module not in self.layers:
            return weight
        names = [f"{module}.{which}.weight" for which in (A, B)]
        if tensors is None:
            a, b = (self._holder.full(self.places[name]) for name in names)
        else:
            a, b = (tensors[name].to(weight.device) for name in names)
        return merged(weight, a, b, self._config.lora.scaling)

    def surviving(self, dtype: torch.dtype) -> float | None:
        """The share of the adapter that survives rounding to ``dtype`` (see `TrainedAdapter.surviving`): the projection of
        the rounded change on the exact change, over all entries of `SAMPLED` matrices."""
        modules = list(self.layers)
        kept = exact = 0.0
        for module in {modules[i * (len(modules) - 1) // (SAMPLED - 1)]: None for i in range(SAMPLED)}:  # first to last
            base = self._holder.full(f"{PREFIX}{module}.weight").float()
            whole = self.merge(module, base)
            change = whole - base
            kept += float(((whole.to(dtype).float() - base.to(dtype).float()) * change).sum())
            exact += float(change.square().sum())
        return kept / exact if exact else None

    def set_aside(self) -> contextlib.AbstractContextManager[None]:
        return without_adapters(self._model)


class AdaptedWeights(NamedWeights):
    """The named weights of a model that trains adapters and new heads; its other weights are frozen and stay the base's."""

    adapter: EngineAdapters
    base: str

    def __init__(self, config: TrainEngineConfig, holder: Holder, model: PackedModel, team: Team):
        super().__init__(config, holder, model, team)
        self._folder = resolve(config.path)  # once: a name on the hub may mean other files tomorrow
        self.adapter, self.base = EngineAdapters(config, holder, model), digest_of_base(self._folder)
        self._names = self.adapter.names
        heads = {HEAD: PREFIX + HEAD} if PREFIX + HEAD in holder.masters else {}
        self._saved = self.adapter.places | heads

    def stream(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the merged weights. Without ``dtype``, tensors without an adapter have the base's dtype."""
        return self.adapter.merged(dtype=dtype)

    def _whole(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream(dtype)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads the tensors of an adapter; or whole weights, but only inside `TrainEngine.using`.

        Raises:
            ConfigError: whole weights outside of `TrainEngine.using`: the base belongs to the folder that it was loaded
                from.
        """
        stream = iter(weights)
        first = next(stream, None)
        everything = stream if first is None else itertools.chain([first], stream)
        if first is not None and first[0] in self.adapter.places:
            self._copy(everything, self.adapter.places)
        elif not self._holder.lent:
            raise ConfigError(
                "an engine with actor.lora keeps its base and takes the tensors of an adapter; to begin with other weights, "
                "give their folder as actor.path"
            )
        else:
            self._copy(everything, {name: PREFIX + name for name in self._names})
            for name in self.adapter.layers:
                place = f"{PREFIX}{name}.{B}"
                self._holder.assign(place, torch.zeros(self._holder.shape(place)))
        self._holder.publish()

    def save(self, folder: Path, dtype: torch.dtype, *, writes: bool) -> None:
        """Saves the merged model, and the adapter in a folder beside it."""
        super().save(folder, dtype, writes=writes)
        named = ((name, self._holder.full(place)) for name, place in self._saved.items())
        with self._team.together(), self._team.whole(named) as stream:
            tensors = {name: tensor for name, tensor in stream if writes}
            if writes:
                self._write_adapter(folder, tensors)

    def _write_adapter(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        modules = sorted({name.rpartition(".")[2] for name in self.adapter.layers})
        base = Base(self._config.path, self.base, self.adapter.terms.dtype)
        write_adapter(
            folder / ADAPTER,
            tensors,
            self._config.lora,
            base,
            modules,
            classifier=HEAD in self._saved,
            pattern=self._pattern(),
        )

    def _pattern(self) -> str:
        """A regular expression for the full names of a media model's adapted matrices; empty for a text model."""
        if self._model.media is None:
            return ""
        family, parts = self._model.media.family, []
        for prefix in (f"{family.text_prefix}layers.", *itertools.chain.from_iterable(family.towers.values())):
            ends = sorted({name.rpartition(".")[2] for name in self.adapter.layers if name.startswith(prefix)})
            if ends:
                parts.append(rf"{re.escape(prefix)}(?:.*\.)?(?:{'|'.join(ends)})")
        return "|".join(parts)

    def writer(self, masters: Mapping[str, torch.Tensor | Parted], dtype: torch.dtype) -> Callable[[Path], None] | None:
        """A writer, as `NamedWeights.writer` says. The base, of which ranks have shards that none of them may gather beside
        training, is read from its files again; None where these are gone or changed, or do not have it under the names of
        the model."""
        try:
            files = tensors_of(self._folder)
            same = digest_of_base(self._folder) == self.base
        except (ConfigError, OSError):
            same = False
        if not same:
            return None
        held = self.adapter.terms.dtype
        frozen = {name: self._holder.shape(PREFIX + name) for name in self._names if PREFIX + name in self._holder.frozen}
        if any(name not in files or tuple(files[name].get_shape()) != tuple(shape) for name, shape in frozen.items()):
            return None

        def merged_weights(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
            for name in self._names:
                if name not in frozen:  # a head, which is trained as a whole
                    yield name, together_of(masters[PREFIX + name]).to(dtype)
                    continue
                weight, module = files[name][:].to(self._holder.device, held), name.removesuffix(".weight")
                yield name, self.adapter.merge(module, weight, tensors).to(dtype)

        def write(folder: Path) -> None:
            tensors = {name: together_of(masters[place]) for name, place in self._saved.items()}
            self._write(folder, merged_weights(tensors), masters, dtype)
            self._write_adapter(folder, tensors)

        return write

    def load(self, folder: Path) -> None:
        """Loads the adapter and the heads that `save` wrote.

        Raises:
            ConfigError: there is none, or it is of another model or rank.
        """
        tensors, _ = read_adapter(folder / ADAPTER)
        self._copy(tensors.items(), self._saved)
        if self._has_value:
            self._holder.assign(VALUE, read_tensor(folder / VALUE_FILE))
        self._holder.publish()
