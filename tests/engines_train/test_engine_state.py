"""An engine goes on from another one's state as that would have, on as many ranks as there are now."""

import pytest
import torch

from tandem.api.team import Team
from tandem.config.errors import ConfigError
from tandem.state.tree import read_tree, write_tree
from tests.engines_train.steps import distance, engine_on, random_batch, weighted_nll, weights_of
from tests.ranks import alone_and_on_two, on_two
from tests.tiny import tiny_model_folder

OPTIONS = {"schedule": "linear", "warmup_steps": 2, "max_grad_norm": 0.05}
BATCH = (3, 14, 2, 5, 9, 9, 4)


def trained(folder, ranks, steps, **options):
    engine = engine_on(folder, ranks=ranks, **OPTIONS, **options)
    for seed in range(steps):
        engine.train_batch(random_batch(BATCH, seed=seed), weighted_nll)
    return engine


def gone_on(folder, state, ranks, **options):
    """A new engine with that state, and what it has learnt one step later."""
    engine = engine_on(folder, ranks=ranks, **OPTIONS, **options)
    engine.load_state_dict(read_tree(state))
    loaded = weights_of(engine)
    metrics = engine.train_batch(random_batch(BATCH, seed=7), weighted_nll)
    return {"loaded": loaded, "weights": weights_of(engine), "metrics": metrics}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "both"])
def test_the_next_step_is_the_same_to_the_bit(tmp_path, dtype, head):
    folder = tiny_model_folder(tmp_path, "smollm")
    engine = trained(folder, 1, 2, dtype=dtype, head=head)
    write_tree(Team(), tmp_path / "state", engine.state_dict())
    before = weights_of(engine)
    metrics = engine.train_batch(random_batch(BATCH, seed=7), weighted_nll)
    found = gone_on(folder, tmp_path / "state", 1, dtype=dtype, head=head)

    assert found["metrics"] == metrics and distance(found["loaded"], before) == 0
    assert distance(found["weights"], weights_of(engine)) == 0 < distance(before, weights_of(engine))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_takes_the_place_of_what_an_engine_had_and_can_be_loaded_again(tmp_path, steps):
    folder = tiny_model_folder(tmp_path, "smollm")
    engine = trained(folder, 1, steps)
    write_tree(Team(), tmp_path / "state", engine.state_dict())
    state, last = read_tree(tmp_path / "state"), random_batch(BATCH, seed=7)
    metrics = engine.train_batch(last, weighted_nll)
    for _ in range(2):
        other = trained(folder, 1, 1)
        other.load_state_dict(state)
        assert other.train_batch(last, weighted_nll) == metrics
        assert distance(weights_of(other), weights_of(engine)) == 0


def test_another_models_state_is_refused_and_nothing_is_copied(tmp_path):
    engine = engine_on(tiny_model_folder(tmp_path, "llama"))
    before = weights_of(engine)
    other = engine_on(tiny_model_folder(tmp_path, "qwen3")).state_dict()
    with pytest.raises(ConfigError, match=r"of another model: 'model\..*' is .* there and .* here"):
        engine.load_state_dict(other)
    assert distance(before, weights_of(engine)) == 0


def save_on(folder, out, ranks):
    engine = trained(folder, ranks, 2)
    write_tree(Team(), out / f"state-{ranks}", engine.state_dict())
    before = weights_of(engine)
    engine.train_batch(random_batch(BATCH, seed=7), weighted_nll)
    return {"before": before, "weights": weights_of(engine)}


def load_on(folder, out, ranks):
    found = {str(source): gone_on(folder, out / f"state-{source}", ranks) for source in (1, 2)}
    engine = engine_on(folder, ranks=ranks, **OPTIONS)
    engine.load_state_dict(read_tree(out / "state-2"))
    write_tree(Team(), out / f"again-{ranks}", engine.state_dict())
    return found


def leaves(value, path=""):
    if isinstance(value, dict):
        return {p: leaf for key, item in value.items() for p, leaf in leaves(item, f"{path}/{key}").items()}
    return {path: value}


@pytest.mark.slow
@pytest.mark.invariant
def test_a_state_of_two_ranks_is_read_by_one_and_by_two_again(tmp_path):
    folder = tiny_model_folder(tmp_path, "smollm")
    (tmp_path / "save").mkdir(), (tmp_path / "load").mkdir()
    saved = on_two(save_on, folder, tmp_path, out=tmp_path / "save")
    save_on(folder, tmp_path, ranks=1)
    one, two = alone_and_on_two(load_on, folder, tmp_path, out=tmp_path / "load")

    whole = leaves(read_tree(tmp_path / "state-2"))
    for ranks in (1, 2):  # 2 → 1 and 2 → 2: masters, moments and counters as they were saved
        again = leaves(read_tree(tmp_path / f"again-{ranks}"))
        assert again.keys() == whole.keys() == leaves(read_tree(tmp_path / "state-1")).keys()
        for name, value in whole.items():
            assert torch.equal(again[name], value) if isinstance(value, torch.Tensor) else again[name] == value, name
    for found in two:
        assert distance(found["2"]["loaded"], saved[0]["before"]) == 0
        assert distance(found["2"]["weights"], saved[0]["weights"]) == 0  # to the bit on as many ranks as before
    moved = distance(saved[0]["before"], saved[0]["weights"])
    assert distance(one["2"]["weights"], saved[0]["weights"]) <= 1e-3 * moved
    assert distance(two[0]["1"]["weights"], one["1"]["weights"]) <= 1e-3 * moved
