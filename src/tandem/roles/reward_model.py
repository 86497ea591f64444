"""A reward model: a backbone with a scalar head that learns to score completions."""

import torch
from tensordict import TensorDict

from tandem.algorithms.aggregation import token_mean
from tandem.algorithms.reward_model import bradley_terry, step_cross_entropy
from tandem.api.engines import Outputs, TrainEngine
from tandem.api.failures import BatchError
from tandem.api.stage import stage
from tandem.roles.pairs import on_both, on_sequences, pairs_of
from tandem.roles.samples import with_fields

Losses = tuple[torch.Tensor, dict[str, torch.Tensor]]


class RewardModel:
    """An engine with a scalar head (``build_train_engine(…, head="scalar")``).

    The score of a completion is read after its sequence's last token, as transformers' sequence classifiers do; the score of
    a step after the step's last token.
    """

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @stage(
        reads=("input_ids", "loss_mask", "chosen", "unit_id", "margin"),
        reads_state=("weights", "optimizer"),
        writes_state=("weights", "optimizer"),
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

    @stage(
        reads=("input_ids", "loss_mask", "step_end", "step_right"),
        reads_state=("weights", "optimizer"),
        writes_state=("weights", "optimizer"),
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
    assert outputs.scores is not None
    better, worse = pairs_of(view)
    scores = outputs.scores[view["cu_seqlens"][1:] - 1]  # [N]
    chosen, rejected = scores[better], scores[worse]
    losses = bradley_terry(chosen, rejected, view["margin"][better])
    found = {
        "margin": (chosen - rejected).detach(),
        "accuracy": (chosen > rejected).float(),
        "score/chosen": chosen.detach(),
        "score/rejected": rejected.detach(),
    }
    return on_sequences(view, better, losses), {name: on_both(view, better, worse, v) for name, v in found.items()}


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
