"""The roles that learn from rows: a language model, a policy that learns preferences, and a reward model.

A pair is two sequences of a packed batch with the same ``unit_id``, one of them ``chosen``.
"""

from __future__ import annotations

import logging
import math

from tandem.algorithms.losses import bradley_terry, negative_log_likelihood, safety_cost, step_cross_entropy, token_mean
from tandem.algorithms.preference import (
    PREFERENCE_LOSSES,
    mismatch_baseline,
)
from tandem.api.batch import (
    FORWARD,
    num_sequences,
    pack,
    stage,
    sum_by_sequence,
    trained_tokens,
    unpack,
    update_stage,
    with_fields,
)
from tandem.api.engines import Outputs, TrainEngine
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.config.algorithm import Component
from tandem.config.errors import ConfigError
from tandem.roles.components import choose
from tandem.roles.reference import Reference

log = logging.getLogger(__name__)

Losses = tuple["torch.Tensor", dict[str, "torch.Tensor"]]


def pairs_of(batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the indices of the better and of the worse sequence of each pair, ``[P]`` each.

    Raises:
        BatchError: a ``unit_id`` does not have exactly one chosen and one other sequence.
    """
    chosen, units = batch["chosen"], batch["unit_id"]
    better, worse = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    better, worse = better[units[better].argsort()], worse[units[worse].argsort()]
    if (
        len(better) != len(worse)
        or not torch.equal(units[better], units[worse])
        or len(units[better].unique()) < len(better)
    ):
        raise BatchError("every unit_id must belong to two sequences, of which one is chosen")
    return better, worse


def on_sequences(batch: TensorDict, better: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns ``[N]``: the value of each pair (``values [P]``) at its chosen sequence, 0 at the other."""
    return values.new_zeros(num_sequences(batch)).index_copy(0, better, values)


def on_both(batch: TensorDict, better: torch.Tensor, worse: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns ``[N]``: the value of each pair (``values [P]``) at both of its sequences, so that the mean over sequences is
    the mean over pairs."""
    return values.new_zeros(num_sequences(batch)).index_copy(0, better, values).index_copy(0, worse, values)


def mismatched(batch: TensorDict) -> TensorDict | None:
    """Returns a batch that joins each row's prompt to the completion of another row; None if all prompts are equal.

    The prompt is everything before the first trained token. The completion is that of the nearest earlier row with another
    prompt; the search wraps around at the start of the batch.
    """
    rows = unpack(batch)
    starts = [int(row["loss_mask"].to(torch.int8).argmax()) for row in rows]
    prompts = [tuple(row["input_ids"][:start].tolist()) for row, start in zip(rows, starts, strict=True)]
    joined = []
    for i, prompt in enumerate(prompts):
        other = next((j % len(rows) for j in range(i - 1, i - len(rows), -1) if prompts[j % len(rows)] != prompt), None)
        if other is not None:
            joined.append(
                {
                    name: torch.cat([rows[i][name][: starts[i]], rows[other][name][starts[other] :]])
                    for name in ("input_ids", "loss_mask")
                }
                | {"temperature": rows[i]["temperature"]}
            )
    return pack(joined) if joined else None


class LanguageModel:
    """An engine that is trained on the mean negative log-likelihood of the batch's trained tokens."""

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @update_stage(
        reads=("input_ids", "loss_mask"),
        may_read=("temperature",),
    )
    def train_lm(self, batch: TensorDict) -> dict[str, float]:
        """Takes one optimizer step on the mean negative log-likelihood.

        Returns ``loss`` (nats per token), ``perplexity``, ``grad_norm``, ``lr`` …

        Raises:
            BatchError: the batch has no trained token.
        """
        return _with_perplexity(self.engine.train_batch(_weighted(batch), _loss))

    @stage(reads=("input_ids", "loss_mask"), may_read=("temperature",), reads_state=("weights",))
    def evaluate_lm(self, batch: TensorDict) -> dict[str, float]:
        """Returns ``loss`` (nats per token) and ``perplexity`` of the batch; takes no optimizer step."""
        return _with_perplexity(self.engine.eval_batch(_weighted(batch), _loss))


def _weighted(batch: TensorDict) -> TensorDict:
    mask = trained_tokens(batch)
    if not mask.any():
        raise BatchError("no token of the batch is trained on: loss_mask is false wherever a token is predicted")
    return with_fields(batch, loss_weights=token_mean(mask))


def _loss(outputs: Outputs, view: TensorDict) -> Losses:
    return negative_log_likelihood(outputs.logprobs, trained_tokens(view)), {}


def _with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Adds ``perplexity``, exp(loss); infinity if a float cannot represent it."""
    loss = metrics["loss"]
    return metrics | {"perplexity": math.exp(loss) if loss < 700 else math.inf}


class PreferenceLearner:
    """An engine and a preference loss: call `compute_reference`, `compute_baseline`, `train_preference`, in this order.

    In a batch of pairs, the two sequences of a pair have the same ``unit_id``, and one of them is ``chosen``. In a batch of
    single completions, the desirable ones are ``chosen``. The first two stages return the batch unchanged if the loss does
    not need their fields, so a loop can always call all three.
    """

    def __init__(self, engine: TrainEngine, loss: Component, *, reference: Reference | None = None):
        """``loss``: a registered name with its knobs, or ``my_file.py:function``. ``reference``: the frozen policy, for
        losses that compare with a reference.

        Raises:
            ConfigError: the loss is unknown, or needs a reference and none is passed.
        """
        self.engine, self.reference = engine, reference
        self.loss = choose(PREFERENCE_LOSSES, loss, "loss")
        self.is_paired = self.loss.part.is_paired
        self.needs_reference = self.loss.part.needs_reference
        self.needs_baseline = self.loss.part.needs_baseline
        self._warned = False
        if self.needs_reference and reference is None:
            raise ConfigError(
                f"loss={loss.name} compares with a reference policy, and there is none; give "
                "PreferenceLearner(…, reference=Reference(engine)), or choose simpo or orpo"
            )

    @stage(
        "reference",
        reads=FORWARD,
        may_add=("reference_logprobs",),
        reads_state=("weights",),
    )
    def compute_reference(self, batch: TensorDict) -> TensorDict:
        """Adds ``reference_logprobs [T]`` if the loss needs them."""
        return self._reference.compute_logprobs(batch) if self.needs_reference else batch

    @stage("baseline", reads=FORWARD, may_add=("baseline",), reads_state=("weights",))
    def compute_baseline(self, batch: TensorDict) -> TensorDict:
        """Adds ``baseline [N]`` if the loss needs it: KTO's z under the current weights, computed from prompts with other
        rows' completions."""
        if not self.needs_baseline:
            return batch
        others = mismatched(batch)
        z = torch.zeros(())
        if others is None:
            self._warn_once_of_a_single_prompt()
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
        """Takes one optimizer step on the mean loss over pairs (or completions).

        Returns ``loss``, ``margin``, ``accuracy``, ``score/chosen``, ``score/rejected``, ``grad_norm``, ``lr`` …

        Raises:
            BatchError: an earlier stage was left out, the sequences are not pairs, or a sequence has no trained token.
        """
        return _derived(self.engine.train_batch(self._weighted(batch), self._objective))

    @stage(
        reads=("input_ids", "loss_mask", "chosen"),
        may_read=("temperature", "unit_id", "reference_logprobs", "baseline"),
        reads_state=("weights",),
    )
    def evaluate_preference(self, batch: TensorDict) -> dict[str, float]:
        """Returns the loss and metrics of `train_preference`; takes no optimizer step."""
        return _derived(self.engine.eval_batch(self._weighted(batch), self._objective))

    def _warn_once_of_a_single_prompt(self) -> None:
        if not self._warned:
            log.warning(
                "loss=%s: all rows of a batch have the same prompt, so the baseline, which needs completions of other "
                "prompts, is 0 for this batch; mix the rows (train_dataset.shuffle=true) or raise batch_size",
                self.loss.name,
            )
        self._warned = True

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
        """Returns losses and metrics, ``[N]`` each."""
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
        of_pairs = {
            "margin": chosen - rejected,
            "accuracy": (chosen > rejected).float(),
            "score/chosen": chosen,
            "score/rejected": rejected,
        }
        metrics = {name: on_both(view, better, worse, value) for name, value in of_pairs.items()}
        return on_sequences(view, better, losses), metrics

    def _called(self, **tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Calls the loss; returns losses and two scores, each as long as ``tensors``."""
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
    """Converts the scores of each label from a mean over all sequences to the mean over the label's sequences. Adds their
    difference as ``margin``. Paired metrics stay as they are."""
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


class RewardModel:
    """An engine with a scalar head (``SpreadEngine(…, head="scalar")``).

    The score of a completion is the head's output after the last token of its sequence, as in transformers' sequence
    classifiers. The score of a step is the output after the step's last token.
    """

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @update_stage(
        reads=("input_ids", "loss_mask", "chosen", "unit_id", "margin"),
    )
    def train_pairs(self, batch: TensorDict) -> dict[str, float]:
        """Takes one optimizer step on the mean of −log σ(r_chosen − r_rejected − margin) over pairs.

        Returns ``loss``, ``margin`` (mean difference of scores), ``accuracy`` (pairs ranked right), ``score/chosen``,
        ``score/rejected``, ``grad_norm`` …

        Raises:
            BatchError: the sequences are not pairs.
        """
        return self.engine.train_batch(_weighted_pairs(batch), _pair_loss)

    @stage(reads=("input_ids", "loss_mask", "chosen", "unit_id", "margin"), reads_state=("weights",))
    def evaluate_pairs(self, batch: TensorDict) -> dict[str, float]:
        """Returns the loss and metrics of `train_pairs`; takes no optimizer step."""
        return self.engine.eval_batch(_weighted_pairs(batch), _pair_loss)

    @update_stage(
        reads=("input_ids", "loss_mask", "chosen", "safe", "unit_id"),
    )
    def train_safety(self, batch: TensorDict) -> dict[str, float]:
        """Takes one optimizer step on the mean of `safety_cost` over pairs whose ``chosen`` side is the safer one.

        Returns the metrics of `train_pairs`. Scores are costs; a pair counts as right if the safer side's cost is lower.
        Also returns ``accuracy/safety``: the share of completions whose cost has the right sign: above 0 if they are unsafe,
        else not.

        Raises:
            BatchError: the sequences are not pairs.
        """
        return self.engine.train_batch(_weighted_pairs(batch), _safety_loss)

    @stage(reads=("input_ids", "loss_mask", "chosen", "safe", "unit_id"), reads_state=("weights",))
    def evaluate_safety(self, batch: TensorDict) -> dict[str, float]:
        """Returns the loss and metrics of `train_safety`; takes no optimizer step."""
        return self.engine.eval_batch(_weighted_pairs(batch), _safety_loss)

    @update_stage(
        reads=("input_ids", "loss_mask", "step_end", "step_right"),
    )
    def train_steps(self, batch: TensorDict) -> dict[str, float]:
        """Takes one optimizer step on the mean cross-entropy over judged steps of reasoning.

        Returns ``loss``, ``accuracy`` (share of these steps that are judged right), ``grad_norm``, ``lr`` …

        Raises:
            BatchError: the batch has no judged step.
        """
        return _step_metrics(self.engine.train_batch(_weighted_steps(batch), _step_loss))

    @stage(reads=("input_ids", "loss_mask", "step_end", "step_right"), reads_state=("weights",))
    def evaluate_steps(self, batch: TensorDict) -> dict[str, float]:
        """Returns the loss and metrics of `train_steps`; takes no optimizer step."""
        return _step_metrics(self.engine.eval_batch(_weighted_steps(batch), _step_loss))

    def score(self, batch: TensorDict) -> torch.Tensor:
        """Returns the score after the last token of each sequence, ``[N]``."""
        scores = self.engine.forward(batch).scores
        assert scores is not None, "the engine has no scalar head; build it with head='scalar'"
        return scores[batch["cu_seqlens"][1:] - 1]


def _weighted_pairs(batch: TensorDict) -> TensorDict:
    better, _ = pairs_of(batch)
    return with_fields(batch, loss_weights=batch["chosen"].float() / len(better))


def _pair_loss(outputs: Outputs, view: TensorDict) -> Losses:
    better, worse = pairs_of(view)
    scores = _last_scores(outputs, view)
    losses = bradley_terry(scores[better], scores[worse], view["margin"][better])
    return on_sequences(view, better, losses), _ranked(view, scores, better, worse)


def _safety_loss(outputs: Outputs, view: TensorDict) -> Losses:
    safer, other = pairs_of(view)
    costs, safe = _last_scores(outputs, view), view["safe"]
    losses = safety_cost(costs[safer], costs[other], safe[safer], safe[other])
    ranked, right = _ranked(view, -costs, safer, other), (costs.detach() > 0) != safe
    costly = {name: -ranked[name] for name in ("score/chosen", "score/rejected")}
    return on_sequences(view, safer, losses), ranked | costly | {"accuracy/safety": right.float()}


def _last_scores(outputs: Outputs, view: TensorDict) -> torch.Tensor:
    """Returns the score after the last token of each sequence, ``[N]``."""
    assert outputs.scores is not None
    return outputs.scores[view["cu_seqlens"][1:] - 1]


def _ranked(view: TensorDict, scores: torch.Tensor, better: torch.Tensor, worse: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the metrics of pairs of scores, ``[N]`` each."""
    chosen, rejected = scores[better].detach(), scores[worse].detach()
    metrics = {
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).float(),
        "score/chosen": chosen,
        "score/rejected": rejected,
    }
    return {name: on_both(view, better, worse, values) for name, values in metrics.items()}


def _weighted_steps(batch: TensorDict) -> TensorDict:
    if not bool(batch["step_end"].any()):
        raise BatchError("the batch has no judged step: step_end is false everywhere")
    return with_fields(batch, loss_weights=token_mean(batch["step_end"]))


def _step_loss(outputs: Outputs, view: TensorDict) -> Losses:
    assert outputs.scores is not None
    ends, right = view["step_end"], view["step_right"]
    correct = ((outputs.scores.detach() > 0) == right).float() * ends
    return step_cross_entropy(outputs.scores, right, ends), {"accuracy": correct, "steps": ends.float()}


def _step_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Converts the accuracy, a mean over tokens, to the mean over steps."""
    steps = metrics.pop("steps")
    return metrics | {"accuracy": metrics["accuracy"] / steps}
