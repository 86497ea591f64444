"""Iterators over the rows of a data set, epoch by epoch or by a curriculum, that resume where they stopped."""

import math
import random
from typing import Any

from tandem.config.data import EPOCH, INDEX, CurriculumConfig
from tandem.config.errors import ConfigError
from tandem.data.dataset import Dataset
from tandem.data.rows import Row


class Loader:
    """An iterator over a data set: endless, or for ``epochs`` epochs.

    Every row is a new dict with ``tandem.epoch`` and ``tandem.index`` (its index in `Dataset.rows`, the same in every
    epoch). The order depends on seed and epoch alone, so the state is two numbers: epoch and position.
    """

    def __init__(self, dataset: Dataset, *, seed: int = 0, shuffle: bool = True, epochs: int | None = None):
        self.dataset, self.seed, self.shuffle, self.epochs = dataset, seed, shuffle, epochs
        self.epoch, self.position = 0, 0
        self._order = self._order_of(0)

    def __iter__(self) -> "Loader":
        """Returns the loader itself, so a second loop continues where the first one stopped."""
        return self

    def __next__(self) -> Row:
        """Returns the next row.

        Raises:
            StopIteration: all epochs are done.
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
        """Returns the position, and the rows, seed and shuffling that a resumed loader must have; JSON-able."""
        rows = {"num_rows": len(self.dataset.rows), "rows": self.dataset.fingerprint, "seed": self.seed}
        rows["shuffle"] = self.shuffle
        return {"epoch": self.epoch, "position": self.position, **rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the last row that was yielded before ``state`` was saved.

        Raises:
            ConfigError: the data set, seed or shuffling differs, so the order would differ too.
        """
        current = self.state_dict()
        for name in ("num_rows", "seed", "shuffle"):
            if state[name] != current[name]:
                raise ConfigError(
                    f"the loader cannot resume: {name} was {state[name]} and is {current[name]} now; resume with the data "
                    "set, seed and shuffle of the run"
                )
        if state["rows"] != current["rows"]:
            raise ConfigError(
                f"the loader cannot resume: the {current['num_rows']} rows differ from those of the run; resume with the "
                "data set of the run"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self.epoch)


class Curriculum(Loader):
    """An endless iterator over a data set, in rounds of `round_rows` different rows that favour a target success rate.

    When a round is over, the next round is drawn without replacement. The weight of each row is

        ``w(p) = max(floor, exp(−(p − target)² / (2·width²)))``

    where p is the row's success rate from `observe`. A row without a success rate has weight 1, the maximum, so new rows
    come first. The draw depends on seed, round and rates alone. Rows have ``tandem.epoch`` (the number of the round)
    and ``tandem.index`` like those of `Loader`, so that the ledger counts each row once a round.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: CurriculumConfig,
        *,
        seed: int = 0,
        width: float = 0.25,
        floor: float = 0.05,
        memory: float = 0.5,
    ):
        """``width``: standard deviation of the bell curve around the target. ``floor``: smallest weight of a row, relative
        to a row at the target, so that every row is tried again from time to time. ``memory``: weight of a row's earlier
        success rate when a new one is measured; 0 uses only the newest."""
        num_rows = len(dataset.rows)
        if config.round_rows is None or not 0 < config.round_rows <= num_rows:
            raise ConfigError(
                f"curriculum.round_rows must lie in 1…{num_rows}, the rows of the data set; got {config.round_rows}"
            )
        self.config, self.width, self.floor, self.memory = config, width, floor, memory
        self.rates: dict[int, float] = {}
        super().__init__(dataset, seed=seed)

    @property
    def epoch_size(self) -> int:
        """The number of rows in one round."""
        return len(self._order)

    def observe(self, index: int, success: float) -> None:
        """Updates the success rate of a row. ``success``: the share of its samples that were right, clipped to 0…1."""
        new, known = min(1.0, max(0.0, success)), self.rates.get(index)
        self.rates[index] = new if known is None else self.memory * known + (1 - self.memory) * new

    def weight(self, index: int) -> float:
        """Returns the weight of a row, in [floor, 1]."""
        rate = self.rates.get(index)
        if rate is None:
            return 1.0
        return max(self.floor, math.exp(-0.5 * ((rate - self.config.target) / self.width) ** 2))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics ``curriculum/…``: share of measured rows, round, and mean success rate."""
        rates = list(self.rates.values())
        metrics = {"curriculum/measured": len(rates) / len(self.dataset.rows), "curriculum/round": float(self.epoch)}
        return metrics | ({"curriculum/success": sum(rates) / len(rates)} if rates else {})

    def _order_of(self, epoch: int) -> list[int]:
        """Draws a round by weighted sampling without replacement (Efraimidis and Spirakis 2006): the rows with the largest
        u^(1/w), shuffled."""
        assert self.config.round_rows is not None
        noise = random.Random(f"{self.seed}/round {epoch}")
        keys = []
        for index in range(len(self.dataset.rows)):
            number = math.log(1.0 - noise.random())  # for every row, so that weights do not change the numbers drawn
            weight = self.weight(index)
            keys.append((number / weight if weight > 0 else -math.inf, index))
        keys.sort(reverse=True)
        chosen = [index for _, index in keys[: self.config.round_rows]]
        noise.shuffle(chosen)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, the success rates, and the rows and seed that a resumed curriculum must have; JSON-able."""
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
        """Continues after the last row that was yielded before ``state`` was saved.

        Raises:
            ConfigError: the data set or the seed differs.
        """
        current = {"num_rows": len(self.dataset.rows), "seed": self.seed, "rows": self.dataset.fingerprint}
        for name, value in current.items():
            if state[name] != value:
                raise ConfigError(
                    f"the curriculum cannot resume: {name} was {state[name]} and is {value} now; resume with the data "
                    "set and the seed of the run"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = [int(index) for index in state["order"]]
        self.rates = {int(index): float(rate) for index, rate in state["rates"]}
