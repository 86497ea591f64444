"""Who works with whom: all ranks of a run, or some of them, on which a model sits that is spread over fewer."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict

from tandem.api.engines import LossFn, Outputs, TrainEngine, TrainPart
from tandem.api.team import Team

T = TypeVar("T")


def form_team(ranks: Sequence[int], everyone: Team) -> Team:
    """The team of these ranks, whose main is the lowest. Collective over ``everyone``, all ranks of the run."""
    chosen = tuple(sorted(set(ranks)))
    assert chosen and chosen[0] >= 0 and chosen[-1] < everyone.size, f"ranks {chosen} of {everyone.size}"
    if len(chosen) == everyone.size:
        return everyone
    if chosen not in everyone.parts:
        everyone.parts[chosen] = Team(dist.new_group(list(chosen)))
    return everyone.parts[chosen]


def form_generators(ranks: Sequence[int], everyone: Team, patience_s: float) -> Team | None:
    """The ranks that generate, for messages beside all that training sends; None if it is one. ``patience_s``: how long a
    batch may take, which no message gives up before. Collective over ``everyone``."""
    if len(ranks) == 1 or everyone.size == 1:
        return None
    return Team(dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=patience_s + 600)))


class TeamEngine(TrainEngine):
    """A model on some of the ranks, for all of them: they compute, and every rank gets the result.

    Roles and scripts call it on all ranks, as they call a model that sits on all. A failure of one rank reaches all.
    """

    def __init__(self, engine: TrainEngine | None, everyone: Team, first: int = 0):
        """``engine``: the model, on the ranks that it sits on, of which ``first`` is the lowest. ``everyone``: all ranks."""
        self.engine, self._everyone, self._first = engine, everyone, first

    def _everywhere(self, compute: Callable[[TrainEngine], T]) -> T:
        """The result on all ranks. The ranks of the model all compute it and get the same; the first hands its own on."""
        result: Any = None
        with self._everyone.together():
            if self.engine is not None:
                result = compute(self.engine)
        return self._everyone.share(lambda: result, self._first)

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """Implements `TrainEngine.train_batch`."""
        return self._everywhere(lambda engine: engine.train_batch(batch, loss_fn, entropy=entropy))

    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """Implements `TrainEngine.eval_batch`."""
        return self._everywhere(lambda engine: engine.eval_batch(batch, loss_fn, entropy=entropy))

    def forward(self, batch: TensorDict, *, entropy: bool = False) -> Outputs:
        """Implements `TrainEngine.forward`."""

        def compute(engine: TrainEngine) -> TensorDict:
            outputs = engine.forward(batch, entropy=entropy)._asdict().items()
            return TensorDict({name: column for name, column in outputs if column is not None and column.numel()})

        columns, device = self._everywhere(compute), batch["input_ids"].device
        given = {name: columns[name].to(device) for name in Outputs._fields if name in columns.keys()}
        return Outputs(**{"logprobs": torch.zeros(0, device=device)} | given)

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Implements `TrainEngine.weights`; a rank without the model gets no tensors."""
        return iter(()) if self.engine is None else self.engine.weights(dtype)

    def save(self, folder: Path) -> None:
        """Implements `TrainEngine.save`."""
        self._everywhere(lambda engine: engine.save(folder))

    def load(self, folder: Path) -> None:
        """Implements `TrainEngine.load`."""
        self._everywhere(lambda engine: engine.load(folder))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Implements `TrainEngine.load_weights`; every rank reads the stream, for a model on all ranks may give it."""
        with self._reading(weights) as stream:
            if self.engine is not None:
                self.engine.load_weights(stream)

    @contextlib.contextmanager
    def using(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Implements `TrainEngine.using`."""
        with contextlib.ExitStack() as stack:
            with self._reading(weights) as stream:
                if self.engine is not None:
                    stack.enter_context(self.engine.using(stream))
            yield

    @contextlib.contextmanager
    def _reading(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The stream for a block in which a rank with the model reads all of it; a rank without it does so here."""
        with self._everyone.together(), self._everyone.whole(weights) as stream:
            yield stream
            for _ in stream:
                pass

    def state_dict(self) -> dict[str, Any]:
        """Implements `TrainEngine.state_dict`; empty on a rank without the model."""
        return {} if self.engine is None else self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `TrainEngine.load_state_dict`."""
        if self.engine is not None:
            self.engine.load_state_dict(state)

    def late_writer(self, state: Mapping[str, Any]) -> Callable[[Path], None] | None:
        """Implements `TrainEngine.late_writer`, on the first rank of the model."""
        return None if self.engine is None else self.engine.late_writer(state)

    def offload(self, parts: tuple[TrainPart, ...], scratch: Path | None = None) -> int:
        """Implements `TrainEngine.offload`."""
        return 0 if self.engine is None else self.engine.offload(parts, scratch)

    def onload(self, parts: tuple[TrainPart, ...]) -> int:
        """Implements `TrainEngine.onload`."""
        return 0 if self.engine is None else self.engine.onload(parts)

    def num_bytes(self) -> dict[TrainPart, int]:
        """Implements `TrainEngine.num_bytes`."""
        return {} if self.engine is None else self.engine.num_bytes()
