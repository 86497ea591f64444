"""Rows one after the other, epoch after epoch, from wherever it was stopped."""

import math
import random
from typing import Any

from tandem.config.curriculum import CurriculumConfig
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


class Curriculum:
    """An endless iterator over a data set, in rounds of `round_rows` rows, each at most once a round.

    A round is drawn when the last one is over, without replacement, with the weight

        ``w(p) = max(floor, exp(−(p − target)² / (2·width²)))``

    of each row, p its success rate by `observe`; a row that was never measured has weight 1, so new rows come first. The
    draw follows from seed, round and rates alone. Rows carry ``epoch`` (the number of the round) and ``index`` like the
    loader's, so that the ledger counts each once a round.
    """

    def __init__(self, dataset: Dataset, config: CurriculumConfig, *, seed: int = 0):
        most = len(dataset.rows)
        if config.round_rows is None or not 0 < config.round_rows <= most:
            raise ConfigError(
                f"curriculum.round_rows must lie in 1…{most}, the rows of the data set; got {config.round_rows}"
            )
        self.dataset, self.config, self.seed = dataset, config, seed
        self.epoch, self.position = 0, 0
        self.rates: dict[int, float] = {}
        self._order = self._draw()

    @property
    def epoch_size(self) -> int:
        """Rows in one round."""
        return len(self._order)

    def __iter__(self) -> "Curriculum":
        return self

    def __next__(self) -> Row:
        """The next row; never ends."""
        if self.position == len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._draw()
        index = self._order[self.position]
        self.position += 1
        return {**self.dataset.rows[index], EPOCH: self.epoch, INDEX: index}

    def observe(self, index: int, success: float) -> None:
        """The row was tried; ``success``: share of its samples that were right, clipped to 0…1."""
        new, memory = min(1.0, max(0.0, success)), self.config.memory
        known = self.rates.get(index)
        self.rates[index] = new if known is None else memory * known + (1 - memory) * new

    def weight(self, index: int) -> float:
        """Weight of a row, in [floor, 1]."""
        rate = self.rates.get(index)
        if rate is None:
            return 1.0
        return max(self.config.floor, math.exp(-0.5 * ((rate - self.config.target) / self.config.width) ** 2))

    def metrics(self) -> dict[str, float]:
        """Metrics of the knowledge about the rows."""
        rates = list(self.rates.values())
        found = {"curriculum/measured": len(rates) / len(self.dataset.rows), "curriculum/round": float(self.epoch)}
        return found | ({"curriculum/success": sum(rates) / len(rates)} if rates else {})

    def _draw(self) -> list[int]:
        """Efraimidis and Spirakis (2006): the largest u^(1/w), in a random order."""
        assert self.config.round_rows is not None
        noise = random.Random(f"{self.seed}/round {self.epoch}")
        keys = []
        for index in range(len(self.dataset.rows)):
            number = math.log(1.0 - noise.random())  # drawn for every row, so that one row's weight moves no other's number
            weight = self.weight(index)
            keys.append((number / weight if weight > 0 else -math.inf, index))
        keys.sort(reverse=True)
        chosen = [index for _, index in keys[: self.config.round_rows]]
        noise.shuffle(chosen)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Its position and its knowledge; JSON-able."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order": list(self._order),
            "rates": [[index, rate] for index, rate in sorted(self.rates.items())],
            "num_rows": len(self.dataset.rows),
            "rows": self.dataset.fingerprint,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the last row that was given before ``state`` was taken.

        Raises:
            ConfigError: the data set or the seed is another one.
        """
        own = {"num_rows": len(self.dataset.rows), "seed": self.seed, "rows": self.dataset.fingerprint}
        for name, value in own.items():
            if state[name] != value:
                raise ConfigError(
                    f"the curriculum cannot resume: {name} was {state[name]} and is {value} now; resume with the data "
                    "set and the seed of the run"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = [int(index) for index in state["order"]]
        self.rates = {int(index): float(rate) for index, rate in state["rates"]}
