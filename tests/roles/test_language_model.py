"""Supervised fine-tuning."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.api.batch import pack, unpack
from tandem.api.failures import BatchError
from tandem.roles.learners import LanguageModel
from tests.roles.batches import tiny_actor
from tests.tiny import tiny_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"))


def examples(*masks):
    generator = torch.Generator().manual_seed(0)
    return pack(
        [
            {"input_ids": torch.randint(3, 300, (len(mask),), generator=generator), "loss_mask": mask, "temperature": 1.0}
            for mask in masks
        ]
    )


def test_the_loss_is_the_mean_over_the_answers_tokens(folder):
    batch = examples([0, 0, 1, 1, 1], [0, 1], [0, 1, 0, 1])
    metrics = LanguageModel(tiny_actor(folder).engine).evaluate_lm(batch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = []
    with torch.no_grad():
        for row in unpack(batch):
            logprobs = model(row["input_ids"][None]).logits[0].log_softmax(-1)
            losses += [-float(logprobs[t - 1, row["input_ids"][t]]) for t in row["loss_mask"].nonzero().flatten()]
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))


def test_training_lowers_the_loss_and_evaluating_changes_nothing(folder):
    model, batch = LanguageModel(tiny_actor(folder).engine), examples([0, 1, 1, 1], [0, 0, 1])
    first = model.evaluate_lm(batch)
    assert model.evaluate_lm(batch) == first
    assert model.train_lm(batch)["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert model.evaluate_lm(batch)["loss"] < first["loss"]


def test_a_first_token_is_not_predicted_and_does_not_count(folder):
    model = LanguageModel(tiny_actor(folder).engine)
    with_first, without = examples([1, 1, 1], [1, 0, 1]), examples([0, 1, 1], [0, 0, 1])
    assert model.evaluate_lm(with_first)["loss"] == pytest.approx(model.evaluate_lm(without)["loss"], rel=1e-6)


def test_a_batch_without_a_trained_token_is_refused(folder):
    with pytest.raises(BatchError, match="no token of the batch is trained on"):
        LanguageModel(tiny_actor(folder).engine).train_lm(examples([1, 0], [0, 0]))
