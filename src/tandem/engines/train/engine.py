"""The training engine: a model sharded by FSDP2 or DeepSpeed. Its steps do not depend on the cut into micro-batches."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from tandem.api.activity import did, span
from tandem.api.batch import num_sequences, select
from tandem.api.engines import LossFn, Outputs, TrainEngine, TrainPart
from tandem.api.failures import BatchError
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.asleep import EngineMemory
from tandem.engines.train.micro_batches import filler, has_weight, micro_batches
from tandem.engines.train.named_weights import named_weights
from tandem.engines.train.optimizer import Optimizer
from tandem.engines.train.spread import Head, Totals, form_ranks, open_spread, sum_over_ranks
from tandem.models.catalog import AdapterBeside, resolve
from tandem.models.hardware import resolve_dtype, upload, uploaded


class SpreadEngine(TrainEngine):
    """Trains one model on one process or on all processes of a group.

    Batches are global: every rank passes the same batch and gets the same result. Master weights are float32; forward and
    backward passes use ``config.dtype``.
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
        trunk: "SpreadEngine | None" = None,
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

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """Implements `TrainEngine.train_batch`.

        If the gradient is exactly 0, weights and optimizer state do not change (no weight decay, no momentum). The schedule
        counts all calls, also skipped steps. Sequences whose ``loss_weights`` are all 0 have no gradient: they enter the
        metrics, and need only a forward pass.
        """
        self._require("parameters", "optimizer")
        if not self.holder.masters:
            raise RuntimeError("this engine was built with trained=False, so it has nothing that a step could change")
        self.optimizer.zero_grad()
        totals, weighted = Totals(), has_weight(batch)
        planned = self._micro_batches(batch, weighted)
        for number, indices in enumerate(planned, 1):
            self.holder.accumulate(last=number == len(planned))
            with span("train: forward"):
                loss = self._loss(batch, indices, loss_fn, entropy, totals)
            with span("train: backward"):
                self.holder.backward(loss * self.ranks.sums)  # undoes the averaging of gradients over ranks
        with torch.no_grad():
            for indices in self._micro_batches(batch, ~weighted):
                self._loss(batch, indices, loss_fn, entropy, totals)
        metrics = self._gathered(totals)
        with span("train: optimizer"):
            self.holder.finish_gradients()
            self.edit_gradients(self.holder.named_local_gradients())
            return metrics | self.optimizer.step(metrics["loss"])

    def edit_gradients(self, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Does nothing. A subclass may change gradients in place here, before the optimizer clips and steps. ``gradients``:
        name of each parameter and this rank's part of its gradient, summed over the batch and all ranks."""

    def moved(self) -> dict[str, float]:
        """Implements `TrainEngine.moved`."""
        return self.optimizer.moved()

    @torch.no_grad()
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        self._require("parameters")
        totals = Totals()
        for indices in self._micro_batches(batch):
            self._loss(batch, indices, loss_fn, entropy, totals)
        return self._gathered(totals)

    @torch.no_grad()
    def forward(self, batch: TensorDict, *, entropy: bool = False) -> Outputs:
        self._require("parameters")
        bounds, names = batch["cu_seqlens"].tolist(), self._output_names(entropy)
        rows = torch.zeros(len(names), bounds[-1], device=self.device)
        for indices in self._micro_batches(batch):
            outputs = self._compute(select(batch, indices) if indices else filler(), entropy)
            if not indices or not self.ranks.is_first_with_batch:
                continue
            tokens = upload(torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices]), self.device)
            for row, name in zip(rows, names, strict=True):
                row[tokens] = getattr(outputs, name)
        sum_over_ranks(rows, self.ranks.group)
        fields = dict(zip(names, rows.to(batch["input_ids"].device), strict=True))
        return Outputs(**{"logprobs": rows.new_zeros(0)} | fields)

    def _output_names(self, entropy: bool) -> list[str]:
        """Names of the `Outputs` fields that the model's heads give."""
        names = {"logprobs": self.head != "scalar", "entropy": entropy, "scores": self.head != "lm"}
        return [name for name, is_given in names.items() if is_given]

    def _micro_batches(self, batch: TensorDict, chosen: torch.Tensor | None = None) -> list[list[int]]:
        """Returns this rank's micro-batches, equally many on every rank. ``chosen [N]`` bool: uses only these sequences."""
        layout = self.ranks.layout
        # ranks that share the tokens of a sequence compute a part of the tokens each
        budget = self.config.micro_batch_tokens * layout.context
        return micro_batches(batch, budget, self.ranks.batch, layout.batches, chosen)

    def _gathered(self, totals: Totals) -> dict[str, float]:
        return totals.gather(self.ranks.group, counts=self.ranks.is_first_with_batch)

    def _compute(self, chosen: TensorDict, entropy: bool) -> Outputs:
        """Runs the model on the sequences ``chosen``, a batch in host memory, where the layout is computed."""
        did()  # counts a micro-batch, also a filler
        inputs = chosen["input_ids"], chosen["cu_seqlens"], chosen["loss_mask"]
        media = chosen["media"] if "media" in chosen.keys() else None
        if self.head == "scalar":
            if entropy:
                raise ValueError("a model with a scalar head has no distribution over tokens, so it has no entropy")
            return self.holder.compute(self.model.lay_out(*inputs, device=self.device, media=media))
        temperature = chosen["temperature"] if "temperature" in chosen.keys() else torch.ones(num_sequences(chosen))
        return self.holder.compute(self.model.lay_out(*inputs, temperature, self.device, media), entropy)

    def _loss(self, batch: TensorDict, indices: list[int], loss_fn: LossFn, entropy: bool, totals: Totals) -> torch.Tensor:
        """Returns the weighted sum of the losses of one micro-batch; adds its metrics to ``totals``."""
        if not indices:
            # other ranks have a micro-batch: take part in the communication with a loss of 0
            outputs = self._compute(filler(), entropy)
            return sum((x.sum() for x in outputs if x is not None), start=torch.zeros((), device=self.device)) * 0.0
        chosen = select(batch, indices)
        view = uploaded(chosen, self.device)
        losses, metrics = loss_fn(self._compute(chosen, entropy), view)
        weights = view["loss_weights"]
        if losses.shape != weights.shape:
            raise BatchError(f"the loss function gave losses {list(losses.shape)}, loss_weights are {list(weights.shape)}")
        loss = (losses * weights).sum()
        trained = upload(chosen["loss_mask"].nonzero().flatten(), self.device)
        totals.add(loss.detach(), metrics, trained, len(chosen["loss_mask"]), num_sequences(chosen))
        return loss

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
