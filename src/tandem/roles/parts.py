"""Resolves the parts that an algorithm's configuration names, once per run, for the plan, the actor and the rollout.

One part chooses the tokens to train on. It does so once for the whole batch before the update, and with noise that depends
on a token's identity, so that the choice depends neither on micro-batches nor on the token's place in a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.registry import (
    ADVANTAGES,
    AGGREGATIONS,
    FILTERS,
    IMPORTANCE_WEIGHTS,
    KL,
    POLICY_LOSSES,
    REJECTIONS,
    SHAPING,
    TOKEN_FILTERS,
)
from tandem.api.batch import per_token, sequence_index, trained_tokens
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.config.algorithm import AlgorithmConfig, Component
from tandem.roles.components import Choice, choose
from tandem.roles.credit import Credit
from tandem.roles.objective import Objective

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit constants of splitmix64, as signed integers."""


def splitmix64(x: torch.Tensor) -> torch.Tensor:
    """Returns the mixing function of the generator splitmix64, computed on int64; products wrap around at 64 bits."""
    for shift, factor in ((30, _ODD[1]), (27, _ODD[2])):
        x = (x ^ _right(x, shift)) * factor
    return x ^ _right(x, 31)


def _right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Returns ``x`` shifted to the right by ``by`` bits, filled with zeros (a logical shift)."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def token_noise(
    seed: int, step: int, group_id: torch.Tensor, sample_id: torch.Tensor, input_ids: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Returns noise ``[T]``, float64 in [0, 1). It depends on the seed, the step, the ids of group and sample, all tokens of
    the trajectory and the position in it. The tokens tell the trajectories of a sample apart.

    ``group_id``, ``sample_id``: ``[N]``, ``input_ids``: ``[T]``, ``cu_seqlens``: ``[N + 1]``.
    """
    sizes = cu_seqlens.diff()
    sequence = torch.repeat_interleave(sizes)
    place = torch.arange(len(input_ids), device=input_ids.device) - cu_seqlens[sequence]
    content = torch.zeros_like(group_id).index_add(0, sequence, splitmix64(input_ids * _ODD[0] + place * _ODD[1]))
    key = torch.zeros_like(group_id)
    for part in (torch.full_like(key, seed), torch.full_like(key, step), group_id, sample_id, content):
        key = splitmix64((key + part) * _ODD[0] + 1)
    bits = splitmix64(key[sequence] + (place + 1) * _ODD[0])
    return _right(bits, 11).double() / 2.0**53


FIELD = {"proximal": "proximal_logprobs", "rollout": "rollout_logprobs", "entropy": "entropy"}


def token_choice(algorithm: AlgorithmConfig, seed: int, preparation: Choice | None) -> TokenChoice | None:
    """Returns the `TokenChoice` of a token filter and ``preparation`` (see `TokenChoice`); None if there is neither.

    Raises:
        ConfigError: the token filter is unknown.
    """
    token_filter = choose(TOKEN_FILTERS, algorithm.token_filter, "algorithm.token_filter")
    filters = token_filter.name != "none"
    return TokenChoice(token_filter if filters else None, preparation, seed) if filters or preparation else None


class TokenChoice:
    """The token filter, and the preparation of the policy loss (`tandem.algorithms.registry.prepared_by`)."""

    def __init__(self, token_filter: Choice | None, preparation: Choice | None, seed: int):
        """``preparation``: the preparation of the policy loss. ``seed``: seed of the noise for random choices and ties."""
        self.filter, self.preparation, self.seed = token_filter, preparation, seed

    @property
    def needs_proximal(self) -> bool:
        """True if the batch must have ``proximal_logprobs`` or ``entropy``, which a forward pass before the update
        computes."""
        chosen = [choice for choice in (self.filter, self.preparation) if choice is not None]
        return any(name in choice.inputs for choice in chosen for name in ("proximal", "entropy"))

    def drops(self, batch: TensorDict, step: int) -> dict[str, torch.Tensor]:
        """Returns ``token_filter`` → the tokens that the filter removes from the loss, ``[T]`` bool; empty without
        filter."""
        if self.filter is None:
            return {}
        mask = self._mask(batch)
        return {"token_filter": mask & ~self._call(self.filter, batch, mask, step)}

    def prepared(self, batch: TensorDict, step: int) -> dict[str, torch.Tensor]:
        """Returns the field ``prepared [T]`` if the policy loss has a preparation. The batch must have ``advantages`` and
        ``dropped``."""
        if self.preparation is None:
            return {}
        mask = self._mask(batch) & ~batch["dropped"]
        return {"prepared": self._call(self.preparation, batch, mask, step).to(torch.float32)}

    def _mask(self, batch: TensorDict) -> torch.Tensor:
        mask = trained_tokens(batch)
        return mask & per_token(batch, batch["in_loss"]) if "in_loss" in batch.keys() else mask

    def _call(self, choice: Choice, batch: TensorDict, mask: torch.Tensor, step: int) -> torch.Tensor:
        tensors = {"mask": mask, "sequence": sequence_index(batch)}
        for name in set(choice.inputs) - set(tensors) - {"noise"}:
            field = FIELD.get(name, name)
            if field not in batch.keys():
                raise BatchError(f"the batch has no {field}, which {choice.name} needs; call compute_proximal(batch) before")
            tensors[name] = batch[field]
        if "noise" in choice.inputs:
            ids = batch["group_id"], batch["sample_id"], batch["input_ids"], batch["cu_seqlens"]
            tensors["noise"] = token_noise(self.seed, step, *ids)
        return choice(**tensors)


@dataclass(frozen=True)
class AlgorithmParts:
    """The functions of an algorithm with their knobs."""

    credit: Credit
    tokens: TokenChoice | None
    """The choice of tokens that are trained on; None if all are."""

    aggregation: Choice
    objective: Objective
    filter: Choice
    """The choice of groups that are trained on."""

    def needs_proximal(self, algorithm: AlgorithmConfig, updates_per_batch: int) -> bool:
        """True if a separate forward pass must compute the log-probabilities before the update.

        With one optimizer step per batch, the policy in that step *is* the proximal policy, so its log-probabilities serve
        for the ratio, behaviour correction and rejection. KL in the reward, a coefficient that adapts to the KL, and a
        choice among all tokens of the batch need them before the step.
        """
        chooses = self.tokens is not None and self.tokens.needs_proximal
        return updates_per_batch > 1 or algorithm.kl.in_reward or algorithm.kl.target is not None or chooses


def choose_parts(algorithm: AlgorithmConfig, max_new_tokens: int | None, seed: int = 0) -> AlgorithmParts:
    """Resolves all parts that the algorithm names. ``max_new_tokens``: default of the knob ``max_tokens`` of the aggregation
    `constant` and the shaping `overlong`. ``seed``: seed of the noise of `TokenChoice`.

    Raises:
        ConfigError: a part is unknown, or a required knob is not set.
    """
    filled, objective = {"max_tokens": max_new_tokens}, objective_of(algorithm)
    credit = Credit(
        choose(ADVANTAGES, algorithm.advantage, "algorithm.advantage", filled),
        [choose(SHAPING, shaping, f"algorithm.shaping[{i}]", filled) for i, shaping in enumerate(algorithm.shaping)],
        algorithm.whitening,
    )
    return AlgorithmParts(
        credit,
        token_choice(algorithm, seed, objective.policy_loss.preparation),
        choose(AGGREGATIONS, algorithm.aggregation, "algorithm.aggregation", filled),
        objective,
        choose(FILTERS, algorithm.filter, "algorithm.filter"),
    )


def objective_of(algorithm: AlgorithmConfig) -> Objective:
    """Returns the objective that the algorithm names, at version 0. Raises `ConfigError` as `choose_parts`."""
    correction, kl = algorithm.correction, algorithm.kl
    bounds = {name: value for name, value in (("low", correction.low), ("high", correction.high)) if value}
    return Objective(
        policy_loss=choose(POLICY_LOSSES, algorithm.policy_loss, "algorithm.policy_loss"),
        weight=choose(IMPORTANCE_WEIGHTS, Component(correction.weight, bounds), "algorithm.correction.weight"),
        rejection=choose(REJECTIONS, correction.reject, "algorithm.correction.reject"),
        level=correction.level,
        kl=choose(KL, Component(kl.estimator or "k3"), "algorithm.kl.estimator") if kl.in_loss else None,
        kl_coefficient=kl.coefficient,
        kl_importance=kl.importance,
        entropy_coefficient=algorithm.entropy_coefficient,
        version=0,
    )
