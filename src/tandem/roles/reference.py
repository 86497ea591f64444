"""The frozen policies that a policy is compared with: the reference, and the teacher of on-policy distillation, with the
student that learns from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from tandem.algorithms.kl import k3
from tandem.algorithms.losses import distillation_advantages
from tandem.api.batch import FORWARD, stage, trained_tokens, with_fields
from tandem.api.engines import TrainEngine
from tandem.api.lazy_torch import TensorDict, torch
from tandem.config.errors import ConfigError
from tandem.roles.actor import Actor


class Reference:
    """An engine that is not trained. With ``refresh_every_steps``, the actor's weights are copied into it regularly.

    ``base``: the engine trains an adapter (it is the actor's own engine), and its base model is the reference.
    """

    def __init__(self, engine: TrainEngine, *, refresh_every_steps: int | None = None, base: bool = False):
        """Raises `ConfigError` if ``base`` is set and the engine has no adapter, or a refresh is set too."""
        if base and engine.adapter is None:
            raise ConfigError("the reference shall be the base of an engine that has no adapter; set actor.lora.rank")
        if base and refresh_every_steps:
            raise ConfigError(
                "the base of an adapter never changes; a reference that is refreshed needs an engine of its own"
            )
        self.engine, self.refresh_every_steps, self.base = engine, refresh_every_steps, base
        self.refreshed = 0  # the actor's version at the last refresh
        self._followed: tuple[TrainEngine, Callable[[], int]] | None = None

    def follow(self, actor: TrainEngine, version: Callable[[], int]) -> None:
        """Sets the engine whose weights a refresh copies. ``version``: returns the number of the actor's updates so far."""
        self._followed = actor, version

    @stage("refresh", reads_state=("weights",), writes_state=("weights",))
    def refresh_if_due(self) -> dict[str, float]:
        """Copies the actor's weights if a refresh is due; call it after each update of the actor. Returns no metrics.
        Collective.

        Raises:
            ConfigError: the actor's model has other tensors than the reference, or `follow` was not called.
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
        """Returns the state. Before the first refresh the state has no weights: the engine is built with them."""
        return {"refreshed": self.refreshed, "engine": self.engine.state_dict() if self.refreshed else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["engine"] is not None:
            self.engine.load_state_dict(state["engine"])
        self.refreshed = int(state["refreshed"])

    @stage("reference", reads=FORWARD, adds=("reference_logprobs",), reads_state=("weights",))
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """Adds ``reference_logprobs [T]``, computed at each trajectory's temperature."""
        adapter = self.engine.adapter if self.base else None
        with contextlib.nullcontext() if adapter is None else adapter.set_aside():
            return with_fields(batch, reference_logprobs=self.engine.forward(batch).logprobs)


class Teacher:
    """An engine that is not trained, with the student's tokenizer."""

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @stage("teacher", reads=FORWARD, adds=("teacher_logprobs",), reads_state=("weights",))
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """Adds ``teacher_logprobs [T]``: the teacher's log-probabilities of the student's tokens, at the temperature of
        each trajectory."""
        return with_fields(batch, teacher_logprobs=self.engine.forward(batch).logprobs)


class Student:
    """An actor whose advantages come from a teacher. It has the stages of `Actor`, so the same loop trains it."""

    shared_critic = None

    def __init__(self, actor: Actor):
        self.actor, self.engine = actor, actor.engine
        self._distance: dict[str, float] = {}

    @property
    def version(self) -> int:
        """Number of the student's updates so far."""
        return self.actor.version

    def state_dict(self) -> dict[str, Any]:
        """Returns the actor's state; the teacher has none."""
        return self.actor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.actor.load_state_dict(state)

    @stage(
        "proximal",
        reads=FORWARD,
        adds=("proximal_logprobs", "entropy"),
        reads_state=("weights",),
    )
    def compute_proximal(self, batch: TensorDict) -> TensorDict:
        """Adds ``proximal_logprobs [T]`` and ``entropy [T]`` of the student before this update."""
        outputs = self.engine.forward(batch, entropy=True)
        assert outputs.entropy is not None
        return with_fields(batch, proximal_logprobs=outputs.logprobs, entropy=outputs.entropy)

    @stage(
        "advantages",
        reads=("loss_mask", "reward", "proximal_logprobs", "teacher_logprobs"),
        adds=("advantages", "dropped", "shaped_reward"),
        may_read=("expired",),
    )
    def compute_advantages(self, batch: TensorDict) -> TensorDict:
        """Adds ``advantages [T]``: teacher − policy at each trained token. The reward is only reported, not trained on."""
        mask, policy, teacher = trained_tokens(batch), batch["proximal_logprobs"], batch["teacher_logprobs"]
        counted = max(1, int(mask.sum()))
        distances = {"kl/teacher": policy - teacher, "kl/teacher_k3": k3(policy, teacher, mask)}
        self._distance = {name: float(value.masked_fill(~mask, 0.0).sum()) / counted for name, value in distances.items()}
        expired = batch["expired"] if "expired" in batch.keys() else torch.zeros_like(mask)
        return with_fields(
            batch,
            advantages=distillation_advantages(teacher, policy, mask),
            dropped=expired & mask,
            shaped_reward=batch["reward"].float(),
        )

    def ppo_update(self, batch: TensorDict) -> dict[str, float]:
        """Runs `Actor.ppo_update`; adds the metrics ``kl/teacher`` (mean of policy − teacher over the batch's trained
        tokens) and ``kl/teacher_k3`` (the same KL estimated by k3)."""
        return self.actor.ppo_update(batch) | self._distance
