"""A trained model's weights under their Hugging Face names: as a stream, and in a folder."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tandem.api.engines import TrainedAdapter
from tandem.api.failures import ConfigError
from tandem.api.state import Parted
from tandem.api.team import Team
from tandem.api.weights import VALUE_FILE
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.folder import read_tensor, read_weights, write_folder, write_tensor
from tandem.engines.train.holders import Holder
from tandem.models.adapter_beside import digest_of_base
from tandem.models.adapter_folder import refuse_other_base
from tandem.models.catalog import resolve
from tandem.models.packed import PackedModel

PREFIX = "model."
"""The prefix that `PackedModel` puts before the Hugging Face names."""

VALUE = "value.weight"
"""The second head of `PackedActorCritic`, which transformers' model does not have; it has a file of its own."""


class NamedWeights:
    """The masters of a holder. Everything here is collective where they are sharded over ``team``."""

    adapter: TrainedAdapter | None = None
    """The adapter, see `TrainEngine.adapter`."""

    base: str | None = None
    """Digest by which a frozen base is recognised; None if nothing is frozen."""

    def __init__(self, config: TrainEngineConfig, holder: Holder, model: PackedModel, team: Team):
        self._config, self._holder, self._model, self._team = config, holder, model, team
        self._names = [name.removeprefix(PREFIX) for name in holder.masters if name.startswith(PREFIX)]
        self._has_value = VALUE in holder.masters
        if holder.frozen and holder.masters:
            self.base = digest_of_base(resolve(config.path))

    def stream(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as a stream; without ``dtype`` as they are held, float32."""
        yield from self._fulls(self._names, dtype)

    def _fulls(self, names: Sequence[str], dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from zip(names, self._holder.fulls([PREFIX + name for name in names], dtype), strict=True)

    def _whole(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights of the model, with those that are frozen."""
        names = (name for name, _ in self._model.named_parameters())
        return self._fulls([name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)], dtype)

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes weights, as `TrainEngine.load_weights` says. A tensor that does not fit is not copied; those before it are
        in place."""
        self._copy(weights, {name: PREFIX + name for name in self._names})
        self._holder.publish()

    def _copy(self, weights: Iterable[tuple[str, torch.Tensor]], places: Mapping[str, str]) -> None:
        """Exactly the tensors of ``places``: name → that in the holder."""
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
        """Takes all masters, float32, under the names that they have in the holder. ``base``: see the field.

        Raises:
            ConfigError: other names or shapes than this model's, or another base; nothing was copied then.
        """
        refuse_other_base(self._config.path, self.base, base)
        own = {name: tuple(self._holder.shape(name)) for name in self._holder.masters}
        given = {name: tuple(master.shape) for name, master in masters.items()}
        if own != given:
            name = next(name for name in sorted(own.keys() | given.keys()) if own.get(name) != given.get(name))
            raise ConfigError(
                f"the saved state is of another model: {name!r} is {given.get(name, 'missing')} there and "
                f"{own.get(name, 'missing')} here; resume with the model that the run began with"
            )
        for name, master in masters.items():
            self._holder.assign(name, master)
        self._holder.publish()

    def save(self, folder: Path, dtype: torch.dtype, *, writes: bool) -> None:
        """Saves the model. ``writes``: false on ranks that only take part in gathering."""
        with self._team.together(), self._team.whole(self._whole(dtype)) as weights:
            write_folder(folder, self._model.model, weights, dtype, writes=writes)
        if self._has_value:
            value = self._holder.full(VALUE)
            with self._team.together():
                if writes:
                    write_tensor(folder / VALUE_FILE, value)

    def writer(self, masters: Mapping[str, torch.Tensor | Parted], dtype: torch.dtype) -> Callable[[Path], None] | None:
        """A function that writes the files of `save`, of these masters, copies of the holder's, instead of those; from any
        thread. None where the model has weights that are no masters."""
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
        """The model's files, and that of its second head."""
        write_folder(folder, self._model.model, weights, dtype, writes=True)
        if self._has_value:
            write_tensor(folder / VALUE_FILE, together_of(masters[VALUE]))

    def load(self, folder: Path) -> None:
        """Loads the model.

        Raises:
            ConfigError: the folder has other tensors than this model.
        """
        for name, tensor in read_weights(folder, {name: self._holder.shape(PREFIX + name) for name in self._names}):
            self._holder.assign(PREFIX + name, tensor)
        if self._has_value:
            self._holder.assign(VALUE, read_tensor(folder / VALUE_FILE))
        self._holder.publish()


def together_of(copied: torch.Tensor | Parted) -> torch.Tensor:
    """A tensor of a copied state, whole."""
    return copied.gather() if isinstance(copied, Parted) else copied
