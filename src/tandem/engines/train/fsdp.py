"""The training engine on FSDP2: a model, its optimizer, and steps that do not depend on how a batch is cut."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.api.batch import lengths, num_sequences, select, sum_by_sequence
from tandem.api.collective import together, whole
from tandem.api.engines import LossFn, Outputs, TrainEngine, TrainPart
from tandem.api.failures import BatchError, ConfigError, NonFinite
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.folder import read_tensor, read_weights, write_folder, write_tensor
from tandem.engines.train.holders import Holder, Replica, Sharded, sum_over_ranks
from tandem.engines.train.micro_batches import Item, plan
from tandem.engines.train.schedule import learning_rate
from tandem.engines.train.totals import Totals
from tandem.models.heads import VALUE_FILE
from tandem.models.load import load_causal_lm, load_scalar_model
from tandem.models.packed import PackedModel
from tandem.models.precision import resolve_dtype
from tandem.models.prefixes import prompt_keys

_PREFIX = "model."
"""What `PackedModel` puts before the Hugging Face names."""

_VALUE = "value.weight"
"""The second head of `PackedActorCritic`, which transformers' model does not have."""

Head = Literal["lm", "scalar", "both"]


class FSDPEngine(TrainEngine):
    """Trains one model on one process or on all processes of a group.

    Batches are global: every rank passes the same one and gets the same result. Weights are float32, the computation
    has ``config.dtype``.
    """

    def __init__(
        self,
        config: TrainEngineConfig,
        *,
        total_steps: int,
        device: str | torch.device = "cpu",
        process_group: dist.ProcessGroup | None = None,
        head: Head = "lm",
    ):
        """``total_steps``: optimizer steps of the run, for the schedule. ``process_group``: None takes the default group
        where torch.distributed is initialised, else this process alone. ``head``: ``scalar`` gives ``scores`` and neither
        log-probabilities nor entropy; it is saved as a sequence classifier. ``both``: a language model that gives scores
        too; it is saved as a language model, and the second head in a file of its own.

        Raises:
            ConfigError: the model cannot be opened, or the group has another size than ``config.backend`` says.
        """
        self.config, self.total_steps, self.device = config, total_steps, torch.device(device)
        self.dtype = resolve_dtype(config.dtype, self.device)
        self._group, mesh = _group_and_mesh(process_group, self.device)
        self.world_size = 1 if self._group is None else dist.get_world_size(self._group)
        self.rank = 0 if self._group is None else dist.get_rank(self._group)
        if config.backend != f"fsdp:d{self.world_size}":
            raise ConfigError(
                f"actor.backend is {config.backend!r}, but {self.world_size} process(es) take part; "
                f"set it to fsdp:d{self.world_size}, or start as many processes as it says"
            )
        self.head = head
        self.model = self._load_model()
        layers = self.model.model.model.layers
        self._holder: Holder = (
            Replica(self.model, self.dtype) if mesh is None else Sharded(self.model, layers, self.dtype, mesh)
        )
        self._optimizer = self._make_optimizer()
        self._offloaded: set[TrainPart] = set()
        self._step = 0
        self._skips_in_a_row = 0

    def train_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """See `TrainEngine.train_batch`.

        A gradient that is exactly 0 leaves weights and optimizer state as they are (no decay, no momentum): a batch without
        information changes nothing. The schedule counts calls, taken or skipped. Sequences whose ``loss_weights`` are all 0
        have no gradient: they are in the metrics, and cost a forward pass only.
        """
        self._require("parameters", "optimizer")
        self._optimizer.zero_grad()
        totals, weighted = Totals(), _has_weight(batch)
        for indices in self._micro_batches(batch, weighted):
            loss = self._loss(batch, indices, loss_fn, entropy, totals)
            # FSDP averages gradients over ranks, the step needs their sum
            (loss * self.world_size).backward()
        with torch.no_grad():
            for indices in self._micro_batches(batch, ~weighted):
                self._loss(batch, indices, loss_fn, entropy, totals)
        metrics = totals.gather(self._group)
        return metrics | self._take_step(metrics["loss"])

    @torch.no_grad()
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """See `TrainEngine.eval_batch`."""
        self._require("parameters")
        totals = Totals()
        for indices in self._micro_batches(batch):
            self._loss(batch, indices, loss_fn, entropy, totals)
        return totals.gather(self._group)

    @torch.no_grad()
    def forward(self, batch: TensorDict, *, entropy: bool = False) -> Outputs:
        """See `TrainEngine.forward`."""
        self._require("parameters")
        bounds = batch["cu_seqlens"].tolist()
        names = self._given(entropy)
        found = torch.zeros(len(names), bounds[-1], device=self.device)
        for indices in self._micro_batches(batch):
            if not indices:
                self._compute(_filler(self.device), entropy)
                continue
            outputs = self._compute(select(batch, indices).to(self.device), entropy)
            tokens = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices]).to(self.device)
            for row, name in zip(found, names, strict=True):
                row[tokens] = getattr(outputs, name)
        sum_over_ranks(found, self._group)
        given = dict(zip(names, found.to(batch["input_ids"].device), strict=True))
        return Outputs(**{"logprobs": found.new_zeros(0)} | given)

    def _given(self, entropy: bool) -> list[str]:
        """What the heads give, ``[T]`` each."""
        names = {"logprobs": self.head != "scalar", "entropy": entropy, "scores": self.head != "lm"}
        return [name for name, there in names.items() if there]

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainEngine.weights`. Without ``dtype`` they come as they are held: float32.

        A tensor may be the engine's own memory: read it before asking for the next, and do not write to it.
        """
        self._require("parameters")
        for name in self._names():
            tensor = self._holder.full(name)
            yield name.removeprefix(_PREFIX), tensor if dtype is None else tensor.to(dtype)

    def save(self, folder: Path) -> None:
        """See `TrainEngine.save`. Weights are written in the dtype that the engine computes in."""
        agreed = contextlib.nullcontext() if self._group is None else together(self._group)
        with agreed, whole(self.weights(self.dtype)) as weights:
            write_folder(Path(folder), self.model.model, weights, self.dtype, writes=self.rank == 0)
        if self.head == "both":
            value = self._holder.full(_VALUE)
            with contextlib.nullcontext() if self._group is None else together(self._group):
                if self.rank == 0:
                    write_tensor(Path(folder) / VALUE_FILE, value)

    def load(self, folder: Path) -> None:
        """See `TrainEngine.load`. The optimizer's state stays as it is.

        Raises:
            ConfigError: the folder has other tensors than this model.
        """
        self._require("parameters")
        expected = {name.removeprefix(_PREFIX): self._holder.masters[name] for name in self._names()}
        for name, tensor in read_weights(Path(folder), {name: p.shape for name, p in expected.items()}):
            self._holder.assign(_PREFIX + name, tensor)
        if self.head == "both":
            self._holder.assign(_VALUE, read_tensor(Path(folder) / VALUE_FILE))
        self._holder.publish()

    def _names(self) -> list[str]:
        """Those of transformers' model: a second head is not part of it."""
        return [name for name in self._holder.masters if name.startswith(_PREFIX)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `TrainEngine.load_weights`. Nothing is changed by tensors that do not fit; those before them are in place."""
        self._require("parameters")
        missing = {name.removeprefix(_PREFIX): tuple(self._holder.masters[name].shape) for name in self._names()}
        for name, tensor in weights:
            shape = missing.pop(name, None)
            if shape != tuple(tensor.shape):
                raise ConfigError(
                    f"tensor {name!r} {list(tensor.shape)} cannot be copied into this model, which has "
                    f"{'none of that name' if shape is None else list(shape)}; is it another model?"
                )
            self._holder.assign(_PREFIX + name, tensor)
        if missing:
            raise ConfigError(f"{len(missing)} tensors of this model were not given, first {next(iter(missing))!r}")
        self._holder.publish()

    @contextlib.contextmanager
    def using(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """See `TrainEngine.using`."""
        with self._holder.restored():
            self.load_weights(weights)
            yield

    def offload(self, parts: tuple[TrainPart, ...]) -> None:
        """See `TrainEngine.offload`. What is offloaded must be brought back before it is used."""
        if "gradients" in parts:
            self._optimizer.zero_grad()
        if self.device.type != "cpu":
            self._move(parts, torch.device("cpu"))
        self._offloaded |= set(parts) - {"gradients"}

    def onload(self, parts: tuple[TrainPart, ...]) -> None:
        """See `TrainEngine.onload`."""
        if self.device.type != "cpu":
            self._move(parts, self.device)
        self._offloaded -= set(parts)

    def _move(self, parts: tuple[TrainPart, ...], device: torch.device) -> None:
        if "parameters" in parts:
            self._holder.move(device)
        if "optimizer" in parts:
            for state in self._optimizer.state.values():
                state.update({name: x.to(device) for name, x in state.items() if isinstance(x, torch.Tensor) and x.dim()})

    def _require(self, *parts: TrainPart) -> None:
        missing = sorted(self._offloaded & set(parts))
        if missing:
            raise RuntimeError(
                f"{' and '.join(missing)} of the train engine are offloaded; call onload({tuple(missing)}) first"
            )

    def _load_model(self) -> PackedModel:
        config = self.config
        if self.head == "scalar":
            return load_scalar_model(config.path, torch.float32, self.device, config.gradient_checkpointing)
        return load_causal_lm(
            config.path,
            torch.float32,
            self.device,
            config.gradient_checkpointing,
            chunk_tokens=config.logprob_chunk_tokens,
            value_head=self.head == "both",
        )

    def _make_optimizer(self) -> torch.optim.AdamW:
        options, masters = self.config.optimizer, self._holder.masters.values()
        groups = [
            {"params": [p for p in masters if p.dim() >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in masters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, fused=True)

    def _micro_batches(self, batch: TensorDict, chosen: torch.Tensor | None = None) -> list[list[int]]:
        """Indices of the sequences of each of this rank's micro-batches; ``chosen [N]`` bool: of these only."""
        count = num_sequences(batch)
        if count == 0:
            raise BatchError("the batch has no sequences")
        if chosen is not None and not bool(chosen.any()):
            return []
        keys, sizes = prompt_keys(batch["input_ids"], batch["cu_seqlens"].tolist(), batch["loss_mask"])
        rest = [length - size for length, size in zip(lengths(batch).tolist(), sizes, strict=True)]
        units = batch["unit_id"].tolist() if "unit_id" in batch.keys() else [None] * count
        index = list(range(count)) if chosen is None else chosen.nonzero().flatten().tolist()
        items = [Item(keys[i], rest[i], units[i]) for i in index]
        planned = plan(items, self.config.max_tokens_per_micro_batch, self.world_size)[self.rank]
        return [[index[i] for i in micro_batch] for micro_batch in planned]

    def _compute(self, view: TensorDict, entropy: bool) -> Outputs:
        if self.head == "scalar":
            if entropy:
                raise ValueError("a model with a scalar head has no distribution over tokens, so it has no entropy")
            return self.model(view["input_ids"], view["cu_seqlens"], view["loss_mask"])
        temperature = (
            view["temperature"] if "temperature" in view.keys() else torch.ones(num_sequences(view), device=self.device)
        )
        return self.model(view["input_ids"], view["cu_seqlens"], temperature, view["loss_mask"], entropy)

    def _loss(self, batch: TensorDict, indices: list[int], loss_fn: LossFn, entropy: bool, totals: Totals) -> torch.Tensor:
        """Weighted sum of the losses of one micro-batch; its metrics go into ``totals``."""
        if not indices:
            # another rank has one more: take part in the communication, add nothing
            outputs = self._compute(_filler(self.device), entropy)
            return sum(x.sum() for x in outputs if x is not None) * 0.0
        view = select(batch, indices).to(self.device)
        losses, metrics = loss_fn(self._compute(view, entropy), view)
        weights = view["loss_weights"]
        if losses.shape != weights.shape:
            raise BatchError(f"the loss function gave losses {list(losses.shape)}, loss_weights are {list(weights.shape)}")
        loss = (losses * weights).sum()
        totals.loss += float(loss.detach())
        totals.add_all(metrics, view["loss_mask"], num_sequences(view))
        return loss

    def _gradient_norm(self) -> float:
        """Global L2 norm, summed in float64 so that it does not depend on how parameters are cut."""
        squares = [g.pow(2).sum(dtype=torch.float64) for g in self._holder.local_gradients()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        return math.sqrt(float(sum_over_ranks(total, self._group)))

    def _take_step(self, loss: float) -> dict[str, float]:
        """Clips and steps, or skips; every rank decides the same, from the same numbers."""
        options, norm = self.config.optimizer, self._gradient_norm()
        rate = learning_rate(self._step, self.total_steps, options)
        self._step += 1
        report = {"grad_norm": norm, "lr": rate, "skipped": 0.0}
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= options.max_consecutive_skips:
                raise NonFinite(
                    f"{self._skips_in_a_row} optimizer steps in a row had a loss or gradient that is not finite "
                    f"(loss {loss}, gradient norm {norm}); lower actor.optimizer.lr, or look at the rewards and advantages"
                )
            return report | {"skipped": 1.0}
        self._skips_in_a_row = 0
        if norm > 0:
            if options.max_grad_norm is not None and norm > options.max_grad_norm:
                for gradient in self._holder.local_gradients():
                    gradient.mul_(options.max_grad_norm / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._holder.publish()
        self._optimizer.zero_grad()
        return report


def _has_weight(batch: TensorDict) -> torch.Tensor:
    """Sequences with a loss weight other than 0, ``[N]`` bool, and those of the same unit, which their loss may read."""
    weighted = (batch["loss_weights"] != 0).float()
    if len(weighted) != num_sequences(batch):
        weighted = sum_by_sequence(batch, weighted)
    if "unit_id" in batch.keys():
        unit = batch["unit_id"].unique(return_inverse=True)[1]
        weighted = weighted.new_zeros(int(unit.max()) + 1).index_add(0, unit, weighted)[unit]
    return weighted > 0


def _filler(device: torch.device) -> TensorDict:
    """Two tokens for a rank that has nothing to do."""
    columns = {
        "input_ids": torch.zeros(2, dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, 2]),
        "loss_mask": torch.tensor([False, True]),
    }
    return TensorDict(columns, batch_size=[]).to(device)


def _group_and_mesh(
    group: dist.ProcessGroup | None, device: torch.device
) -> tuple[dist.ProcessGroup | None, DeviceMesh | None]:
    """The group to communicate in and its mesh; None for a process alone."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return None, None
    if group is dist.group.WORLD:
        return group, init_device_mesh(device.type, (dist.get_world_size(),))
    return group, DeviceMesh.from_group(group, device.type)
