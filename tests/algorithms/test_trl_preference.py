"""The same numbers as TRL, from fixtures that scripts/trl_preference_fixtures.py made with TRL itself; float32."""

import json
from pathlib import Path

import pytest
import torch

from tandem.algorithms.losses import bradley_terry
from tandem.algorithms.preference import PREFERENCE_LOSSES, kto, mismatch_baseline, orpo

FOUND = json.loads((Path(__file__).parent / "trl_preference.json").read_text())


def agrees(loss, inputs, found):
    """Loss and gradient, to 1e-6."""
    assert loss.item() == pytest.approx(found["loss"], abs=1e-6, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, inputs)
    assert torch.allclose(gradient, torch.tensor(found["gradient"]).view_as(gradient), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo"])
def test_paired_losses_and_gradients_are_those_of_trl(name):
    given = FOUND["pairs"]
    policy = torch.tensor(given["policy"]).requires_grad_()
    reference, length = torch.tensor(given["reference"]), torch.tensor(given["lengths"]).float()
    tensors = {
        "chosen": policy[:4],
        "rejected": policy[4:],
        "chosen_reference": reference[:4],
        "rejected_reference": reference[4:],
        "chosen_length": length[:4],
        "rejected_length": length[4:],
    }
    function = PREFERENCE_LOSSES.get(name)
    losses, _, _ = function(**{key: tensors[key] for key in PREFERENCE_LOSSES.inputs_of(function)})
    agrees(losses.mean(), policy, given[name])


def test_kto_is_that_of_trl():
    given = FOUND["labelled"]
    policy = torch.tensor(given["policy"]).requires_grad_()
    z = mismatch_baseline(torch.tensor(given["other"]), torch.tensor(given["other_reference"]))
    assert float(z) > 0
    weights = dict(zip(("desirable_weight", "undesirable_weight"), given["weights"], strict=True))
    losses, _, _ = kto(policy, torch.tensor(given["reference"]), torch.tensor(given["label"]), z, **weights)
    agrees(losses.mean(), policy, given)


def test_orpo_is_that_of_trl():
    given = FOUND["odds"]
    policy, length = torch.tensor(given["policy"]), torch.tensor(given["lengths"]).float()
    losses, _, _ = orpo(policy[:3], policy[3:], length[:3], length[3:])
    assert losses.mean().item() == pytest.approx(given["loss"], abs=1e-6)


def test_the_reward_models_loss_is_that_of_trl():
    given = FOUND["scores"]
    scores = torch.tensor(given["scores"]).requires_grad_()
    agrees(bradley_terry(scores[:3], scores[3:], torch.tensor(given["margin"])).mean(), scores, given)
