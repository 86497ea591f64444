"""Abstract classes of the two engines: `InferenceEngine` generates, `TrainEngine` trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.requests import LLMRequest, LLMResponse
from tandem.api.weights import Adapter, WeightUpdate, WeightVersion
from tandem.config.errors import ConfigError

TrainPart = Literal["parameters", "gradients", "optimizer"]
InferencePart = Literal["weights", "kv_cache"]


class Outputs(NamedTuple):
    """The results of a forward pass, for a loss: one value per token of the view, ``[T]``. Logits are never returned.

    The entry at position t describes token t. Log-probabilities and entropies are 0 at tokens that are not predicted: the
    first of each sequence, and those whose ``loss_mask`` is false.
    """

    logprobs: torch.Tensor
    """Log-probabilities of the tokens, ``[T]``; empty if the model has a scalar head."""

    entropy: torch.Tensor | None = None
    """Entropies of the predicted distributions, ``[T]``; None unless requested."""

    scores: torch.Tensor | None = None
    """Outputs of the scalar head, ``[T]``, each *after* token t; None if the model has no scalar head."""


Metrics = Mapping[str, "torch.Tensor"]
"""Name → detached tensor: ``[T]``, averaged over the tokens in ``loss_mask``, or ``[N]``, averaged over sequences.

If the name ends in ``/max``, the maximum is taken instead of the average.
"""

LossFn = Callable[[Outputs, "TensorDict"], tuple["torch.Tensor", Metrics]]
"""``loss_fn(outputs, view) -> (losses, metrics)``; the losses are unreduced, ``[T]`` or ``[N]`` like ``loss_weights``.

``view`` is a part of the batch: some of its sequences, each whole, with their own ``cu_seqlens``.
"""


class TrainedAdapter(ABC):
    """The low-rank adapter that an engine trains on a frozen base model (`LoRAConfig`)."""

    @property
    @abstractmethod
    def terms(self) -> Adapter:
        """The rule by which the adapter's tensors change the base model's weights."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the adapter's tensors in float32; `TrainEngine.load_weights` accepts them too. Collective."""

    @abstractmethod
    def merged(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the whole model's weights, with ``tensors`` merged into the base in float32 instead of the adapter's own.
        ``tensors``: named as in `weights`. Each yielded tensor is valid until the next one is requested. Collective."""

    @abstractmethod
    def surviving(self, dtype: torch.dtype) -> float | None:
        """Returns the share of the adapter's change that remains if merged weights are rounded to ``dtype``: 0 to 1.

        Measured on a few matrices, see docs/lora.md. None if the adapter changes nothing yet. Collective."""

    @abstractmethod
    def set_aside(self) -> AbstractContextManager[None]:
        """A block in which the engine computes with the base model alone; nothing may be trained inside."""


class TrainEngine(ABC):
    """A model that is trained. Takes and returns *global* batches, and shards them internally."""

    adapter: TrainedAdapter | None = None
    """The adapter that the engine trains; None if it trains all weights."""

    @abstractmethod
    def train_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """Takes one optimizer step on ``sum(loss_weights * losses)`` over the whole batch; returns metrics.

        Metrics: ``loss``, ``grad_norm``, ``lr``, ``skipped`` (1 if the step was not taken because something was not
        finite), and the loss function's own. Sequences with the same ``unit_id`` stay together. A gradient that is
        exactly 0 changes neither weights nor optimizer state; the schedule counts the call.
        Raises `NonFinite` after too many skips in a row.
        """

    def moved(self) -> dict[str, float]:
        """Returns the metric ``actor/update_ratio``: norm of the last optimizer step / norm of the weights. Empty if
        unknown.

        The ratio is estimated from some of the weights. The layout over ranks decides which of them are used."""
        return {}

    @abstractmethod
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """Returns the loss and the loss function's metrics as `train_batch` does, without a step."""

    @abstractmethod
    def forward(self, batch: TensorDict, *, entropy: bool = False) -> Outputs:
        """Computes the global batch without gradient: log-probabilities, with ``entropy`` also entropies, or scores of a
        scalar head. One value for each token ``[T]``, in the batch's order."""

    @abstractmethod
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (Hugging Face name, full tensor) of all weights; a tensor that is tied to another name comes once.
        Collective."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes a Hugging Face model folder (weights and config, not the tokenizer). Collective."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Reads weights from a Hugging Face folder of the same architecture. Collective."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies weights into the model, as `weights` of an engine of the same architecture yields them. Collective.

        The optimizer's state does not change. Raises `ConfigError` if a tensor is missing or has another shape.
        """

    @abstractmethod
    def using(self, weights: Iterable[tuple[str, torch.Tensor]]) -> AbstractContextManager[None]:
        """A block in which the engine computes with ``weights``. The engine's own weights are restored exactly afterwards.
        Collective.

        In the block a copy of this rank's own weights is in memory; nothing may be trained there. Raises as `load_weights`.
        """

    def in_float32(self) -> AbstractContextManager[bool]:
        """A block in which `forward` computes in float32, with the weights rounded to the dtype of normal passes.

        Log-probabilities then have no rounding noise of the arithmetic. Yields False if this engine cannot change its
        precision. In the block, float32 copies of the rounded weights are in memory, and nothing may be trained. Collective.
        """
        return nullcontext(False)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `tandem.api.state.Stateful`: float32 weights, optimizer and counters of the schedule.

        Tensors are whole, or sharded as they are on the ranks. Names do not depend on the number of ranks.

        Raises:
            ConfigError: this backend cannot return it.
        """
        raise ConfigError(
            f"a {type(self).__name__} gives no optimizer state, so its run could not be resumed; take "
            "actor.backend=fsdp:dN, or set checkpoint.resumable=false to save the model alone"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of `state_dict`, which may come from another number of ranks.

        Raises:
            ConfigError: the state is of another model, or this backend cannot restore it.
        """
        raise ConfigError(f"a {type(self).__name__} takes no optimizer state, so its run cannot be resumed")

    def late_writer(self, state: Mapping[str, Any]) -> Callable[[Path], None] | None:
        """Returns a function that writes the files of `save` from ``state``, a copy of an earlier `state_dict`, to a folder.

        The function may run in any thread and needs no other rank. None if this backend or model can only save its current
        weights."""
        return None

    @abstractmethod
    def offload(self, parts: tuple[TrainPart, ...], scratch: Path | None = None) -> int:
        """Frees the device memory of parts; call `onload` before they are used again. Returns the number of bytes moved.

        On a GPU the parts move to host memory. On a CPU weights that the model's folder has are dropped and later read from
        there, and the rest is written to an unnamed file in ``scratch``. Without ``scratch``, a CPU only frees gradients.
        """

    @abstractmethod
    def onload(self, parts: tuple[TrainPart, ...]) -> int:
        """Brings parts back to the device without any change. Returns the number of bytes moved.

        Raises:
            WeightsChanged: a file that a part is read from has changed or is gone.
        """

    @abstractmethod
    def num_bytes(self) -> dict[TrainPart, int]:
        """Returns the measured bytes of each part on this rank's device now."""


class InferenceEngine(ABC):
    """Generates completions. `agenerate` is awaited on any event loop; other methods may be called from any thread."""

    @abstractmethod
    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Generates one completion. If the weights are updated meanwhile, the engine continues it with the new ones.

        Cancelling the coroutine frees the request's memory. Raises `DataFailure` for a prompt that does not fit the
        context, `EngineDied` if the engine is gone.
        """

    @property
    @abstractmethod
    def version(self) -> WeightVersion:
        """Version of the weights that will generate the next token."""

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """Abilities of the engine, any of ``staged``, ``in_place``, ``keep_kv``, ``sleep_weights``, ``sleep_kv_cache``,
        ``noise_key``, ``shared_memory``, ``ipc``, ``disk`` and ``adapter``.

        ``staged``: the engine loads new weights beside the old ones. ``in_place``: it overwrites the old ones.
        ``keep_kv``: it can keep the KV cache over an update. ``sleep_…``: it can free this part of its memory.
        ``noise_key``: it draws tokens by `LLMRequest.noise_key`.
        ``shared_memory``: it runs in another process on this machine and reads weights from shared memory.
        ``ipc``: it maps memory of the trainer's GPU.
        ``disk``: it reads weights from a folder (`FolderSource`) that it sees under the same path as the trainer.
        ``adapter``: it accepts updates that are an adapter of the model that it was started with.
        """

    @abstractmethod
    def prepare_weights(self, update: WeightUpdate) -> None:
        """Loads the new tensors beside the old ones and verifies their digests; generation continues."""

    @abstractmethod
    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """Switches to the prepared weights between two decode steps; returns ``pause_s`` and ``recompute_s``, seconds."""

    @abstractmethod
    def discard_weights(self) -> None:
        """Drops prepared weights; does nothing if there are none."""

    def flush(self) -> None:
        """Empties the prefix cache, so that later requests reuse no earlier computation. Does nothing in an engine that
        empties this cache at every commit."""

    @abstractmethod
    def pause(self) -> None:
        """Stops between two steps; running requests keep their state. Returns when all computation has stopped."""

    @abstractmethod
    def resume(self) -> None:
        """Continues after `pause`."""

    @abstractmethod
    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """Frees the memory of parts. Refused while requests are running."""

    @abstractmethod
    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """Allocates the memory of parts again. Weights that slept must be delivered again before the next token."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Counters since the start: ``generated_tokens``, ``prefill_tokens``, ``busy_s``, ``running``, ``waiting`` …"""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine; running requests fail with `EngineDied`. Idempotent, leaves no process and no shared memory."""


class EngineWrapper(InferenceEngine):
    """Passes every call on to another engine; a subclass overrides the methods it changes (docs/extending.md)."""

    def __init__(self, engine: InferenceEngine):
        """``engine``: the engine of `rollout.backend`. The wrapper closes it."""
        self.engine = engine

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        return await self.engine.agenerate(request)

    @property
    def version(self) -> WeightVersion:
        return self.engine.version

    @property
    def capabilities(self) -> frozenset[str]:
        return self.engine.capabilities

    def prepare_weights(self, update: WeightUpdate) -> None:
        self.engine.prepare_weights(update)

    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        return self.engine.commit_weights(version)

    def discard_weights(self) -> None:
        self.engine.discard_weights()

    def flush(self) -> None:
        self.engine.flush()

    def pause(self) -> None:
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        self.engine.sleep(parts)

    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        self.engine.wake(parts)

    def statistics(self) -> dict[str, float]:
        return self.engine.statistics()

    def close(self) -> None:
        self.engine.close()
