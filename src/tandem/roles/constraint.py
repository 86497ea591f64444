"""A constraint: one part of the reward is a cost, and a Lagrange multiplier keeps the mean cost at or below a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tandem.algorithms.shaping import lagrangian, next_multiplier
from tandem.api.batch import num_sequences, stage, with_fields
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.config.algorithm import MOST_MULTIPLIER, ConstraintConfig
from tandem.roles.credit import samples_of


class Constraint:
    """The multiplier λ and its update. Call `follow`, then `penalise`, before advantages are computed.

    Batches are global: each rank calls the same methods with the same batch, and gets the same λ.
    """

    def __init__(self, config: ConstraintConfig, *, everywhere: bool = True, resting: Callable[[], bool] | None = None):
        """``everywhere``: True if every row's reward has this cost; False: a batch may have no sample with it.
        ``resting``: returns true while the actor is not updated; λ is then not updated either. None: never."""
        self.config, self.multiplier, self.everywhere = config, config.multiplier, everywhere
        self._resting = resting

    def state_dict(self) -> dict[str, Any]:
        return {"multiplier": self.multiplier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.multiplier = float(state["multiplier"])

    @stage("multiplier", reads=("loss_mask", "sample_id", "in_statistics"), may_read=("replayed", "rewards/"))
    def follow(self, batch: TensorDict) -> dict[str, float]:
        """Updates λ by the mean cost of the samples in statistics; returns λ and this mean as metrics. Replayed samples are
        left out, because they have been counted in an earlier batch."""
        first = samples_of(batch).first
        costs = self._costs(batch)[first]
        counts = batch["in_statistics"][first] & ~costs.isnan()
        if "replayed" in batch.keys():
            counts &= ~batch["replayed"][first]
        costs = costs[counts].double()
        if not len(costs):  # no new sample of the batch has this cost
            return {"constraint/multiplier": self.multiplier}
        mean, config = float(costs.mean()), self.config
        if self._resting is None or not self._resting():
            self.multiplier = next_multiplier(
                self.multiplier,
                mean,
                limit=config.limit,
                step_size=config.step_size,
                low=0.0,
                high=MOST_MULTIPLIER,
            )
        return {"constraint/cost": mean, "constraint/multiplier": self.multiplier}

    @stage(
        "penalty", reads=("reward",), adds=("reward",), may_read=("token_rewards", "rewards/"), may_add=("token_rewards",)
    )
    def penalise(self, batch: TensorDict) -> TensorDict:
        """Returns the batch with (R − λ·C) / (1 + λ) as ``reward``. R: the reward so far; C: the sample's cost, 0 if its
        reward has no cost."""
        fields = {"reward": lagrangian(batch["reward"], self._costs(batch).nan_to_num(), self.multiplier)}
        if "token_rewards" in batch.keys():
            fields["token_rewards"] = batch["token_rewards"] / (1.0 + self.multiplier)
        return with_fields(batch, **fields)

    def _costs(self, batch: TensorDict) -> torch.Tensor:
        """Returns the cost of each sequence's sample, ``[N]``; NaN if the sample's reward has no cost.

        Raises:
            BatchError: no sample of the batch has a cost, although every sample should.
        """
        field = f"rewards/{self.config.cost}"
        if field in batch.keys():
            return batch[field]
        if not self.everywhere:
            return torch.full((num_sequences(batch),), torch.nan, device=batch["cu_seqlens"].device)
        parts = sorted(str(name).removeprefix("rewards/") for name in batch.keys() if str(name).startswith("rewards/"))
        raise BatchError(
            f"constraint.cost={self.config.cost}: no sample of the batch has this part of its reward; there are "
            f"{', '.join(parts) or 'none'}. A workflow of your own must keep the parts: Sample(…, rewards=result.rewards). "
            "An agent that states its own reward must state the cost too: "
            f"{{'reward': …, 'rewards': {{{self.config.cost!r}: …}}}}"
        )
