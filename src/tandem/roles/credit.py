"""Computes advantages of tokens from rewards of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem.algorithms.advantages import whiten, whiten_within
from tandem.algorithms.kl import k1
from tandem.algorithms.registry import TOKEN_LEVEL
from tandem.api.batch import num_sequences, per_token, sequence_index, sum_by_sequence, trained_tokens
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.requests import StopReason
from tandem.roles.components import Choice


class Samples(NamedTuple):
    """The M distinct samples of a batch, in ascending order of ``sample_id``. A sample may have several trajectories."""

    of_sequence: torch.Tensor
    """[N] int64, index (0 to M − 1) of each trajectory's sample."""

    first: torch.Tensor
    last: torch.Tensor
    """[M] int64 each, index of the sample's first and last trajectory; the last one's stop reason is the sample's."""

    lengths: torch.Tensor
    """[M] int64, number of trained tokens in all trajectories of the sample."""


def samples_of(batch: TensorDict) -> Samples:
    """Returns the samples of a batch, by ``sample_id``."""
    ids, of_sequence = torch.unique(batch["sample_id"], return_inverse=True)
    position = torch.arange(num_sequences(batch), device=ids.device)
    first = ids.new_full((len(ids),), num_sequences(batch)).scatter_reduce(0, of_sequence, position, "amin")
    last = ids.new_zeros(len(ids)).scatter_reduce(0, of_sequence, position, "amax")
    trained = sum_by_sequence(batch, trained_tokens(batch).to(torch.int64))
    return Samples(of_sequence, first, last, ids.new_zeros(len(ids)).index_add(0, of_sequence, trained))


@dataclass(frozen=True)
class Credit:
    """The functions that the configuration names for shaping and advantages, and the whitening of advantages."""

    advantage: Choice
    shaping: Sequence[Choice]
    whitening: str
    """``none``, or the samples over which advantages are whitened: ``group`` or ``batch``."""

    @property
    def of_tokens(self) -> bool:
        """True if advantages are computed from rewards of single tokens."""
        return any(name in self.advantage.inputs for name in TOKEN_LEVEL)

    def shape(self, batch: TensorDict, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the shaped rewards ``[M]``, and a mask of the samples that keep their weight, ``[M]`` bool."""
        rewards = batch["reward"][samples.first].float()
        kept = torch.ones_like(rewards, dtype=torch.bool)
        tensors = _of_samples(batch, samples) | {
            "truncated": batch["stop_reason"][samples.last] == StopReason.LENGTH,
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
        penalty = torch.zeros_like(mask, dtype=torch.float32)
        if kl_coefficient:
            penalty = kl_coefficient * k1(batch["proximal_logprobs"], batch["reference_logprobs"], mask)
        named = sorted(str(name) for name in batch.keys() if str(name).startswith("rewards/"))
        tensors = _of_samples(batch, samples) | {
            "mask": mask,
            "sequence": sequence_index(batch),
            "sample": per_token(batch, samples.of_sequence),
            "cut": batch["stop_reason"] == StopReason.LENGTH,
            "greedy": batch.get("greedy", torch.zeros_like(batch["in_statistics"]))[samples.first],
            "named_rewards": {name.removeprefix("rewards/"): batch[name][samples.first] for name in named},
        }
        if self.of_tokens:
            earned = _token_rewards(batch, samples, rewards, mask) - penalty
            fields = self._of_tokens(batch, tensors | {"rewards": rewards, "token_rewards": earned}, mask)
        else:
            penalties = torch.zeros_like(rewards).index_add(0, samples.of_sequence, sum_by_sequence(batch, penalty))
            of_sample = self._sized(self._call(tensors | {"rewards": rewards - penalties}), rewards)
            fields = {"advantages": per_token(batch, of_sample[samples.of_sequence]).masked_fill(~mask, 0.0)}
        return fields | {"advantages": self._whitened(batch, fields["advantages"], mask)}

    def _of_tokens(self, batch: TensorDict, tensors: dict[str, Any], mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Calls a function of token rewards; returns ``advantages [T]``, and ``returns [T]`` if it computes them."""
        for name in [name for name in ("values", "bootstrap_value") if name in self.advantage.inputs]:
            if name not in batch.keys():
                raise BatchError(
                    f"the batch has no {name}, which algorithm.advantage={self.advantage.name} needs; "
                    "call critic.compute_values(batch) before"
                )
            tensors[name] = batch[name]
        result = self._call(tensors)
        if "values" in self.advantage.inputs:  # the critic, which computes the values, is trained on the returns
            fine = isinstance(result, tuple) and len(result) == 2
            self.advantage.require(fine, "(advantages, returns) if it takes `values`", result)
        parts = dict(zip(("advantages", "returns"), result if isinstance(result, tuple) else (result,), strict=False))
        return {name: self._sized(part, mask).masked_fill(~mask, 0.0) for name, part in parts.items()}

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

    def _whitened(self, batch: TensorDict, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Scales advantages ``[T]`` to mean 0 and variance 1 over the trained tokens of samples with ``in_statistics``."""
        if self.whitening == "none":
            return advantages
        counted = mask & per_token(batch, batch["in_statistics"])
        if self.whitening == "group":
            white = whiten_within(advantages, counted, per_token(batch, batch["group_id"]))
        else:
            white = whiten(advantages, counted)
        return white.masked_fill(~mask, 0.0).to(torch.float32)


def _of_samples(batch: TensorDict, samples: Samples) -> dict[str, Any]:
    return {name: batch[name][samples.first] for name in ("group_id", "in_statistics")} | {"lengths": samples.lengths}


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
