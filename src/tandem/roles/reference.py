"""The reference: a frozen policy that the actor is kept close to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from tandem.api.engines import TrainEngine
from tandem.api.lazy_torch import TensorDict
from tandem.api.stage import stage
from tandem.config.errors import ConfigError
from tandem.roles.samples import with_fields


class Reference:
    """An engine whose weights nobody trains; with ``refresh_every_steps`` it takes over the actor's now and then.

    Of an engine that trains an adapter, ``base`` takes the model without it: the actor's own engine is its reference then.
    """

    def __init__(self, engine: TrainEngine, *, refresh_every_steps: int | None = None, base: bool = False):
        """Raises `ConfigError` where ``base`` is wanted of an engine without an adapter, or with a refresh."""
        if base and engine.adapter is None:
            raise ConfigError("the reference shall be the base of an engine that has no adapter; set actor.lora.rank")
        if base and refresh_every_steps:
            raise ConfigError(
                "the base of an adapter never changes; a reference that is refreshed needs an engine of its own"
            )
        self.engine, self.refresh_every_steps, self.base = engine, refresh_every_steps, base
        self.refreshed = 0  # version of the actor's weights that it holds
        self._followed: tuple[TrainEngine, Callable[[], int]] | None = None

    def follow(self, actor: TrainEngine, version: Callable[[], int]) -> None:
        """From now on a refresh takes the weights of ``actor``. ``version``: the number of its updates so far."""
        self._followed = actor, version

    @stage("refresh", reads_state=("weights",), writes_state=("weights",))
    def refresh_if_due(self) -> dict[str, float]:
        """After an update of the actor that it follows: copies its weights if a refresh is due. Returns no metrics.
        Collective.

        Raises:
            ConfigError: the actor's model has other tensors than the reference, or there is none.
        """
        if not self.refresh_every_steps:
            return {}
        if self._followed is None:
            raise ConfigError("this reference follows no actor; call reference.follow(actor.engine, lambda: actor.version)")
        actor, version = self._followed[0], self._followed[1]()
        if version % self.refresh_every_steps == 0:
            self.engine.load_weights(actor.weights())
            self.refreshed = version
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Its state; without a refresh the weights are those that it was made with."""
        return {"refreshed": self.refreshed, "engine": self.engine.state_dict() if self.refreshed else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["engine"] is not None:
            self.engine.load_state_dict(state["engine"])
        self.refreshed = int(state["refreshed"])

    @stage(
        "reference", reads=("input_ids", "loss_mask", "temperature"), adds=("reference_logprobs",), reads_state=("weights",)
    )
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """Adds ``reference_logprobs``, at each trajectory's temperature."""
        adapter = self.engine.adapter if self.base else None
        with contextlib.nullcontext() if adapter is None else adapter.set_aside():
            return with_fields(batch, reference_logprobs=self.engine.forward(batch).logprobs)
