"""From rewards of samples to advantages of tokens."""

from __future__ import annotations

from typing import Any

from tandem.algorithms.kl import k1
from tandem.algorithms.registry import ADVANTAGES, SHAPING, TOKEN_LEVEL
from tandem.algorithms.whitening import whiten, whiten_within
from tandem.api.batch import per_token, sequence_index, sum_by_sequence
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.requests import StopReason
from tandem.config.algorithm import AlgorithmConfig
from tandem.roles.components import choose
from tandem.roles.samples import Samples, trained_tokens, truncated


class Credit:
    """Shaping, advantage and whitening, as the configuration names them."""

    def __init__(self, algorithm: AlgorithmConfig, max_new_tokens: int | None = None):
        """``max_new_tokens``: what `overlong` takes where its knob is not set.

        Raises:
            ConfigError: one of them is not known, or lacks what it needs.
        """
        filled = {"max_tokens": max_new_tokens}
        self.whitening = algorithm.whitening
        self.advantage = choose(ADVANTAGES, algorithm.advantage, "algorithm.advantage", filled)
        self.shaping = [choose(SHAPING, s, f"algorithm.shaping[{i}]", filled) for i, s in enumerate(algorithm.shaping)]

    @property
    def of_tokens(self) -> bool:
        """True if advantages are made from rewards of single tokens."""
        return any(name in self.advantage.asked for name in TOKEN_LEVEL)

    def shape(self, batch: TensorDict, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Rewards after shaping ``[M]``, and the samples that keep their weight ``[M]`` bool."""
        rewards = batch["reward"][samples.first].float()
        kept = torch.ones_like(rewards, dtype=torch.bool)
        tensors = _of_samples(batch, samples) | {
            "truncated": truncated(batch, samples),
            "accuracy": batch.get("accuracy", torch.full_like(batch["reward"].float(), torch.nan))[samples.first],
        }
        for shaping in self.shaping:
            result = shaping(rewards=rewards, **tensors)
            rewards, keeps = result if isinstance(result, tuple) else (result, kept)
            kept = kept & keeps
        return rewards, kept

    def advantages(
        self, batch: TensorDict, samples: Samples, rewards: torch.Tensor, kl_coefficient: float
    ) -> dict[str, torch.Tensor]:
        """``advantages [T]``, and ``returns [T]`` where the choice makes them; those of a sample go to all its trajectories.

        ``kl_coefficient``: weight of the penalty for leaving the reference in the reward; 0 where it is not part of it.
        """
        mask = trained_tokens(batch)
        penalty = _penalty(batch, mask, kl_coefficient)
        tensors = _of_samples(batch, samples) | {
            "mask": mask,
            "sequence": sequence_index(batch),
            "sample": per_token(batch, samples.of_sequence),
        }
        if self.of_tokens:
            earned = _token_rewards(batch, samples, rewards, mask) - penalty
            return self._of_tokens(batch, tensors | {"rewards": rewards, "token_rewards": earned}, mask)
        tensors |= self._baselines(batch, samples)
        penalties = torch.zeros_like(rewards).index_add(0, samples.of_sequence, sum_by_sequence(batch, penalty))
        found = self._sized(self._call(tensors | {"rewards": rewards - penalties}), rewards)
        advantages = per_token(batch, found[samples.of_sequence]).masked_fill(~mask, 0.0)
        return {"advantages": whitened(batch, advantages, mask, self.whitening)}

    def _of_tokens(self, batch: TensorDict, tensors: dict[str, Any], mask: torch.Tensor) -> dict[str, torch.Tensor]:
        for name in ("values", "bootstrap_value"):
            if name in self.advantage.asked:
                if name not in batch.keys():
                    raise BatchError(
                        f"the batch has no {name}, which algorithm.advantage={self.advantage.name} needs; "
                        "call critic.compute_values(batch) before"
                    )
                tensors[name] = batch[name]
        found = self._call(tensors | {"cut": batch["stop_reason"] == StopReason.LENGTH})
        if "values" in self.advantage.asked:  # the critic, which makes them, learns the returns
            fine = isinstance(found, tuple) and len(found) == 2
            self.advantage.require(fine, "(advantages, returns) where it asks for `values`", found)
        parts = dict(zip(("advantages", "returns"), found if isinstance(found, tuple) else (found,), strict=False))
        sized = {name: self._sized(part, mask).masked_fill(~mask, 0.0) for name, part in parts.items()}
        return sized | {"advantages": whitened(batch, sized["advantages"], mask, self.whitening)}

    def _baselines(self, batch: TensorDict, samples: Samples) -> dict[str, Any]:
        """The baselines that single choices are compared with."""
        found: dict[str, Any] = {}
        if "greedy" in self.advantage.asked:
            nobody = torch.zeros_like(batch["in_statistics"])
            found["greedy"] = batch.get("greedy", nobody)[samples.first]
        if "named_rewards" in self.advantage.asked:
            names = sorted(str(name) for name in batch.keys() if str(name).startswith("rewards/"))
            found["named_rewards"] = {name.removeprefix("rewards/"): batch[name][samples.first] for name in names}
        return found

    def _call(self, tensors: dict[str, Any]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        try:
            return self.advantage(**tensors)
        except ValueError as error:
            raise BatchError(f"algorithm.advantage={self.advantage.name}: {error}") from error

    def _sized(self, result: object, like: torch.Tensor) -> torch.Tensor:
        fine = isinstance(result, torch.Tensor) and result.shape == like.shape
        self.advantage.require(fine, f"a tensor of shape {list(like.shape)}", result)
        assert isinstance(result, torch.Tensor)
        return result.to(torch.float32)


def _of_samples(batch: TensorDict, samples: Samples) -> dict[str, Any]:
    found = {name: batch[name][samples.first] for name in ("group_id", "in_statistics")}
    return found | {"lengths": samples.lengths}


def _penalty(batch: TensorDict, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """β·k1 of the proximal policy, where KL is part of the reward ``[T]``; else 0."""
    if coefficient == 0:
        return torch.zeros_like(mask, dtype=torch.float32)
    return coefficient * k1(batch["proximal_logprobs"], batch["reference_logprobs"], mask)


def _token_rewards(batch: TensorDict, samples: Samples, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rewards of tokens ``[T]``. What the tokens of a sample have not earned by the end of a trajectory stands on its last
    trained token, so that each trajectory is told everything that comes after it."""
    position = torch.arange(len(mask), device=mask.device)
    last = torch.full_like(samples.of_sequence, -1).scatter_reduce(0, sequence_index(batch)[mask], position[mask], "amax")
    earned, left = torch.zeros_like(mask, dtype=torch.float32), rewards[samples.of_sequence]  # [T], [N]
    if "token_rewards" in batch.keys():
        earned = batch["token_rewards"].clone()
        own = sum_by_sequence(batch, earned).double()  # [N]; the trajectories of a sample follow each other
        before = own.cumsum(0) - own
        left = (left - (before - before[samples.first][samples.of_sequence]) - own).float()
    earned[last[last >= 0]] += left[last >= 0]
    return earned


def whitened(batch: TensorDict, advantages: torch.Tensor, mask: torch.Tensor, within: str) -> torch.Tensor:
    """Advantages ``[T]`` as `algorithm.whitening` says: ``none`` gives them back, ``group`` and ``batch`` bring them to mean
    0 and variance 1 there, over the trained tokens (``mask [T]``) of samples that enter statistics."""
    if within == "none":
        return advantages
    counted = mask & per_token(batch, batch["in_statistics"])
    if within == "group":
        found = whiten_within(advantages, counted, per_token(batch, batch["group_id"]))
    else:
        found = whiten(advantages, counted)
    return found.masked_fill(~mask, 0.0).to(torch.float32)
