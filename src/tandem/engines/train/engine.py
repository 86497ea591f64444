"""The training engine: a model sharded by FSDP2 or DeepSpeed. Its steps do not depend on the cut into micro-batches."""

from collections.abc import Iterable

import torch
from tensordict import TensorDict

from tandem.api.activity import did, span
from tandem.api.batch import num_sequences, select
from tandem.api.engines import LossFn, Outputs
from tandem.api.failures import BatchError
from tandem.engines.train.held_model import HeldModel
from tandem.engines.train.micro_batches import filler, has_weight, micro_batches
from tandem.engines.train.spread import Totals, sum_over_ranks
from tandem.models.hardware import upload, uploaded


class SpreadEngine(HeldModel):
    """Trains one model on one process or on all processes of a group. Batches are global: every rank passes the same batch
    and gets the same result."""

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """Implements `TrainEngine.train_batch`. Sequences whose ``loss_weights`` are all 0 have no gradient: they enter the
        metrics, and need only a forward pass."""
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
        """Does nothing. A subclass may change gradients in place here, before the optimizer clips and steps: by name, this
        rank's part of each parameter's gradient, summed over the batch and all ranks."""

    def moved(self) -> dict[str, float]:
        return self.optimizer.step_size.metrics()

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
        bounds = batch["cu_seqlens"].tolist()
        computed = {"logprobs": self.head != "scalar", "entropy": entropy, "scores": self.head != "lm"}
        names = [name for name, is_computed in computed.items() if is_computed]
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
