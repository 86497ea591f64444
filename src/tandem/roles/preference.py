"""A policy that learns from judged completions: DPO, IPO, KTO, SimPO, ORPO."""

from __future__ import annotations

import logging

from tandem.algorithms.preference import (
    PREFERENCE_LOSSES,
    mismatch_baseline,
)
from tandem.api.batch import num_sequences, sum_by_sequence
from tandem.api.engines import Outputs, TrainEngine
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.stage import stage, update_stage
from tandem.config.algorithm import Component
from tandem.config.errors import ConfigError
from tandem.roles.components import choose
from tandem.roles.pairs import mismatched, on_both, on_sequences, pairs_of
from tandem.roles.reference import Reference
from tandem.roles.samples import trained_tokens, with_fields

log = logging.getLogger(__name__)

Losses = tuple["torch.Tensor", dict[str, "torch.Tensor"]]


class PreferenceLearner:
    """An engine and a preference loss: `compute_reference`, `compute_baseline`, `train_preference`, in this order.

    A batch of pairs holds both sides of each as two sequences with one ``unit_id``, of which one is ``chosen``; a batch of
    single completions says with ``chosen`` which are desirable. The first two stages return the batch itself where the loss
    asks for nothing of theirs, so a loop can always call all three.
    """

    def __init__(self, engine: TrainEngine, loss: Component, *, reference: Reference | None = None):
        """``loss``: a registered name with its knobs, or ``my_file.py:function``. ``reference``: the frozen policy, for
        losses that compare with one.

        Raises:
            ConfigError: the loss is not known, or has no reference and needs one.
        """
        self.engine, self.reference = engine, reference
        self.loss = choose(PREFERENCE_LOSSES, loss, "loss")
        self.is_paired = self.loss.part.is_paired
        self.needs_reference = self.loss.part.needs_reference
        self.needs_baseline = self.loss.part.needs_baseline
        self._said = False
        if self.needs_reference and reference is None:
            raise ConfigError(
                f"loss={loss.name} compares with a reference policy, and there is none; give "
                "PreferenceLearner(…, reference=Reference(engine)), or choose simpo or orpo"
            )

    @stage(
        "reference",
        reads=("input_ids", "loss_mask", "temperature"),
        may_add=("reference_logprobs",),
        reads_state=("weights",),
    )
    def compute_reference(self, batch: TensorDict) -> TensorDict:
        """Adds ``reference_logprobs``."""
        return self._reference.compute_logprobs(batch) if self.needs_reference else batch

    @stage("baseline", reads=("input_ids", "loss_mask", "temperature"), may_add=("baseline",), reads_state=("weights",))
    def compute_baseline(self, batch: TensorDict) -> TensorDict:
        """Adds ``baseline``: KTO's z under the weights of now, from prompts with other rows' completions."""
        if not self.needs_baseline:
            return batch
        others = mismatched(batch)
        z = torch.zeros(())
        if others is None:
            self._say_once_that_there_is_one_prompt()
        else:
            others = self._reference.compute_logprobs(others)
            mask = trained_tokens(others)
            sums = [
                sum_by_sequence(others, logprobs.masked_fill(~mask, 0.0))
                for logprobs in (self.engine.forward(others).logprobs, others["reference_logprobs"])
            ]
            z = mismatch_baseline(*sums)
        return with_fields(batch, baseline=z.expand(num_sequences(batch)).contiguous())

    @update_stage(
        reads=("input_ids", "loss_mask", "chosen"),
        may_read=("temperature", "unit_id", "reference_logprobs", "baseline"),
    )
    def train_preference(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer step on the mean loss over pairs (or completions).

        Returns ``loss``, ``margin``, ``accuracy``, ``score/chosen``, ``score/rejected``, ``grad_norm``, ``lr`` …

        Raises:
            BatchError: a stage before this one was left out, sequences that are no pairs, or one without a trained token.
        """
        return _derived(self.engine.train_batch(self._weighted(batch), self._objective))

    @stage(
        reads=("input_ids", "loss_mask", "chosen"),
        may_read=("temperature", "unit_id", "reference_logprobs", "baseline"),
        reads_state=("weights",),
    )
    def evaluate_preference(self, batch: TensorDict) -> dict[str, float]:
        """The same without a step."""
        return _derived(self.engine.eval_batch(self._weighted(batch), self._objective))

    def _say_once_that_there_is_one_prompt(self) -> None:
        if not self._said:
            log.warning(
                "loss=%s: all rows of a batch have the same prompt, so there is no completion of another one to compare "
                "with, and its baseline is 0 there; mix the rows (train_dataset.shuffle=true) or raise batch_size",
                self.loss.name,
            )
        self._said = True

    @property
    def _reference(self) -> Reference:
        assert self.reference is not None  # checked at construction
        return self.reference

    def _weighted(self, batch: TensorDict) -> TensorDict:
        for field, needed, remedy in (
            ("reference_logprobs", self.needs_reference, "compute_reference"),
            ("baseline", self.needs_baseline, "compute_baseline"),
        ):
            if needed and field not in batch.keys():
                raise BatchError(f"the batch has no {field}, which loss={self.loss.name} needs; call {remedy}(batch) before")
        if bool((sum_by_sequence(batch, trained_tokens(batch).long()) == 0).any()):
            raise BatchError("a sequence has no trained token, so it has no log-probability to compare")
        if not self.is_paired:
            count = num_sequences(batch)
            return with_fields(batch, loss_weights=torch.full((count,), 1 / count))
        better, _ = pairs_of(batch)
        return with_fields(batch, loss_weights=batch["chosen"].float() / len(better))

    def _objective(self, outputs: Outputs, view: TensorDict) -> Losses:
        """Losses and metrics ``[N]``."""
        mask = trained_tokens(view)
        policy = sum_by_sequence(view, outputs.logprobs.masked_fill(~mask, 0.0))  # [N]
        length = sum_by_sequence(view, mask.to(policy.dtype))
        reference = torch.zeros_like(policy)
        if self.needs_reference:
            reference = sum_by_sequence(view, view["reference_logprobs"].masked_fill(~mask, 0.0))
        if not self.is_paired:
            return self._unpaired(view, policy, reference)
        better, worse = pairs_of(view)
        losses, chosen, rejected = self._called(
            chosen=policy[better],
            rejected=policy[worse],
            chosen_reference=reference[better],
            rejected_reference=reference[worse],
            chosen_length=length[better],
            rejected_length=length[worse],
        )
        found = {
            "margin": chosen - rejected,
            "accuracy": (chosen > rejected).float(),
            "score/chosen": chosen,
            "score/rejected": rejected,
        }
        metrics = {name: on_both(view, better, worse, value) for name, value in found.items()}
        return on_sequences(view, better, losses), metrics

    def _called(self, **tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Losses and two scores, as long as the tensors."""
        result, size = self.loss(**tensors), len(next(iter(tensors.values())))
        fine = isinstance(result, tuple) and len(result) == 3 and all(isinstance(x, torch.Tensor) for x in result)
        fine = fine and all(x.shape == (size,) for x in result)
        self.loss.require(fine, f"three tensors of shape [{size}], losses and two scores", result)
        return result

    def _unpaired(self, view: TensorDict, policy: torch.Tensor, reference: torch.Tensor) -> Losses:
        desirable, z = view["chosen"], view["baseline"] if self.needs_baseline else torch.zeros_like(policy)
        losses, score, _ = self._called(policy=policy, reference=reference, desirable=desirable, baseline=z)
        good = desirable.float()
        right = ((policy - reference).detach() > z) == desirable
        return losses, {
            "accuracy": right.float(),
            "score/chosen": score * good,
            "score/rejected": score * (1 - good),
            "desirable": good,
            "baseline": z,
        }


def _derived(metrics: dict[str, float]) -> dict[str, float]:
    """Means over all sequences of one label's scores → means over that label's; their difference is the margin."""
    if "desirable" not in metrics:
        return metrics
    good = metrics.pop("desirable")
    for name, share in (("score/chosen", good), ("score/rejected", 1 - good)):
        total = metrics.pop(name)
        if share > 0:
            metrics[name] = total / share
    if 0 < good < 1:
        metrics["margin"] = metrics["score/chosen"] - metrics["score/rejected"]
    return metrics
