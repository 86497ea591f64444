"""A frozen teacher, and the student that learns from what the teacher thinks of its own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.algorithms.kl import k3
from tandem.algorithms.supervised import distillation_advantages
from tandem.api.engines import TrainEngine
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.stage import stage
from tandem.roles.actor import Actor
from tandem.roles.samples import trained_tokens, with_fields


class Teacher:
    """An engine whose weights nobody changes, with the student's tokenizer."""

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @stage("teacher", reads=("input_ids", "loss_mask", "temperature"), adds=("teacher_logprobs",), reads_state=("weights",))
    def compute_logprobs(self, batch: TensorDict) -> TensorDict:
        """Adds ``teacher_logprobs``: how probable the student's tokens are to the teacher, at their temperature."""
        return with_fields(batch, teacher_logprobs=self.engine.forward(batch).logprobs)


class Student:
    """An actor whose advantages come from a teacher: the same stages under the same names, so the same loop trains it."""

    shared_critic = None

    def __init__(self, actor: Actor):
        self.actor, self.engine = actor, actor.engine
        self._distance: dict[str, float] = {}

    @property
    def version(self) -> int:
        """Updates of the student so far."""
        return self.actor.version

    def state_dict(self) -> dict[str, Any]:
        """The actor's: a teacher has none."""
        return self.actor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.actor.load_state_dict(state)

    @stage(
        "proximal",
        reads=("input_ids", "loss_mask", "temperature"),
        adds=("proximal_logprobs", "entropy"),
        reads_state=("weights",),
    )
    def compute_proximal(self, batch: TensorDict) -> TensorDict:
        """Adds ``proximal_logprobs`` and ``entropy`` of the student before this update."""
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
        """Adds ``advantages``: teacher − policy at each trained token. The reward is left as it is and not trained on."""
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
        """`Actor.ppo_update`, with ``kl/teacher`` of the batch: the mean of policy − teacher over its trained tokens."""
        return self.actor.ppo_update(batch) | self._distance
