"""A language model that learns from examples: supervised fine-tuning."""

from __future__ import annotations

import math

from tandem.algorithms.aggregation import token_mean
from tandem.algorithms.supervised import negative_log_likelihood
from tandem.api.engines import Outputs, TrainEngine
from tandem.api.failures import BatchError
from tandem.api.lazy_torch import TensorDict, torch
from tandem.api.stage import stage, update_stage
from tandem.roles.samples import trained_tokens, with_fields


class LanguageModel:
    """Every trained token of the batch counts the same."""

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    @update_stage(
        reads=("input_ids", "loss_mask"),
        may_read=("temperature",),
    )
    def train_lm(self, batch: TensorDict) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood; returns ``loss``, ``perplexity``, ``grad_norm``, ``lr`` …

        Raises:
            BatchError: no token is trained on.
        """
        return _with_perplexity(self.engine.train_batch(_weighted(batch), _loss))

    @stage(reads=("input_ids", "loss_mask"), may_read=("temperature",), reads_state=("weights",))
    def evaluate_lm(self, batch: TensorDict) -> dict[str, float]:
        """``loss`` (nats a token) and ``perplexity`` of the batch; nothing is trained."""
        return _with_perplexity(self.engine.eval_batch(_weighted(batch), _loss))


def _weighted(batch: TensorDict) -> TensorDict:
    mask = trained_tokens(batch)
    if not mask.any():
        raise BatchError("no token of the batch is trained on: loss_mask is false wherever a token is predicted")
    return with_fields(batch, loss_weights=token_mean(mask))


def _loss(outputs: Outputs, view: TensorDict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return negative_log_likelihood(outputs.logprobs, trained_tokens(view)), {}


def _with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """exp(loss), infinite where that does not fit a float."""
    loss = metrics["loss"]
    return metrics | {"perplexity": math.exp(loss) if loss < 700 else math.inf}
