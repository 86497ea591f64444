"""Training on a fleet is training: the same weights as on one engine, also through faults, and its ledger adds up."""

import pytest

from tests.fleet.fleets import rows
from tests.fleet.training import difference, engines, killer, run
from tests.tiny import tiny_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.invariant]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one_engine(model, tmp_path_factory):
    return run(model, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("backend", ["embedded:d2", "embedded:d1+tandem:d1", "tandem:d2"])
def test_a_fleet_of_two_trains_the_same_weights_as_one_engine(model, tmp_path, one_engine, backend):
    one, metrics, samples = one_engine
    two, its_metrics, its_samples = run(model, tmp_path, f"rollout.backend={backend}")

    texts = [[sample["completion"] for sample in run] for run in (samples, its_samples)]
    assert texts[0] == texts[1]
    assert difference(one, two) <= 1e-4
    assert [row["reward/mean"] for row in metrics] == [row["reward/mean"] for row in its_metrics]
    last = its_metrics[-1]
    assert (last["fleet/healthy"], last["fleet/servers"], last["fleet/moved"], last["fleet/fenced"]) == (2, 2, 0, 0)
    assert len({row["server"] for row in rows(two.folder / "fleet.jsonl")}) == 2
    assert not engines()


@pytest.mark.parametrize("eta", [1, 4])
def test_asynchronous_training_goes_on_while_a_server_is_killed_and_nothing_is_lost(model, tmp_path, eta):
    thread, killed = killer(tmp_path, 5)
    summary, metrics, _ = run(
        model,
        tmp_path,
        "rollout.backend=embedded:d2",
        "async_training=true",
        f"rollout.max_head_offpolicyness={eta}",
        "gconfig.max_new_tokens=96",
        "total_train_steps=30",
    )
    thread.join(60)
    assert len(killed) == 1
    table = rows(summary.folder / "fleet.jsonl")
    assert [row["from"] for row in table if row["to"] == "fenced"] != []
    assert metrics[-1]["episodes/trained"] == 30 * 4
    assert not [name for name in metrics[-1] if name.startswith("episodes/dropped")]
    assert all(row["staleness/max"] <= eta for row in metrics)
    assert not engines()
