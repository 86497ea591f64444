"""A model that a training engine holds, or this rank's part of it: opened, read, replaced, saved, asleep, restored."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.api.engines import TrainEngine, TrainPart
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.asleep import EngineMemory
from tandem.engines.train.named_weights import named_weights
from tandem.engines.train.optimizer import Optimizer
from tandem.engines.train.spread import Head, form_ranks, open_spread
from tandem.models.catalog import AdapterBeside, resolve
from tandem.models.hardware import resolve_dtype


class HeldModel(TrainEngine):
    """All of a `TrainEngine` but its computations, on one process or on all processes of a group.

    Master weights are float32; forward and backward passes use ``config.dtype``.
    """

    def __init__(
        self,
        config: TrainEngineConfig,
        total_steps: int,
        *,
        device: str | torch.device = "cpu",
        process_group: dist.ProcessGroup | None = None,
        head: Head = "lm",
        key: str = "actor.backend",
        trained: bool = True,
        adapter: AdapterBeside | None = None,
        trunk: "HeldModel | None" = None,
        label: str | int | None = None,
    ):
        """``total_steps``: optimizer steps of the run, for the schedule. ``process_group``: None takes the default group if
        torch.distributed is initialised, else this process alone. ``head``: ``scalar`` gives ``scores`` and neither
        log-probabilities nor entropy, and is saved as a sequence classifier; ``both`` is a language model that gives scores
        too, and is saved as a language model with the second head in a separate file. ``trained``: False for a model that
        only computes `forward`, with a third of the memory in bfloat16; it may apply an ``adapter``, which ``config.lora``
        describes. ``trunk``: an engine with the same frozen weights except for heads and adapters; both share the memory.
        ``label``: the class whose score is read. ``key``: configuration key of ``config.backend``, for errors.

        Raises:
            ConfigError: the model cannot be opened, or the group has another size than ``config.backend`` says.
            WeightsChanged: the trunk has other values.
        """
        self.config, self.total_steps, self.head, self.device = config, total_steps, head, torch.device(device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.ranks = form_ranks(config.backend, process_group, self.device, key)
        self.world_size = self.ranks.layout.ranks
        self.model, self.holder = open_spread(config, self.ranks, self.device, self.dtype, head, trained, adapter, label)
        self.optimizer = Optimizer(self.holder, config.optimizer, total_steps, self.ranks)
        self._weights = named_weights(config, self.holder, self.model, self.ranks.team)
        self.adapter = self._weights.adapter
        lender: EngineMemory | None = None if trunk is None else trunk._memory
        self._memory: EngineMemory = EngineMemory(self.holder, self.optimizer, self.device, resolve(config.path), lender)
        self._require = self._memory.require

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Implements `TrainEngine.weights`. If ``dtype`` is None, trained weights are float32.

        A tensor may be the engine's own memory: read it before requesting the next one, and do not write to it.
        """
        self._require("parameters")
        yield from self._weights.stream(dtype)

    def save(self, folder: Path) -> None:
        """Implements `TrainEngine.save`. Weights are written in the dtype of forward passes."""
        self._require("parameters")
        self._weights.save(Path(folder), self.dtype, writes=self.ranks.rank == 0)

    def load(self, folder: Path) -> None:
        """Implements `TrainEngine.load`. The optimizer's state does not change. Raises `ConfigError` if tensors differ."""
        self._require("parameters")
        self._weights.load(Path(folder))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._require("parameters")
        self._weights.take(weights)

    @contextlib.contextmanager
    def using(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
        with self.holder.restored():
            self.load_weights(weights)
            yield

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[bool]:
        """Implements `TrainEngine.in_float32`. Yields False for sharded weights that are rounded."""
        self._require("parameters")
        if self.dtype == torch.float32:
            yield True
            return
        with self.holder.in_float32() as exact:
            yield exact

    def state_dict(self) -> dict[str, Any]:
        self._require("parameters", "optimizer")
        masters = {name: self.holder.state_of(name, master.detach()) for name, master in self.holder.masters.items()}
        return {"masters": masters, "optimizer": self.optimizer.state_dict(), "base": self._weights.base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._require("parameters", "optimizer")
        self._weights.load_masters(state["masters"], state.get("base"))
        self.optimizer.load_state_dict(state["optimizer"])

    def late_writer(self, state: Mapping[str, Any]) -> Callable[[Path], None] | None:
        return self._weights.writer(state["masters"], self.dtype)

    def offload(self, parts: tuple[TrainPart, ...], scratch: Path | None = None) -> int:
        return self._memory.offload(parts, scratch)

    def onload(self, parts: tuple[TrainPart, ...]) -> int:
        return self._memory.onload(parts)

    def num_bytes(self) -> dict[TrainPart, int]:
        return self._memory.num_bytes()
