"""A reward model: a backbone with a scalar head that learns to score completions."""

from __future__ import annotations

from tandem.algorithms.aggregation import token_mean
from tandem.algorithms.reward_model import bradley_terry, safety_cost, step_cross_entropy
from tandem.api.engines import Outputs, TrainEngine
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.stage import stage, update_stage
from tandem.roles.pairs import on_both, on_sequences, pairs_of
from tandem.roles.samples import with_fields

Losses = tuple["torch.Tensor", dict[str, "torch.Tensor"]]


class RewardModel:
    """An engine with a scalar head (``build_train_engine(…, head="scalar")``).

    The score of a completion is read after its sequence's last token, as transformers' sequence classifiers do; the score of
    a step after the step's last token.
    """

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @update_stage(
        reads=("input_ids", "loss_mask", "chosen", "unit_id", "margin"),
    )
    def train_pairs(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer step on −log σ(r_chosen − r_rejected − margin), the mean over pairs.

        Returns ``loss``, ``margin`` (mean difference of scores), ``accuracy`` (pairs ranked right), ``score/chosen``,
        ``score/rejected``, ``grad_norm`` …

        Raises:
            BatchError: sequences that are no pairs.
        """
        return self.engine.train_batch(_weighted_pairs(batch), _pair_loss)

    @stage(reads=("input_ids", "loss_mask", "chosen", "unit_id", "margin"), reads_state=("weights",))
    def evaluate_pairs(self, batch: TensorDict) -> dict[str, float]:
        """The same without a step."""
        return self.engine.eval_batch(_weighted_pairs(batch), _pair_loss)

    @update_stage(
        reads=("input_ids", "loss_mask", "chosen", "safe", "unit_id"),
    )
    def train_safety(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer step on `safety_cost`, the mean over pairs whose ``chosen`` side is the safer one.

        Returns what `train_pairs` returns, with ``margin`` and ``accuracy`` for costs, of which the safer side should have
        the lower one; and ``accuracy/safety``: completions whose cost is above 0 if, and only if, they are unsafe.

        Raises:
            BatchError: sequences that are no pairs.
        """
        return self.engine.train_batch(_weighted_pairs(batch), _safety_loss)

    @stage(reads=("input_ids", "loss_mask", "chosen", "safe", "unit_id"), reads_state=("weights",))
    def evaluate_safety(self, batch: TensorDict) -> dict[str, float]:
        """The same without a step."""
        return self.engine.eval_batch(_weighted_pairs(batch), _safety_loss)

    @update_stage(
        reads=("input_ids", "loss_mask", "step_end", "step_right"),
    )
    def train_steps(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer step on the cross-entropy of judged steps, every step the same; ``accuracy`` is over steps.

        Raises:
            BatchError: the batch has no judged step.
        """
        return _step_metrics(self.engine.train_batch(_weighted_steps(batch), _step_loss))

    @stage(reads=("input_ids", "loss_mask", "step_end", "step_right"), reads_state=("weights",))
    def evaluate_steps(self, batch: TensorDict) -> dict[str, float]:
        """The same without a step."""
        return _step_metrics(self.engine.eval_batch(_weighted_steps(batch), _step_loss))

    def score(self, batch: TensorDict) -> torch.Tensor:
        """The score after each sequence's last token, ``[N]``."""
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
    """``[N]``."""
    assert outputs.scores is not None
    return outputs.scores[view["cu_seqlens"][1:] - 1]


def _ranked(view: TensorDict, scores: torch.Tensor, better: torch.Tensor, worse: torch.Tensor) -> dict[str, torch.Tensor]:
    """Metrics of pairs of scores, ``[N]`` each."""
    chosen, rejected = scores[better].detach(), scores[worse].detach()
    found = {
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).float(),
        "score/chosen": chosen,
        "score/rejected": rejected,
    }
    return {name: on_both(view, better, worse, values) for name, values in found.items()}


def _weighted_steps(batch: TensorDict) -> TensorDict:
    if not bool(batch["step_end"].any()):
        raise BatchError("the batch has no judged step: step_end is false everywhere")
    return with_fields(batch, loss_weights=token_mean(batch["step_end"]))


def _step_loss(outputs: Outputs, view: TensorDict) -> Losses:
    assert outputs.scores is not None
    ends, right = view["step_end"], view["step_right"]
    found = ((outputs.scores.detach() > 0) == right).float() * ends
    return step_cross_entropy(outputs.scores, right, ends), {"accuracy": found, "steps": ends.float()}


def _step_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Means over tokens → the mean over steps."""
    steps = metrics.pop("steps")
    return metrics | {"accuracy": metrics["accuracy"] / steps}
