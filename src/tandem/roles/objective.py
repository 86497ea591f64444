"""The actor's loss: policy loss with behaviour correction, KL to the reference, entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.algorithms.correction import behaviour_ratio
from tandem.algorithms.gap import gap
from tandem.algorithms.kl import k3
from tandem.algorithms.ratios import log_ratio
from tandem.algorithms.registry import IMPORTANCE_WEIGHTS, KL, POLICY_LOSSES, REJECTIONS
from tandem.api.batch import per_token, sequence_index
from tandem.api.engines import Outputs
from tandem.api.lazy_torch import TensorDict, torch
from tandem.config.algorithm import AlgorithmConfig, Component
from tandem.roles.components import Choice, choose
from tandem.roles.samples import trained_tokens


@dataclass(frozen=True)
class Objective:
    """``objective(outputs, view) -> losses, metrics``, both per token: the signature of the training engine.

    Where the batch has no ``proximal_logprobs``, the policy, detached, stands in: right for one optimizer step a batch.
    Metrics are 0 at tokens that carry no weight; ``kept`` counts the others, and `averages.step_metrics` divides by it.
    """

    policy_loss: Choice
    weight: Choice
    rejection: Choice
    level: str
    kl: Choice | None
    """The KL in the loss; None if there is none."""

    kl_coefficient: float
    kl_importance: bool
    """Weight the KL by exp(policy − rollout)."""

    entropy_coefficient: float
    version: int
    """Updates of the weights so far: a token of this version was made by the weights that train now."""

    @classmethod
    def of(cls, config: AlgorithmConfig) -> Objective:
        """The parts that a configuration names, before the first update."""
        correction, kl = config.correction, config.kl
        bounds = {name: value for name, value in (("low", correction.low), ("high", correction.high)) if value}
        return cls(
            policy_loss=choose(POLICY_LOSSES, config.policy_loss, "algorithm.policy_loss"),
            weight=choose(IMPORTANCE_WEIGHTS, Component(correction.weight, bounds), "algorithm.correction.weight"),
            rejection=choose(REJECTIONS, correction.reject, "algorithm.correction.reject"),
            level=correction.level,
            kl=choose(KL, Component(kl.estimator or "k3"), "algorithm.kl.estimator") if kl.in_loss else None,
            kl_coefficient=kl.coefficient,
            kl_importance=kl.importance,
            entropy_coefficient=config.entropy_coefficient,
            version=0,
        )

    @property
    def has_other_terms(self) -> bool:
        """True if there is a gradient without any advantage."""
        return self.kl is not None or self.entropy_coefficient > 0 or not self.policy_loss.part.proportional

    def __call__(self, outputs: Outputs, view: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Losses ``[T]`` and metrics ``[T]``."""
        mask, policy = trained_tokens(view), outputs.logprobs
        tensors = {
            "mask": mask,
            "sequence": sequence_index(view),
            "policy": policy,
            "proximal": view["proximal_logprobs"] if "proximal_logprobs" in view.keys() else policy.detach(),
            "rollout": view["rollout_logprobs"],
            "advantages": view["advantages"],
        }
        losses, metrics = self._of_policy(tensors | self._asked(view))
        if "dropped" in metrics:
            metrics = {f"dropped/{self.policy_loss.name}" if n == "dropped" else n: m for n, m in metrics.items()}
        weights, corrected = self._correct(tensors)
        losses = losses * weights
        metrics = metrics | corrected | self._distances(tensors, view)
        if "reference_logprobs" in view.keys():
            reference = view["reference_logprobs"]
            metrics["kl/reference"] = k3(policy.detach(), reference, mask)
            if self.kl is not None:
                ratio = log_ratio(policy, tensors["rollout"], mask).exp() if self.kl_importance else torch.ones_like(policy)
                penalty = self.kl(policy=policy, reference=reference, mask=mask, ratio=ratio)
                losses = losses + self.kl_coefficient * penalty
        entropy = outputs.entropy if outputs.entropy is not None else view["entropy"]
        metrics["entropy"] = entropy.detach()
        if self.entropy_coefficient:
            losses = losses - self.entropy_coefficient * entropy.masked_fill(~mask, 0.0)
        kept = (mask & ~view["dropped"]).float()
        return losses, {"kept": kept} | {name: value * kept for name, value in metrics.items()}

    def _of_policy(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The policy loss and its metrics, ``[T]`` each."""
        result = self.policy_loss(**tensors)
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        size, found = len(tensors["mask"]), [result[0], *result[1].values()] if pair else []
        fine = pair and all(isinstance(x, torch.Tensor) and x.shape == (size,) for x in found)
        self.policy_loss.require(fine, f"(losses, {{name: metric}}), tensors of shape [{size}]", result)
        return result

    def _asked(self, view: TensorDict) -> dict[str, torch.Tensor]:
        """Further tensors ``[T]`` that this policy loss asks for."""
        asked = self.policy_loss.asked
        lengths = {"sample_lengths": per_token(view, view["sample_length"])} if "sample_lengths" in asked else {}
        return lengths | ({"prepared": view["prepared"]} if "prepared" in asked else {})

    def _correct(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weight of each token's policy loss ``[T]``, and what to know about it."""
        mask, sequence = tensors["mask"], tensors["sequence"]
        ratio = behaviour_ratio(tensors["proximal"], tensors["rollout"], mask, sequence, self.level)
        weighted, rejects = self.weight.name != "none", self.rejection.name != "none"
        kept = self.rejection(**tensors | {"policy": tensors["policy"].detach()})
        weights = self.weight(ratio=ratio) * kept
        shown = weights if weighted or rejects else ratio
        metrics = {"correction/mean": shown, "correction/square": shown.square(), "correction/max": ratio}
        if weighted or rejects:
            metrics["correction/dropped"] = (weights == 0).float()
        if rejects:
            metrics[f"dropped/{self.rejection.name}"] = (~kept).float()
        return weights, metrics

    def _distances(self, tensors: dict[str, torch.Tensor], view: TensorDict) -> dict[str, torch.Tensor]:
        """The distance of the engine's log-probabilities from the trainer's, and of tokens of the same weights: the gap."""
        mask, proximal, rollout = tensors["mask"], tensors["proximal"], tensors["rollout"]
        found = {"kl/rollout_proximal": k3(rollout, proximal, mask)}  # the sampler stands first
        if "versions" in view.keys():
            fresh = view["versions"] == self.version
            off = gap(proximal, rollout, mask & fresh)
            found |= {"gap/mean": off, "gap/max": off, "gap/fresh": fresh.float()}
        return found
