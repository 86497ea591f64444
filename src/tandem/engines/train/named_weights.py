"""A trained model's weights under their Hugging Face names: streamed, and read and written as a Hugging Face folder.

Weights with adapters are merged into the base, or the adapter comes alone.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tandem.api.activity import did
from tandem.api.engines import TrainedAdapter
from tandem.api.state import Parted
from tandem.api.team import Team
from tandem.api.weights import VALUE_FILE, Adapter, save_tensors
from tandem.config.errors import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.holders import Holder
from tandem.models.catalog import ADAPTER, digest_of_base, resolve
from tandem.models.load import HEAD, tensors_of
from tandem.models.lora import (
    A,
    B,
    Base,
    lora_matrices,
    merged,
    read_adapter,
    refuse_other_base,
    without_adapters,
    write_adapter,
)
from tandem.models.packed import PackedModel


def write_folder(
    folder: Path, model: Any, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype, *, writes: bool
) -> None:
    """Writes ``weights``, the configuration and the generation configuration of a transformers ``model``.

    With ``writes=False`` the stream is only read, for its collective calls. The file of weights is renamed to its final name
    when it is complete.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        did("save")
        if writes:
            tensors[name] = tensor.to("cpu").contiguous()
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_tensors(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
    settings = model.config.to_dict() | {
        "dtype": str(dtype).removeprefix("torch."),
        "architectures": [type(model).__name__],
    }
    type(model.config).from_dict(settings).save_pretrained(folder)
    generation_config = getattr(model, "generation_config", None)  # a classifier has none
    if generation_config is not None:
        generation_config.save_pretrained(folder)


def read_weights(folder: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of ``shapes`` from the folder's safetensors files.

    Raises:
        ConfigError: there is no safetensors file, or a tensor is missing or has another shape. Checked before the first
            tensor is yielded.
    """
    files = tensors_of(folder)
    if not files:
        raise ConfigError(f"folder {folder} has no model.safetensors to load weights from")
    missing = sorted(set(shapes) - set(files))
    if missing:
        raise ConfigError(
            f"folder {folder} lacks {len(missing)} tensors of this model, first {missing[0]!r}; is it another model?"
        )
    for name, shape in shapes.items():
        stored = files[name].get_shape()
        if stored != list(shape):
            raise ConfigError(f"tensor {name!r} in {folder} is {stored}, this model has {list(shape)}")
    for name in shapes:
        yield name, files[name][:]


def write_tensor(path: Path, tensor: torch.Tensor) -> None:
    """Writes a safetensors file with one tensor, named ``weight``."""
    save_tensors({"weight": tensor.to("cpu").contiguous()}, path)


def read_tensor(path: Path) -> torch.Tensor:
    """Reads the tensor of a file that `write_tensor` wrote.

    Raises:
        ConfigError: the file does not exist.
    """
    if not path.is_file():
        raise ConfigError(f"folder {path.parent} has no {path.name}, which this model was saved with; is it another model?")
    return load_file(path)["weight"]


PREFIX = "model."
"""The prefix that `PackedModel` puts before the Hugging Face names."""

VALUE = "value.weight"
"""Name of the second head of `PackedActorCritic`. Transformers' model does not have this head, so it is saved in its own
file."""


class NamedWeights:
    """The masters of a holder under their Hugging Face names. All methods are collective if masters are sharded."""

    adapter: TrainedAdapter | None = None
    """The adapter, see `TrainEngine.adapter`."""

    base: str | None = None
    """Digest that identifies the frozen base model; None if nothing is frozen."""

    def __init__(self, config: TrainEngineConfig, holder: Holder, model: PackedModel, team: Team):
        self._config, self._holder, self._model, self._team = config, holder, model, team
        self._names = [name.removeprefix(PREFIX) for name in holder.masters if name.startswith(PREFIX)]
        self._has_value = VALUE in holder.masters
        if holder.frozen and holder.masters:
            self.base = digest_of_base(resolve(config.path))

    def stream(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, whole tensor) of all trained weights; ``dtype``: None keeps float32."""
        yield from self._fulls(self._names, dtype)

    def _fulls(self, names: Sequence[str], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from zip(names, self._holder.fulls([PREFIX + name for name in names], dtype), strict=True)

    def _whole(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, whole tensor) of all weights of the model, trained or frozen."""
        names = (name for name, _ in self._model.named_parameters())
        return self._fulls([name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)], dtype)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Implements `TrainEngine.load_weights`. If a tensor does not fit, those before it have been copied already."""
        self._copy(weights, {name: PREFIX + name for name in self._names})
        self._holder.publish()

    def _copy(self, weights: Iterable[tuple[str, torch.Tensor]], places: Mapping[str, str]) -> None:
        """Copies ``weights`` into the holder. ``places``: name of each expected tensor → its name in the holder.

        Raises:
            ConfigError: a tensor is missing, not expected, or has another shape.
        """
        missing = {name: tuple(self._holder.shape(place)) for name, place in places.items()}
        for name, tensor in weights:
            shape = missing.pop(name, None)
            if shape != tuple(tensor.shape):
                raise ConfigError(
                    f"tensor {name!r} {list(tensor.shape)} cannot be copied into this model, which has "
                    f"{'none of that name' if shape is None else list(shape)}; is it another model?"
                )
            self._holder.assign(places[name], tensor)
        if missing:
            raise ConfigError(f"{len(missing)} tensors of this model were not given, first {next(iter(missing))!r}")

    def load_masters(self, masters: Mapping[str, torch.Tensor], base: str | None = None) -> None:
        """Replaces all masters. ``masters``: name in the holder → whole float32 tensor. ``base``: digest of the frozen base
        to which they belong.

        Raises:
            ConfigError: names, shapes or the base differ from this model's. Checked before anything is copied.
        """
        refuse_other_base(self._config.path, self.base, base)
        shapes = {name: tuple(self._holder.shape(name)) for name in self._holder.masters}
        saved = {name: tuple(master.shape) for name, master in masters.items()}
        if shapes != saved:
            name = next(name for name in sorted(shapes.keys() | saved.keys()) if shapes.get(name) != saved.get(name))
            raise ConfigError(
                f"the saved state is of another model: {name!r} is {saved.get(name, 'missing')} there and "
                f"{shapes.get(name, 'missing')} here; resume with the model that the run began with"
            )
        for name, master in masters.items():
            self._holder.assign(name, master)
        self._holder.publish()

    def save(self, folder: Path, dtype: torch.dtype, *, writes: bool) -> None:
        """Saves the model to a folder. ``writes``: False on ranks that only take part in gathering."""
        with self._team.together(), self._team.whole(self._whole(dtype)) as weights:
            write_folder(folder, self._model.model, weights, dtype, writes=writes)
        if self._has_value:
            value = self._holder.full(VALUE)
            with self._team.together():
                if writes:
                    write_tensor(folder / VALUE_FILE, value)

    def writer(self, masters: Mapping[str, torch.Tensor | Parted], dtype: torch.dtype) -> Callable[[Path], None] | None:
        """Returns a function that writes the files of `save` to a folder, from copied ``masters``. It may run in any thread.
        None if the model has weights that are not masters."""
        if dict(self._model.named_parameters()).keys() != self._holder.masters.keys():
            return None

        def write(folder: Path) -> None:
            weights = ((name, together_of(masters[PREFIX + name]).to(dtype)) for name in self._names)
            self._write(folder, weights, masters, dtype)

        return write

    def _write(
        self,
        folder: Path,
        weights: Iterator[tuple[str, torch.Tensor]],
        masters: Mapping[str, torch.Tensor | Parted],
        dtype: torch.dtype,
    ) -> None:
        """Writes the model's files, and the file of its second head if it has one."""
        write_folder(folder, self._model.model, weights, dtype, writes=True)
        if self._has_value:
            write_tensor(folder / VALUE_FILE, together_of(masters[VALUE]))

    def load(self, folder: Path) -> None:
        """Loads the weights of a folder into the holder.

        Raises:
            ConfigError: a tensor is missing in the folder, or has another shape.
        """
        for name, tensor in read_weights(folder, {name: self._holder.shape(PREFIX + name) for name in self._names}):
            self._holder.assign(PREFIX + name, tensor)
        if self._has_value:
            self._holder.assign(VALUE, read_tensor(folder / VALUE_FILE))
        self._holder.publish()


def together_of(copied: torch.Tensor | Parted) -> torch.Tensor:
    """Returns the whole tensor of an entry of a state."""
    return copied.whole() if isinstance(copied, Parted) else copied


SAMPLED = 4
"""Number of matrices that `EngineAdapters.surviving` samples."""


def named_weights(config: TrainEngineConfig, holder: Holder, model: PackedModel, team: Team) -> NamedWeights:
    """Returns the named weights of a train engine: `AdaptedWeights` if it trains adapters, else `NamedWeights`."""
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
        """Yields merged weights, see `TrainedAdapter.merged`. ``tensors``: adapter tensors; None: those of this engine.
        ``dtype``: None keeps each tensor's dtype."""
        for name in self.names:
            module = name.removesuffix(".weight")
            if module in self.layers:
                whole = self.merge(module, self._holder.full(PREFIX + name), tensors)
                yield name, whole if dtype is None else whole.to(dtype)
            else:
                yield name, self._holder.full(PREFIX + name, dtype)

    def merge(self, module: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Returns a module's matrix merged with its adapter, float32. Without an adapter, or with B = 0, the matrix
        is returned unchanged."""
        if module not in self.layers:
            return weight
        names = [f"{module}.{which}.weight" for which in (A, B)]
        if tensors is None:
            a, b = (self._holder.full(self.places[name]) for name in names)
        else:
            a, b = (tensors[name].to(weight.device) for name in names)
        return merged(weight, a, b, self._config.lora.scaling)

    def surviving(self, dtype: torch.dtype) -> float | None:
        """Implements `TrainedAdapter.surviving`: Σ rounded change · exact change / Σ exact change², over all entries of
        `SAMPLED` matrices."""
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
    """The named weights of a model that trains adapters and new heads. All other weights are those of the base, and
    frozen."""

    adapter: EngineAdapters
    base: str

    def __init__(self, config: TrainEngineConfig, holder: Holder, model: PackedModel, team: Team):
        super().__init__(config, holder, model, team)
        self._folder = resolve(config.path)  # resolved once: a name on the hub may mean other files later
        self.adapter, self.base = EngineAdapters(config, holder, model), digest_of_base(self._folder)
        self._names = self.adapter.names
        heads = {HEAD: PREFIX + HEAD} if PREFIX + HEAD in holder.masters else {}
        self._saved = self.adapter.places | heads

    def stream(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the merged weights. If ``dtype`` is None, tensors without an adapter have the base's dtype."""
        return self.adapter.merged(dtype=dtype)

    def _whole(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        return self.stream(dtype)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads the tensors of an adapter. Inside `TrainEngine.using`, it may also load the weights of the whole model.

        Raises:
            ConfigError: the weights are of the whole model, outside of `TrainEngine.using`. The base must stay that of the
                folder it was loaded from.
        """
        stream = iter(weights)
        first = next(stream, None)
        tensors = stream if first is None else itertools.chain([first], stream)
        if first is not None and first[0] in self.adapter.places:
            self._copy(tensors, self.adapter.places)
        elif not self._holder.lent:
            raise ConfigError(
                "an engine with actor.lora keeps its base and takes the tensors of an adapter; to begin with other weights, "
                "give their folder as actor.path"
            )
        else:
            self._copy(tensors, {name: PREFIX + name for name in self._names})
            for name in self.adapter.layers:
                place = f"{PREFIX}{name}.{B}"
                self._holder.assign(place, torch.zeros(self._holder.shape(place)))
        self._holder.publish()

    def save(self, folder: Path, dtype: torch.dtype, *, writes: bool) -> None:
        """Saves the merged model, and the adapter in a subfolder."""
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
        """Returns a regular expression for the full names of a media model's adapted matrices; empty for a text model."""
        if self._model.media is None:
            return ""
        family, parts = self._model.media.family, []
        for prefix in (f"{family.text_prefix}layers.", *itertools.chain.from_iterable(family.towers.values())):
            ends = sorted({name.rpartition(".")[2] for name in self.adapter.layers if name.startswith(prefix)})
            if ends:
                parts.append(rf"{re.escape(prefix)}(?:.*\.)?(?:{'|'.join(ends)})")
        return "|".join(parts)

    def writer(self, masters: Mapping[str, torch.Tensor | Parted], dtype: torch.dtype) -> Callable[[Path], None] | None:
        """Implements `NamedWeights.writer`. The base is read from its files again, because a writer cannot gather its shards
        while the ranks train. None if these files are gone or changed, or have other tensor names than the model."""
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
                if name not in frozen:  # a head, which is trained without an adapter
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
            ConfigError: the folder has no adapter, or one of another model or LoRA rank.
        """
        tensors, _ = read_adapter(folder / ADAPTER)
        self._copy(tensors.items(), self._saved)
        if self._has_value:
            self._holder.assign(VALUE, read_tensor(folder / VALUE_FILE))
        self._holder.publish()
