"""Metrics of a step from those of its optimizer steps, by hand."""

import pytest

from tandem.roles.batch_metrics import step_metrics


def one(tokens, kept, **metrics):
    return {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "skipped": 0.0, "tokens": tokens, "kept": kept} | metrics


def test_means_are_over_the_tokens_that_carried_weight():
    """An engine averages over all tokens: 10 of which half carried weight, 30 of which a tenth did: 5 + 3."""
    found = step_metrics([one(10.0, 0.5, entropy=0.4), one(30.0, 0.1, entropy=0.1)])
    assert found["entropy"] == pytest.approx((10 * 0.4 + 30 * 0.1) / 8)
    assert not {"kept", "tokens"} & set(found)


def test_a_metric_that_only_some_steps_have_is_of_those_and_maxima_stay_maxima():
    found = step_metrics(
        [one(10.0, 1.0, entropy=0.4), {**one(10.0, 1.0), "ratio/max": 3.0}, {**one(5.0, 1.0), "ratio/max": 7.0}]
    )
    assert found["entropy"] == pytest.approx(10 * 0.4 / 25)
    assert found["ratio/max"] == 7.0


def test_loss_and_gradient_are_of_steps_that_were_taken_and_the_rate_is_the_last():
    steps = [one(1.0, 1.0) | {"loss": 3.0}, one(1.0, 1.0) | {"loss": 50.0, "skipped": 1.0}, one(1.0, 1.0) | {"lr": 0.05}]
    assert step_metrics(steps) == {"loss": 2.0, "grad_norm": 2.0, "lr": 0.05, "skipped": 1.0}
    assert step_metrics(steps[1:2])["loss"] == 50.0


def test_the_gap_is_of_fresh_tokens_and_the_effective_sample_size_of_the_weights():
    found = step_metrics([one(8.0, 0.5, **{"gap/mean": 0.1, "gap/max": 0.9, "gap/fresh": 0.25})])
    assert (found["gap/mean"], found["gap/max"]) == (pytest.approx(0.1 / 0.25), 0.9)
    stale = step_metrics([one(8.0, 0.5, **{"gap/mean": 0.0, "gap/max": 0.0, "gap/fresh": 0.0})])
    assert not [name for name in stale if name.startswith("gap/")]
    weighted = step_metrics([one(4.0, 1.0, **{"correction/mean": 1.25, "correction/square": 1.75})])
    assert weighted["correction/ess"] == pytest.approx(1.25**2 / 1.75)
    assert "correction/square" not in weighted


def test_without_a_token_that_carried_weight_there_are_no_means():
    assert "entropy" not in step_metrics([one(10.0, 0.0, entropy=0.4)])
