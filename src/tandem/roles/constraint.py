"""A constraint: one part of the reward is a cost, whose mean a Lagrange multiplier keeps at or below a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tandem.algorithms.constraint import lagrangian, next_multiplier
from tandem.api.batch import num_sequences
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.stage import stage
from tandem.config.constraint import ConstraintConfig
from tandem.roles.samples import samples_of, with_fields


class Constraint:
    """The multiplier λ and its rule: `follow`, then `penalise`, before advantages are computed.

    Batches are global: each rank calls the same methods with the same batch, and comes to the same λ.
    """

    def __init__(self, config: ConstraintConfig, *, everywhere: bool = True, resting: Callable[[], bool] | None = None):
        """``everywhere``: every row is judged by a reward with this cost; else whole batches may be without it.
        ``resting``: true while λ stays as it is, because the actor does; None: never."""
        self.config, self.multiplier, self.everywhere = config, config.multiplier, everywhere
        self._resting = resting

    def state_dict(self) -> dict[str, Any]:
        return {"multiplier": self.multiplier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.multiplier = float(state["multiplier"])

    @stage("multiplier", reads=("loss_mask", "sample_id", "in_statistics"), may_read=("replayed", "rewards/"))
    def follow(self, batch: TensorDict) -> dict[str, float]:
        """Moves λ by the mean cost of the new samples that enter statistics; returns both. Replayed ones, of an earlier
        policy, have moved it before."""
        first = samples_of(batch).first
        costs = self._costs(batch)[first]
        counts = batch["in_statistics"][first] & ~costs.isnan()
        if "replayed" in batch.keys():
            counts &= ~batch["replayed"][first]
        costs = costs[counts].double()
        if not len(costs):  # no new row of the batch has this cost
            return {"constraint/multiplier": self.multiplier}
        mean, config = float(costs.mean()), self.config
        if self._resting is None or not self._resting():
            self.multiplier = next_multiplier(
                self.multiplier,
                mean,
                limit=config.limit,
                step_size=config.step_size,
                low=config.min_multiplier,
                high=config.max_multiplier,
            )
        return {"constraint/cost": mean, "constraint/multiplier": self.multiplier}

    @stage(
        "penalty", reads=("reward",), adds=("reward",), may_read=("token_rewards", "rewards/"), may_add=("token_rewards",)
    )
    def penalise(self, batch: TensorDict) -> TensorDict:
        """The batch with J = (R − λ·C) / (1 + λ) as its ``reward``. Samples whose reward has no such part cost nothing."""
        fields = {"reward": lagrangian(batch["reward"], self._costs(batch).nan_to_num(), self.multiplier)}
        if "token_rewards" in batch.keys():
            fields["token_rewards"] = batch["token_rewards"] / (1.0 + self.multiplier)
        return with_fields(batch, **fields)

    def _costs(self, batch: TensorDict) -> torch.Tensor:
        """The cost of each sequence's sample, ``[N]``; NaN where its reward has none.

        Raises:
            BatchError: no sample of the batch has it, and each should.
        """
        field = f"rewards/{self.config.cost}"
        if field in batch.keys():
            return batch[field]
        if not self.everywhere:
            return torch.full((num_sequences(batch),), torch.nan, device=batch["cu_seqlens"].device)
        there = sorted(str(name).removeprefix("rewards/") for name in batch.keys() if str(name).startswith("rewards/"))
        raise BatchError(
            f"constraint.cost={self.config.cost}: no sample of the batch has this part of its reward; there are "
            f"{', '.join(there) or 'none'}. A workflow of your own must keep the parts: Sample(…, rewards=result.rewards). "
            f"An agent that says its own reward says the cost too: {{'reward': …, 'rewards': {{{self.config.cost!r}: …}}}}"
        )
