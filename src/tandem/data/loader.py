"""Rows one after the other, epoch after epoch, from wherever it was stopped."""

from typing import Any

from tandem.config.data import EPOCH, INDEX
from tandem.config.errors import ConfigError
from tandem.data.dataset import Dataset
from tandem.data.rows import Row


class Loader:
    """An iterator over a data set: endless, or for ``epochs`` passes.

    Every row is a new dict with ``tandem.epoch`` and ``tandem.index`` (its place in `Dataset.rows`, the same in every
    epoch). The order depends on seed and epoch alone, so the whole state is two numbers.
    """

    def __init__(self, dataset: Dataset, *, seed: int = 0, shuffle: bool = True, epochs: int | None = None):
        self.dataset, self.seed, self.shuffle, self.epochs = dataset, seed, shuffle, epochs
        self.epoch, self.position = 0, 0
        self._order = self._order_of(0)

    def __iter__(self) -> "Loader":
        """Itself: a second loop goes on where the first one stopped."""
        return self

    def __next__(self) -> Row:
        """The next row.

        Raises:
            StopIteration: all epochs are over.
        """
        if self.position == len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._order_of(self.epoch)
        if self.epochs is not None and self.epoch >= self.epochs:
            raise StopIteration
        index = self._order[self.position]
        self.position += 1
        return {**self.dataset.rows[index], EPOCH: self.epoch, INDEX: index}

    def _order_of(self, epoch: int) -> list[int]:
        return self.dataset.order(epoch, seed=self.seed, shuffle=self.shuffle)

    def state_dict(self) -> dict[str, Any]:
        """Its position, and the facts that it must be resumed with; JSON-able."""
        rows = {"num_rows": len(self.dataset.rows), "rows": self.dataset.fingerprint, "seed": self.seed}
        rows["shuffle"] = self.shuffle
        return {"epoch": self.epoch, "position": self.position, **rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the last row that was given before ``state`` was taken.

        Raises:
            ConfigError: the data set, seed or shuffling is another one, so the order would be too.
        """
        own = self.state_dict()
        for name in ("num_rows", "seed", "shuffle"):
            if state[name] != own[name]:
                raise ConfigError(
                    f"the loader cannot resume: {name} was {state[name]} and is {own[name]} now; resume with the data set, "
                    "seed and shuffle of the run"
                )
        if state["rows"] != own["rows"]:
            raise ConfigError(
                f"the loader cannot resume: the {own['num_rows']} rows are others than those of the run; resume with the "
                "data set of the run"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self.epoch)
