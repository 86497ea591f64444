"""The actor: the policy that is trained."""

import logging
from collections.abc import Iterator

import torch
from tensordict import TensorDict

from tandem.algorithms.kl import k1
from tandem.algorithms.registry import ADVANTAGES, AGGREGATIONS, SHAPING
from tandem.api.batch import per_token, select, sequence_index, sum_by_sequence
from tandem.api.engines import TrainEngine
from tandem.api.failures import BatchError
from tandem.api.stage import stage
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.errors import ConfigError
from tandem.config.roles import ActorConfig
from tandem.roles.averages import together
from tandem.roles.components import Choice, choose
from tandem.roles.mini_batches import mini_batches
from tandem.roles.objective import Objective
from tandem.roles.reference import Reference
from tandem.roles.samples import Samples, samples_of, trained_tokens, truncated, with_fields

log = logging.getLogger(__name__)


class Actor:
    """An engine and an algorithm: `compute_proximal`, `compute_advantages`, `ppo_update`, in this order.

    Batches are global and come back as new ones; each rank calls the same methods with the same batch.
    """

    def __init__(
        self,
        engine: TrainEngine,
        algorithm: AlgorithmConfig,
        config: ActorConfig,
        *,
        max_head_offpolicyness: int = 0,
        reference: Reference | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        version: int = 0,
    ):
        """``max_head_offpolicyness``: η, the most versions that a token may be behind. ``reference``: needed where KL is
        measured. ``max_new_tokens``: what `constant` and `overlong` take where their knob is not set. ``seed``: of the order
        of mini-batches over several epochs. ``version``: updates that the weights have had before.

        Raises:
            ConfigError: a part of the algorithm is not known, or lacks what it needs.
        """
        self.engine, self.algorithm, self.config = engine, algorithm, config
        self.max_head_offpolicyness, self.seed, self.version = max_head_offpolicyness, seed, version
        self.reference = reference
        self._warned = False
        if algorithm.kl.coefficient > 0 and reference is None:
            raise ConfigError(
                f"algorithm.kl.coefficient={algorithm.kl.coefficient:g} measures the distance to a reference policy, and "
                "there is none; give Actor(reference=Reference(engine)), or set algorithm.kl.coefficient=0"
            )
        self._advantage, self._aggregation, self._shaping = choose_parts(algorithm, max_new_tokens)

    @property
    def updates_per_batch(self) -> int:
        """Most optimizer steps that one batch gives."""
        return self.config.mini_batches * self.config.epochs_per_batch

    @property
    def needs_proximal(self) -> bool:
        """Whether `compute_proximal` has to run.

        With one optimizer step a batch the policy of that step *is* the proximal one, and stands in for it in ratio,
        behaviour correction and rejection, all of which are per trajectory. KL in the reward needs it earlier.
        """
        return self.updates_per_batch > 1 or self._kl_in_reward

    @property
    def _kl_in_reward(self) -> bool:
        return self.algorithm.kl.coefficient > 0 and self.algorithm.kl.where == "reward"

    @stage(
        reads=("input_ids", "loss_mask", "temperature"),
        may_add=("proximal_logprobs", "entropy"),
        reads_state=("weights",),
    )
    def compute_proximal(self, batch: TensorDict) -> TensorDict:
        """Adds ``proximal_logprobs`` and ``entropy``, under the weights before this update; the batch itself where
        nothing reads them (`needs_proximal`)."""
        if not self.needs_proximal:
            return batch
        outputs = self.engine.forward(batch, entropy=True)
        assert outputs.entropy is not None
        return with_fields(batch, proximal_logprobs=outputs.logprobs, entropy=outputs.entropy)

    @stage(
        reads=("loss_mask", "reward", "group_id", "sample_id", "stop_reason", "in_statistics"),
        adds=("advantages", "dropped", "shaped_reward"),
        may_read=("accuracy", "expired", "token_rewards", "proximal_logprobs", "reference_logprobs"),
    )
    def compute_advantages(self, batch: TensorDict) -> TensorDict:
        """Adds ``advantages``, ``shaped_reward`` and ``dropped``: the tokens that get weight 0, expired ones among them."""
        samples, mask = samples_of(batch), trained_tokens(batch)
        rewards, kept = self._shape(batch, samples)
        dropped = ~per_token(batch, kept[samples.of_sequence])
        if "expired" in batch.keys():
            dropped = dropped | batch["expired"]
        return with_fields(
            batch,
            shaped_reward=rewards[samples.of_sequence],
            advantages=self._advantages(batch, samples, rewards, mask) * mask,
            dropped=dropped & mask,
        )

    @stage(
        reads=(
            "input_ids",
            "loss_mask",
            "temperature",
            "rollout_logprobs",
            "advantages",
            "dropped",
            "shaped_reward",
            "group_id",
            "sample_id",
            "in_statistics",
            "in_loss",
        ),
        may_read=("proximal_logprobs", "reference_logprobs", "entropy", "versions"),
        reads_state=("weights", "optimizer"),
        writes_state=("weights", "optimizer"),
    )
    def ppo_update(self, batch: TensorDict) -> dict[str, float]:
        """The optimizer steps of one batch; returns metrics.

        Without any advantage, KL or entropy term, weights stay as they are to the bit and ``step_without_signal`` is 1.

        Raises:
            BatchError: a stage before this one was left out.
            NonFinite: too many steps in a row were not finite.
        """
        self._require(batch, "proximal_logprobs", self.needs_proximal, "compute_proximal(batch)")
        in_loss_term = self.algorithm.kl.coefficient > 0 and self.algorithm.kl.where == "loss"
        self._require(batch, "reference_logprobs", in_loss_term, "reference.compute_logprobs(batch)")
        objective = Objective.of(self.algorithm, self.version)
        counts = (batch["advantages"] != 0) & ~batch["dropped"] & per_token(batch, batch["in_loss"])
        without_signal = not (bool(counts.any()) or objective.has_other_terms)
        if without_signal:
            log.log(
                logging.INFO if self._warned else logging.WARNING,
                "this step changes nothing: no group has samples with different rewards. If that goes on, choose easier or "
                "harder prompts, raise gconfig.n_samples, or use algorithm.filter=dynamic_sampling",
            )
            self._warned = True
        self._check_age(batch)
        entropy = self.algorithm.entropy_coefficient > 0 or "entropy" not in batch.keys()
        steps = []
        for part in self._weighted(batch, only_policy=not objective.has_other_terms):
            result = self.engine.train_batch(part, objective, entropy=entropy)
            steps.append(result | {"tokens": float(part["loss_mask"].sum())})
        self.version += 1
        metrics = together(steps) if steps else {}
        return metrics | self._reward_metrics(batch) | {"step_without_signal": float(without_signal)}

    def _check_age(self, batch: TensorDict) -> None:
        """The last guard of the staleness bound: whoever collects the batch marks older tokens as expired."""
        if "versions" not in batch.keys():
            return
        trained = trained_tokens(batch) & ~batch["dropped"] & per_token(batch, batch["in_loss"])
        age = self.version - int(batch["versions"][trained].min()) if bool(trained.any()) else 0
        if age > self.max_head_offpolicyness:
            raise BatchError(
                f"a trained token is {age} versions old, and max_head_offpolicyness is {self.max_head_offpolicyness}; "
                "publish weights after each ppo_update, or mark older tokens in the field 'expired'"
            )

    def _require(self, batch: TensorDict, field: str, needed: bool, remedy: str) -> None:
        if needed and field not in batch.keys():
            raise BatchError(f"the batch has no {field}, which this algorithm needs; call {remedy} before")

    def _shape(self, batch: TensorDict, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards after shaping ``[M]``, and the samples that keep their weight ``[M]`` bool."""
        rewards = batch["reward"][samples.first].float()
        kept = torch.ones_like(rewards, dtype=torch.bool)
        tensors = {
            "group_id": batch["group_id"][samples.first],
            "in_statistics": batch["in_statistics"][samples.first],
            "lengths": samples.lengths,
            "truncated": truncated(batch, samples),
            "accuracy": batch["accuracy"][samples.first]
            if "accuracy" in batch.keys()
            else torch.full_like(rewards, torch.nan),
        }
        for shaping in self._shaping:
            result = shaping(rewards=rewards, **tensors)
            rewards, keeps = result if isinstance(result, tuple) else (result, kept)
            kept = kept & keeps
        return rewards, kept

    def _advantages(self, batch: TensorDict, samples: Samples, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``[T]``: those of a sample go to each of its trajectories."""
        penalty = self._reward_penalty(batch, mask)
        tensors = {
            "group_id": batch["group_id"][samples.first],
            "in_statistics": batch["in_statistics"][samples.first],
            "lengths": samples.lengths,
            "mask": mask,
            "sequence": sequence_index(batch),
        }
        if "token_rewards" in self._advantage.asked:
            earned = self._token_rewards(batch, samples, rewards, mask) - penalty
            return _sized(self._advantage(rewards=rewards, token_rewards=earned, **tensors), mask, self._advantage)
        if "token_rewards" in batch.keys() and bool(batch["token_rewards"].any()):
            raise BatchError(
                f"the batch has token_rewards, and algorithm.advantage={self._advantage.name} judges whole samples; "
                "use algorithm.advantage=reinforce, or give the sample one reward"
            )
        penalties = torch.zeros_like(rewards).index_add(0, samples.of_sequence, sum_by_sequence(batch, penalty))
        advantages = _sized(self._advantage(rewards=rewards - penalties, **tensors), rewards, self._advantage)
        return per_token(batch, advantages[samples.of_sequence])

    def _reward_penalty(self, batch: TensorDict, mask: torch.Tensor) -> torch.Tensor:
        """β·k1 of the proximal policy, where KL is part of the reward ``[T]``; else 0."""
        if not self._kl_in_reward:
            return torch.zeros_like(mask, dtype=torch.float32)
        self._require(batch, "proximal_logprobs", True, "compute_proximal(batch)")
        self._require(batch, "reference_logprobs", True, "reference.compute_logprobs(batch)")
        return self.algorithm.kl.coefficient * k1(batch["proximal_logprobs"], batch["reference_logprobs"], mask)

    def _token_rewards(self, batch: TensorDict, samples: Samples, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Rewards of tokens ``[T]``: the sample's on the last trained token of each of its trajectories."""
        position = torch.arange(len(mask), device=mask.device)
        last = torch.full_like(samples.of_sequence, -1).scatter_reduce(
            0, sequence_index(batch)[mask], position[mask], "amax"
        )  # [N]
        earned = (
            batch["token_rewards"].clone()
            if "token_rewards" in batch.keys()
            else torch.zeros_like(mask, dtype=torch.float32)
        )
        trained = last >= 0
        earned[last[trained]] += rewards[samples.of_sequence][trained]
        return earned

    def _weighted(self, batch: TensorDict, *, only_policy: bool = False) -> Iterator[TensorDict]:
        """The mini-batches of all epochs with their ``loss_weights``; samples outside the loss are not computed.

        ``only_policy``: the loss has no term but the policy's. Then a token without advantage gets weight 0: its gradient
        is 0 in any case, and the engine spares the backward pass of sequences that have no other tokens.
        """
        inside = select(batch, batch["in_loss"])
        for part in mini_batches(inside, self.config.mini_batches, self.config.epochs_per_batch, self.seed):
            of_token = per_token(part, samples_of(part).of_sequence)
            weights = self._aggregation(mask=trained_tokens(part), sample=of_token)
            counts = ~part["dropped"]
            if only_policy:
                counts = counts & (part["advantages"] != 0)
            yield with_fields(part, loss_weights=weights * counts)

    def _reward_metrics(self, batch: TensorDict) -> dict[str, float]:
        samples = samples_of(batch)
        rewards = batch["shaped_reward"][samples.first]
        counts = batch["in_statistics"][samples.first]
        groups = batch["group_id"][samples.first]
        ids = groups.unique()
        flat = [len(rewards[counts & (groups == i)].unique()) < 2 for i in ids]
        metrics = {"groups/without_spread": sum(flat) / max(1, len(flat))}
        if self._shaping:
            metrics["reward/shaped_mean"] = float(rewards.mean())
        return metrics


def choose_parts(algorithm: AlgorithmConfig, max_new_tokens: int | None) -> tuple[Choice, Choice, list[Choice]]:
    """Advantage, aggregation and shaping by name; those of the loss are resolved too, so that all is refused at start.

    Raises:
        ConfigError: a part is not known, or lacks what it needs.
    """
    filled = {"max_tokens": max_new_tokens}
    advantage = choose(ADVANTAGES, algorithm.advantage, "algorithm.advantage", filled)
    aggregation = choose(AGGREGATIONS, algorithm.aggregation, "algorithm.aggregation", filled)
    shaping = [choose(SHAPING, s, f"algorithm.shaping[{i}]", filled) for i, s in enumerate(algorithm.shaping)]
    Objective.of(algorithm)
    return advantage, aggregation, shaping


def _sized(result: torch.Tensor, like: torch.Tensor, choice: Choice) -> torch.Tensor:
    if result.shape != like.shape:
        raise ConfigError(f"algorithm.advantage={choice.name} returned {list(result.shape)}, expected {list(like.shape)}")
    return result.to(torch.float32)
