"""Computes advantages of tokens from rewards of samples."""

from __future__ import annotations

from typing import Any

from tandem.algorithms.advantages import whiten, whiten_within
from tandem.algorithms.kl import k1
from tandem.algorithms.registry import ADVANTAGES, SHAPING, TOKEN_LEVEL
from tandem.api.batch import per_token, sequence_index, sum_by_sequence
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.requests import StopReason
from tandem.config.algorithm import AlgorithmConfig
from tandem.roles.components import choose
from tandem.roles.samples import Samples, trained_tokens, truncated


class Credit:
    """The functions that the configuration names for shaping and advantages, and the whitening of advantages."""

    def __init__(self, algorithm: AlgorithmConfig, max_new_tokens: int | None = None):
        """``max_new_tokens``: default of the knob ``max_tokens`` of the shaping `overlong`.

        Raises:
            ConfigError: one of the functions is unknown, or a required knob is not set.
        """
        filled = {"max_tokens": max_new_tokens}
        self.whitening = algorithm.whitening
        self.advantage = choose(ADVANTAGES, algorithm.advantage, "algorithm.advantage", filled)
        self.shaping = [choose(SHAPING, s, f"algorithm.shaping[{i}]", filled) for i, s in enumerate(algorithm.shaping)]

    @property
    def of_tokens(self) -> bool:
        """True if advantages are computed from rewards of single tokens."""
        return any(name in self.advantage.inputs for name in TOKEN_LEVEL)

    def shape(self, batch: TensorDict, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the shaped rewards ``[M]``, and a mask of the samples that keep their weight, ``[M]`` bool."""
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
        """Returns ``advantages [T]``, and ``returns [T]`` if the function computes them. All trajectories of a sample share
        its advantage. ``kl_coefficient``: weight of the KL penalty in the reward; 0 for none."""
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
        of_sample = self._sized(self._call(tensors | {"rewards": rewards - penalties}), rewards)
        advantages = per_token(batch, of_sample[samples.of_sequence]).masked_fill(~mask, 0.0)
        return {"advantages": whitened(batch, advantages, mask, self.whitening)}

    def _of_tokens(self, batch: TensorDict, tensors: dict[str, Any], mask: torch.Tensor) -> dict[str, torch.Tensor]:
        for name in ("values", "bootstrap_value"):
            if name in self.advantage.inputs:
                if name not in batch.keys():
                    raise BatchError(
                        f"the batch has no {name}, which algorithm.advantage={self.advantage.name} needs; "
                        "call critic.compute_values(batch) before"
                    )
                tensors[name] = batch[name]
        result = self._call(tensors | {"cut": batch["stop_reason"] == StopReason.LENGTH})
        if "values" in self.advantage.inputs:  # the critic, which computes the values, is trained on the returns
            fine = isinstance(result, tuple) and len(result) == 2
            self.advantage.require(fine, "(advantages, returns) if it takes `values`", result)
        parts = dict(zip(("advantages", "returns"), result if isinstance(result, tuple) else (result,), strict=False))
        sized = {name: self._sized(part, mask).masked_fill(~mask, 0.0) for name, part in parts.items()}
        return sized | {"advantages": whitened(batch, sized["advantages"], mask, self.whitening)}

    def _baselines(self, batch: TensorDict, samples: Samples) -> dict[str, Any]:
        """Returns the inputs that only some advantage functions take: greedy samples and named rewards, ``[M]`` each."""
        tensors: dict[str, Any] = {}
        if "greedy" in self.advantage.inputs:
            none = torch.zeros_like(batch["in_statistics"])
            tensors["greedy"] = batch.get("greedy", none)[samples.first]
        if "named_rewards" in self.advantage.inputs:
            names = sorted(str(name) for name in batch.keys() if str(name).startswith("rewards/"))
            tensors["named_rewards"] = {name.removeprefix("rewards/"): batch[name][samples.first] for name in names}
        return tensors

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
    tensors = {name: batch[name][samples.first] for name in ("group_id", "in_statistics")}
    return tensors | {"lengths": samples.lengths}


def _penalty(batch: TensorDict, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Returns β·k1 of the proximal policy ``[T]``; 0 if KL is not part of the reward."""
    if coefficient == 0:
        return torch.zeros_like(mask, dtype=torch.float32)
    return coefficient * k1(batch["proximal_logprobs"], batch["reference_logprobs"], mask)


def _token_rewards(batch: TensorDict, samples: Samples, rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the reward of each token ``[T]``: its entry in ``token_rewards``, if the batch has this field. The last
    trained token of each trajectory also gets the sample's reward minus all token rewards of the sample up to this
    trajectory's end, so that its return includes what later trajectories earn."""
    position = torch.arange(len(mask), device=mask.device)
    last = torch.full_like(samples.of_sequence, -1).scatter_reduce(0, sequence_index(batch)[mask], position[mask], "amax")
    earned, remaining = torch.zeros_like(mask, dtype=torch.float32), rewards[samples.of_sequence]  # [T], [N]
    if "token_rewards" in batch.keys():
        earned = batch["token_rewards"].clone()
        sums = sum_by_sequence(batch, earned).double()  # [N]; the trajectories of a sample are consecutive
        before = sums.cumsum(0) - sums
        remaining = (remaining - (before - before[samples.first][samples.of_sequence]) - sums).float()
    earned[last[last >= 0]] += remaining[last >= 0]
    return earned


def whitened(batch: TensorDict, advantages: torch.Tensor, mask: torch.Tensor, within: str) -> torch.Tensor:
    """Scales advantages ``[T]`` to mean 0 and variance 1 ``within`` each ``group`` or the ``batch``; ``none`` returns them
    unchanged. Statistics are over the trained tokens (``mask [T]``) of samples with ``in_statistics``."""
    if within == "none":
        return advantages
    counted = mask & per_token(batch, batch["in_statistics"])
    if within == "group":
        white = whiten_within(advantages, counted, per_token(batch, batch["group_id"]))
    else:
        white = whiten(advantages, counted)
    return white.masked_fill(~mask, 0.0).to(torch.float32)
