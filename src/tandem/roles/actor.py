"""The actor: the policy that is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tandem.algorithms.kl import adapt_coefficient
from tandem.api.batch import (
    BEFORE_UPDATE,
    FORWARD,
    GROUPED,
    check_age,
    per_token,
    require,
    select,
    stage,
    trained_tokens,
    update_stage,
    with_fields,
)
from tandem.api.engines import TrainEngine
from tandem.api.lazy_torch import TensorDict, torch
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.errors import ConfigError
from tandem.config.train_engine import ActorConfig
from tandem.roles.batch_metrics import dropped_metrics, reward_metrics, sample_kl, step_metrics
from tandem.roles.credit import samples_of
from tandem.roles.parts import AlgorithmParts, choose_parts

if TYPE_CHECKING:
    from tandem.roles.critic import SharedCritic

log = logging.getLogger(__name__)


class Actor:
    """An engine and an algorithm: call `compute_proximal`, `compute_advantages`, `ppo_update`, in this order.

    Batches are global, and methods return new ones; each rank calls the same methods with the same batch.
    """

    def __init__(
        self,
        engine: TrainEngine,
        algorithm: AlgorithmConfig,
        config: ActorConfig,
        *,
        max_head_offpolicyness: int = 0,
        reference: object = None,
        shared_critic: SharedCritic | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        version: int = 0,
        parts: AlgorithmParts | None = None,
        resting: Callable[[], bool] | None = None,
    ):
        """``max_head_offpolicyness``: η, the largest staleness of a trained token, in versions. ``reference``: anything but
        None if the run has a reference; required for a KL term. ``shared_critic``: the second head of this engine's model,
        trained in the same steps. ``max_new_tokens``: see `choose_parts`. ``seed``: also that of the order of groups in
        several epochs. ``version``: number of updates that the weights have had before. ``parts``: the resolved parts of
        ``algorithm``, if there are any. ``resting``: true while weights are not updated, because a critic warms up.

        Raises:
            ConfigError: a part of the algorithm is unknown, a required knob is not set, or the reference is missing.
        """
        self.engine, self.algorithm, self.config = engine, algorithm, config
        self.max_head_offpolicyness, self.seed, self.version = max_head_offpolicyness, seed, version
        self.shared_critic, self.resting, self.kl_coefficient = shared_critic, resting, algorithm.kl.coefficient
        self._warned = False
        if algorithm.kl.coefficient > 0 and reference is None:
            raise ConfigError(
                f"algorithm.kl.coefficient={algorithm.kl.coefficient:g} measures the distance to a reference policy, and "
                "there is none; give Actor(reference=Reference(engine)), or set algorithm.kl.coefficient=0"
            )
        parts = parts or choose_parts(algorithm, max_new_tokens, seed)
        self._credit, self._tokens, self._aggregation = parts.credit, parts.tokens, parts.aggregation
        self._objective = parts.objective
        self.needs_proximal = parts.needs_proximal(algorithm, config.mini_batches * config.epochs_per_batch)
        """True if `compute_proximal` must compute log-probabilities in a separate pass."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the actor's state without that of its engine."""
        return {"version": self.version, "kl_coefficient": self.kl_coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version, self.kl_coefficient = int(state["version"]), float(state["kl_coefficient"])

    @stage("proximal", reads=FORWARD, may_add=("proximal_logprobs", "entropy"), reads_state=("weights",))
    def compute_proximal(self, batch: TensorDict) -> TensorDict:
        """Adds ``proximal_logprobs [T]`` and ``entropy [T]`` under the weights before this update, if they are needed."""
        if not self.needs_proximal:
            return batch
        outputs = self.engine.forward(batch, entropy=True)
        assert outputs.entropy is not None
        return with_fields(batch, proximal_logprobs=outputs.logprobs, entropy=outputs.entropy)

    @stage(
        "advantages",
        reads=("loss_mask", "reward", "group_id", "sample_id", "stop_reason", "in_statistics"),
        adds=("advantages", "dropped", "shaped_reward"),
        may_read=(
            *("input_ids", "accuracy", "expired", "in_loss", "greedy", "rewards/", "token_rewards"),
            *("values", "bootstrap_value", "rollout_logprobs", *BEFORE_UPDATE),
        ),
        may_add=("returns", "prepared"),
    )
    def compute_advantages(self, batch: TensorDict) -> TensorDict:
        """Adds ``advantages [T]``, ``shaped_reward [N]`` and ``dropped [T]``, True for tokens of weight 0 (also expired)."""
        samples, mask = samples_of(batch), trained_tokens(batch)
        if self.algorithm.kl.in_reward:
            require(batch, "proximal_logprobs", "compute_proximal(batch)")
            require(batch, "reference_logprobs", "reference.compute_logprobs(batch)")
        rewards, _ = self._credit.shape(batch, samples)
        penalty = self.kl_coefficient if self.algorithm.kl.in_reward else 0.0
        dropped = batch["expired"] & mask if "expired" in batch.keys() else torch.zeros_like(mask)
        for by_rule in self._drops(batch).values():
            dropped = dropped | by_rule
        result = with_fields(
            batch,
            shaped_reward=rewards[samples.of_sequence],
            dropped=dropped,
            **self._credit.advantages(batch, samples, rewards, penalty),
        )
        return result if self._tokens is None else with_fields(result, **self._tokens.prepared(result, self.version))

    def _drops(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """Returns rule → trained tokens that the rule removes from the loss, ``[T]`` bool."""
        drops = {}
        if self._credit.shaping:
            samples = samples_of(batch)
            _, kept = self._credit.shape(batch, samples)
            drops["shaping"] = ~per_token(batch, kept[samples.of_sequence]) & trained_tokens(batch)
        return drops if self._tokens is None else drops | self._tokens.drops(batch, self.version)

    @update_stage(
        reads=(*FORWARD, "rollout_logprobs", "advantages", "dropped", "shaped_reward", *GROUPED, "in_loss"),
        may_read=(*BEFORE_UPDATE, "versions", "values", "returns", "prepared", "reward", "accuracy", "stop_reason"),
    )
    def ppo_update(self, batch: TensorDict) -> dict[str, float]:
        """Takes the optimizer steps of one batch; returns metrics.

        If all advantages are 0 and the loss has no other term, weights do not change and ``step_without_signal`` is 1. While
        a critic warms up, weights do not change and ``actor/rests`` is 1. The version increases in any case.

        Raises:
            BatchError: an earlier stage was left out, or a trained token is older than ``max_head_offpolicyness``.
            NonFinite: too many steps in a row were not finite.
        """
        rests = {} if self.resting is None else {"actor/rests": float(self.resting())}
        if rests.get("actor/rests"):
            self.version += 1
            return reward_metrics(batch, shaped=bool(self._credit.shaping)) | rests
        if self.needs_proximal:
            require(batch, "proximal_logprobs", "compute_proximal(batch)")
        if self.algorithm.kl.in_loss:
            require(batch, "reference_logprobs", "reference.compute_logprobs(batch)")
        check_age(batch, self.version, self.max_head_offpolicyness)
        objective = replace(self._objective, version=self.version, kl_coefficient=self.kl_coefficient)
        counts = (batch["advantages"] != 0) & ~batch["dropped"] & per_token(batch, batch["in_loss"])
        has_other_terms = objective.has_other_terms or self.shared_critic is not None
        without_signal = not (bool(counts.any()) or has_other_terms)
        if without_signal:
            log.log(
                logging.INFO if self._warned else logging.WARNING,
                "this step changes nothing: no group has samples with different rewards. If that goes on, choose easier or "
                "harder prompts, raise gconfig.n_samples, or use algorithm.filter=dynamic_sampling",
            )
            self._warned = True
        entropy = self.algorithm.entropy_coefficient > 0 or "entropy" not in batch.keys()
        loss = objective if self.shared_critic is None else self.shared_critic.joined(objective)
        steps = []
        for part in self.weighted(batch, only_policy=not has_other_terms):
            result = self.engine.train_batch(part, loss, entropy=entropy)
            steps.append(result | {"tokens": float(part["loss_mask"].sum())})
        metrics = step_metrics(steps) if steps else {}
        metrics |= reward_metrics(batch, shaped=bool(self._credit.shaping)) | dropped_metrics(batch, self._drops(batch))
        metrics |= self._follow_kl(batch)
        self.version += 1
        return metrics | {"step_without_signal": float(without_signal)} | rests

    def _follow_kl(self, batch: TensorDict) -> dict[str, float]:
        """Adapts the KL coefficient to the target; returns the KL per sample and the coefficient before the change."""
        kl = self.algorithm.kl
        if kl.target is None:
            return {}
        distance, count = sample_kl(batch)
        metrics = {"kl/sample": distance, "kl/coefficient": self.kl_coefficient}
        self.kl_coefficient = adapt_coefficient(self.kl_coefficient, distance, kl.target, count, kl.horizon)
        return metrics

    def weighted(self, batch: TensorDict, *, only_policy: bool = False) -> Iterator[TensorDict]:
        """Yields the mini-batches of all epochs with their ``loss_weights``, without samples outside the loss.

        ``only_policy``: the loss has only the policy term. Tokens with advantage 0 then get weight 0, and the engine skips
        the backward pass of sequences that have no other tokens.
        """
        inside = select(batch, batch["in_loss"])
        for part in mini_batches(inside, self.config.mini_batches, self.config.epochs_per_batch, self.seed):
            samples = samples_of(part)
            of_token = per_token(part, samples.of_sequence)
            weights = self._aggregation(mask=trained_tokens(part), sample=of_token)
            counts = ~part["dropped"]
            if only_policy:
                counts = counts & (part["advantages"] != 0)
            lengths = samples.lengths[samples.of_sequence]
            yield with_fields(part, loss_weights=weights * counts, sample_length=lengths)


def mini_batches(batch: TensorDict, count: int, epochs: int, seed: int) -> Iterator[TensorDict]:
    """Yields the batch of each optimizer step: each epoch has ``count`` parts that differ by at most one group, or one part
    per group if there are fewer groups. Groups are never split. A single epoch takes them in the order of the batch. With
    several, each epoch has its own random order, which depends only on the seed, the smallest group id and the epoch, so
    that a resumed run repeats it."""
    ids = torch.tensor(list(dict.fromkeys(batch["group_id"].tolist())), dtype=torch.int64)  # in order of appearance
    parts = min(count, len(ids))
    for epoch in range(epochs if parts else 0):
        order = ids
        if epochs > 1:
            key = hash((seed, int(ids.min()), epoch)) % 2**63  # a hash of integers is the same in every process
            order = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(key))]
        for chosen in torch.tensor_split(order, parts):
            yield batch if parts == 1 else select(batch, torch.isin(batch["group_id"], chosen))
