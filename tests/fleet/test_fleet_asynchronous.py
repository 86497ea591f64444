"""Asynchronous training over two served engines: no token too old, each prompt once, updates that interrupt or wait."""

from collections import Counter

import pytest

from tests.fleet.fleets import rows
from tests.fleet.training import engines, run
from tests.tiny import tiny_model_folder

STEPS, GROUPS = 12, 4

CASES = [
    pytest.param(1, False, id="eta1-interrupted", marks=pytest.mark.invariant),
    pytest.param(4, False, id="eta4-interrupted", marks=pytest.mark.invariant),
    pytest.param(4, True, id="eta4-finished", marks=pytest.mark.invariant),
    pytest.param(1, True, id="eta1-finished"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.parametrize(("eta", "finish"), CASES)
def test_no_token_is_older_than_eta_and_each_prompt_is_trained_once(model, tmp_path, eta, finish):
    summary, metrics, samples = run(
        model,
        tmp_path,
        "rollout.backend=tandem:d2",
        "async_training=true",
        f"rollout.max_head_offpolicyness={eta}",
        f"rollout.fleet.finish_before_update={str(finish).lower()}",
        "rollout.max_concurrent=5",
        "actor.optimizer.lr=0.001",  # answers stay long enough to meet an update
        "gconfig.max_new_tokens=96",
        f"total_train_steps={STEPS}",
    )
    last = metrics[-1]
    ages = [row["staleness/max"] for row in metrics]
    assert max(ages) <= eta and max(ages) >= 1  # it was asynchronous
    assert len(metrics) == STEPS and last["episodes/trained"] == STEPS * GROUPS
    assert not [name for name in last if name.startswith("episodes/dropped")]
    times = Counter(sample["group"] for sample in samples)
    assert len(times) == STEPS * GROUPS and set(times.values()) == {4}  # each with its four samples, in one step

    spans = [parts for sample in samples for parts in sample["versions"] if len(parts) > 1]
    assert bool(spans) != finish
    assert all(len({part["digest"] for part in parts}) == len(parts) for parts in spans)
    assert (last["fleet/healthy"], last["fleet/fenced"], last["fleet/moved"], last["fleet/interrupted"]) == (2, 0, 0, 0)
    assert len({row["server"] for row in rows(summary.folder / "fleet.jsonl")}) == 2
    assert not engines()
