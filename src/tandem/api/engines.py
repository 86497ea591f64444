"""The two engines: one generates, one trains. What costs money stands behind these classes."""

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
    """The results of a forward pass, for a loss: per token ``[T]`` of the view, never logits.

    Position t speaks of token t. At positions that are not predicted (the first of each sequence, and wherever the
    caller's ``loss_mask`` is false) log-probabilities and entropies are 0.
    """

    logprobs: torch.Tensor
    """Empty where the model has a scalar head."""

    entropy: torch.Tensor | None = None
    """Entropy ``[T]``; None unless it was asked for."""

    scores: torch.Tensor | None = None
    """The output of a scalar head *after* token t, at every token; None if the model has none."""


Metrics = Mapping[str, "torch.Tensor"]
"""Name → ``[T]`` (averaged over the tokens in ``loss_mask``), ``[N]`` (averaged over sequences); detached.

Of names that end in ``/max`` the largest entry is taken instead.
"""

LossFn = Callable[[Outputs, "TensorDict"], tuple["torch.Tensor", Metrics]]
"""``loss_fn(outputs, view) -> (losses, metrics)``, losses unreduced, ``[T]`` or ``[N]`` like ``loss_weights``.

``view`` is the batch restricted to whole sequences, with their ``cu_seqlens``.
"""


class TrainedAdapter(ABC):
    """The adapter that an engine trains beside a frozen base (`LoRAConfig`)."""

    @property
    @abstractmethod
    def terms(self) -> Adapter:
        """The sum that its tensors add to the base."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Its tensors, float32, one after another; `TrainEngine.load_weights` takes them too. Collective."""

    @abstractmethod
    def merged(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole model's weights with these tensors, named as in `weights`, in the place of its own: merged in float32,
        one after another, each to be used before the next is asked for. Collective."""

    @abstractmethod
    def surviving(self, dtype: torch.dtype) -> float | None:
        """The share of it that is left in merged weights that are rounded to ``dtype``, over a few matrices; see
        docs/lora.md.

        1 is all of it, 0 nothing; None where it changes nothing yet. Collective."""

    @abstractmethod
    def set_aside(self) -> AbstractContextManager[None]:
        """A block in which the engine computes as the base alone does; nothing may be trained inside."""


class TrainEngine(ABC):
    """A model that is trained. Takes and returns *global* batches; how they are sharded is its secret."""

    adapter: TrainedAdapter | None = None
    """The adapter that it trains; None if it trains all weights."""

    @abstractmethod
    def train_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """One optimizer step on ``sum(loss_weights * losses)`` over the whole batch; returns metrics.

        Metrics: ``loss``, ``grad_norm``, ``lr``, ``skipped`` (1 if the step was not taken because something was not
        finite), and the loss function's own. Sequences with the same ``unit_id`` stay together. A gradient that is
        exactly 0 changes neither weights nor optimizer state; the schedule counts the call.
        Raises `NonFinite` after too many skips in a row.
        """

    def moved(self) -> dict[str, float]:
        """The metric ``actor/update_ratio``: the last optimizer step over the weights, by their norms; empty if unknown.
        Estimated from some of the weights; which ones depends on the layout."""
        return {}

    @abstractmethod
    def eval_batch(self, batch: TensorDict, loss_fn: LossFn, *, entropy: bool = False) -> dict[str, float]:
        """The same without a step."""

    @abstractmethod
    def forward(self, batch: TensorDict, *, entropy: bool = False) -> Outputs:
        """Log-probabilities (and entropy), or scores, of the global batch, ``[T]`` in its order, no gradient."""

    @abstractmethod
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors under their Hugging Face names, one after another; tied tensors once. Collective."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a Hugging Face model folder (weights and config; not the tokenizer). Collective."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read weights from a Hugging Face folder of the same architecture. Collective."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take weights as `weights` of an engine of the same architecture gives them. Collective.

        The optimizer's state stays as it is. Raises `ConfigError` where a tensor is missing or of another shape.
        """

    @abstractmethod
    def using(self, weights: Iterable[tuple[str, torch.Tensor]]) -> AbstractContextManager[None]:
        """A block in which it computes with these weights instead of its own, which come back to the bit. Collective.

        Costs a copy of this rank's part of the weights while it lasts; nothing may be trained inside. Raises as
        `load_weights`.
        """

    def in_float32(self) -> AbstractContextManager[bool]:
        """A block in which `forward` computes in float32, with the weights rounded as the engine computes with them.

        Its log-probabilities have no rounding noise then. Yields False if this engine cannot, and computes as ever. Costs
        float32 copies of the rounded weights while it lasts; nothing may be trained inside. Collective.
        """
        return nullcontext(False)

    def state_dict(self) -> dict[str, Any]:
        """The state, as `tandem.api.state.Stateful` says: float32 weights, optimizer, and what its schedule counts. Whole
        tensors, or sharded ones as they are, under names that are the same for any number of ranks.

        Raises:
            ConfigError: this backend cannot give it.
        """
        raise ConfigError(
            f"a {type(self).__name__} gives no optimizer state, so its run could not be resumed; take "
            "actor.backend=fsdp:dN, or set checkpoint.resumable=false to save the model alone"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on as the engine that gave ``state`` would have, on any number of ranks.

        Raises:
            ConfigError: another model's, or this backend cannot take it.
        """
        raise ConfigError(f"a {type(self).__name__} takes no optimizer state, so its run cannot be resumed")

    def late_writer(self, state: Mapping[str, Any]) -> Callable[[Path], None] | None:
        """A function that writes to a folder, from any thread and without the other ranks, the files of `save` when
        `state_dict` gave ``state``, of which this is a copy; None where that backend, or this model, can only be saved as it
        is now."""
        return None

    @abstractmethod
    def offload(self, parts: tuple[TrainPart, ...], scratch: Path | None = None) -> int:
        """Gives the memory of parts back; they must be brought back before they are used. Returns the bytes that it moved.

        On a GPU they move to host memory. On a CPU what the model's folder has is read from there again, and the rest is
        written to a nameless file in ``scratch``; without it this frees gradients and is otherwise recorded only.
        """

    @abstractmethod
    def onload(self, parts: tuple[TrainPart, ...]) -> int:
        """Brings parts back to the device, to the bit. Returns the bytes that it moved.

        Raises:
            WeightsChanged: a file that a part was to be read from has changed, or is gone.
        """

    @abstractmethod
    def num_bytes(self) -> dict[TrainPart, int]:
        """Bytes of each part that are on this rank's device now, measured."""


class InferenceEngine(ABC):
    """Generates. `agenerate` is awaited on any event loop; all other methods may be called from any thread."""

    @abstractmethod
    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Makes one completion. Weight updates on the way are resolved inside.

        Cancelling the coroutine frees the request's memory. Raises `DataFailure` for a prompt that does not fit the
        context, `EngineDied` when the engine is gone.
        """

    @property
    @abstractmethod
    def version(self) -> WeightVersion:
        """The version that the next token will be made by."""

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """Any of ``staged``, ``in_place``, ``keep_kv``, ``sleep_weights``, ``sleep_kv_cache``, ``noise_key``,
        ``shared_memory``, ``ipc``, ``disk`` and ``adapter``.

        ``shared_memory``: the engine lives in another process of this machine and reads weights from shared memory.
        ``ipc``: it opens the memory of the trainer's own GPU.
        ``disk``: it reads them from a folder (`FolderSource`) that it sees under the same path as the trainer.
        ``adapter``: it takes updates that are an adapter of the model that it was made with.
        """

    @abstractmethod
    def prepare_weights(self, update: WeightUpdate) -> None:
        """Take the new tensors beside the old ones and verify their digests; generation goes on."""

    @abstractmethod
    def commit_weights(self, version: WeightVersion) -> dict[str, float]:
        """Switch to the prepared weights between two decode steps; returns ``pause_s`` and ``recompute_s``."""

    @abstractmethod
    def discard_weights(self) -> None:
        """Forget what was prepared; nothing prepared is fine."""

    def flush(self) -> None:
        """Requests to come share nothing that was computed of prompts before. Nothing to do where a commit sees to that."""

    @abstractmethod
    def pause(self) -> None:
        """Stop between two steps; running requests keep their state. Returns when nothing is computed any more."""

    @abstractmethod
    def resume(self) -> None:
        """Go on."""

    @abstractmethod
    def sleep(self, parts: tuple[InferencePart, ...]) -> None:
        """Give memory back. Refused while requests are running."""

    @abstractmethod
    def wake(self, parts: tuple[InferencePart, ...]) -> None:
        """Take memory again; weights must be delivered anew before the next token if they slept."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Counters since the start: ``generated_tokens``, ``prefill_tokens``, ``busy_s``, ``running``, ``waiting`` …"""

    @abstractmethod
    def close(self) -> None:
        """End; running requests fail with `EngineDied`. Idempotent, leaves no process and no shared memory."""


class EngineWrapper(InferenceEngine):
    """Hands everything on to another engine; a class of yours changes what it wants (docs/extending.md)."""

    def __init__(self, engine: InferenceEngine):
        """``engine``: that of `rollout.backend`. It is closed with this one."""
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
