"""The same step under every layout: sharded, replicated, tensor parallel, context parallel, and together."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.state.tree import read_tree
from tests.engines_train.layouts import CASES, MODELS, all_steps
from tests.engines_train.steps import distance
from tests.ranks import alone_and_on
from tests.tiny import tiny_model_folder

SLOW = [pytest.mark.slow, pytest.mark.invariant]
ZERO = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed, an extra, is not installed")
PARAMS = [
    "2",
    pytest.param("2 more", marks=SLOW),
    pytest.param("1 zero", marks=[ZERO, *SLOW]),
    pytest.param("2 zero", marks=[ZERO, *SLOW]),
    pytest.param("4", marks=SLOW),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models that all groups of ranks train, and beside them what is saved of it."""
    out = tmp_path_factory.mktemp("layouts")
    models = {
        name: tiny_model_folder(out, name, **{"num_key_value_heads": 4} | overrides) for name, overrides in MODELS.items()
    }
    return models | {"deep": tiny_model_folder(out, "llama", num_hidden_layers=8)}


@pytest.fixture(scope="module", params=PARAMS)
def runs(request, folders, tmp_path_factory):
    """(cases, what one process found, what each rank found, where the models were saved)."""
    out, cases = folders["deep"].parent, CASES[request.param]
    meeting = tmp_path_factory.mktemp("ranks")
    return cases, *alone_and_on(int(request.param[0]), all_steps, folders, cases, out, out=meeting), out


def compared(runs):
    """(layout, model, what one process found, what a rank found)."""
    cases, alone, ranks, _ = runs
    for layout, name in cases:
        for found in ranks:
            yield layout, name, alone[f"d1 {name}"], found[f"{layout} {name}"]


def test_gradients_are_those_of_one_process(runs):
    for layout, name, one, found in compared(runs):
        assert found["gradients"].keys() == one["gradients"].keys()
        for key, gradient in one["gradients"].items():
            assert gradient.norm() > 0, (layout, name, key)
            apart = (found["gradients"][key] - gradient).norm()
            assert apart <= 1e-3 * gradient.norm(), (layout, name, key, float(apart / gradient.norm()))


def test_three_steps_move_the_weights_as_those_of_one_process(runs):
    for layout, name, one, found in compared(runs):
        moved = distance(one["before"], one["after"])
        assert moved > 0
        assert distance(one["before"], found["before"]) == 0, (layout, name)
        assert distance(one["after"], found["after"]) <= 1e-3 * moved, (layout, name)


def test_metrics_are_those_of_one_process(runs):
    for layout, name, one, found in compared(runs):
        for ours, theirs in zip(one["metrics"], found["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-3), (layout, name)
        assert found["evaluated"] == pytest.approx(one["evaluated"], rel=1e-3), (layout, name)


def test_every_rank_gets_the_outputs_of_the_whole_batch(runs):
    for layout, name, one, found in compared(runs):
        assert found["outputs"].keys() == one["outputs"].keys()
        for key, values in one["outputs"].items():
            torch.testing.assert_close(found["outputs"][key], values, atol=1e-3, rtol=1e-3, msg=f"{layout} {name} {key}")


def test_what_is_saved_is_a_whole_model_and_can_be_loaded(runs):
    cases, _, ranks, out = runs
    for layout, name in cases:
        saved = dict(AutoModelForCausalLM.from_pretrained(out / f"{layout}-tiny-{name}-0").named_parameters())
        for found in ranks:
            assert distance(found[f"{layout} {name}"]["after"], saved) == 0, (layout, name)
            assert distance(found[f"{layout} {name}"]["after"], found[f"{layout} {name}"]["loaded"]) == 0, (layout, name)


def test_other_weights_are_taken_to_the_bit_and_its_own_come_back(runs):
    for layout, name, one, found in compared(runs):
        assert distance(found["others"], {key: 0.9 * value for key, value in one["before"].items()}) == 0, (layout, name)
        assert distance(found["back"], found["loaded"]) == 0, (layout, name)


def test_a_state_goes_on_to_the_bit_and_is_that_of_one_process(runs):
    cases, _, ranks, out = runs
    for layout, name in cases:
        states = [read_tree(out / f"{at}-tiny-{name}-0-state") for at in ("d1", layout)]
        masters, firsts = (
            [{key: value[what] if what else value for key, value in part(state).items()} for state in states]
            for what, part in (("", lambda s: s["masters"]), ("exp_avg", lambda s: s["optimizer"]["moments"]))
        )
        for one, found in (masters, firsts):
            assert {key: value.shape for key, value in one.items()} == {key: value.shape for key, value in found.items()}
        assert distance(*firsts) <= 1e-3 * distance(firsts[0], {key: 0 * value for key, value in firsts[0].items()})
        for rank in ranks:
            kept, resumed = (rank[f"{layout} {name}"][key] for key in ("next", "resumed"))
            assert kept["metrics"] == resumed["metrics"] and distance(kept["weights"], resumed["weights"]) == 0


def test_deepspeed_and_fsdp_go_on_from_each_others_state(runs):
    for layout, name, _, found in compared(runs):
        for key in ("there", "and back") if "zero" in layout else ():
            apart, moved = found[key]
            assert moved > 0
            assert apart <= 1e-3 * moved, (layout, name, key, apart / moved)


def test_a_step_that_deepspeed_does_not_take_leaves_no_trace(runs):
    for layout, name, _, found in compared(runs):
        if "zero" in layout:
            assert found["disturbed"] == (1.0, 0.0, 0.0), (layout, name)  # and what follows is as if it had not been


def test_bfloat16_agrees_within_its_precision(runs):
    for layout, name, one, found in compared(runs):
        if "zero1" in layout:
            continue
        for key in ("loss", "grad_norm"):
            assert found["bfloat16"][key] == pytest.approx(one["bfloat16"][key], rel=0.03), (layout, name, key)


def test_no_rank_ever_has_the_whole_model(runs):
    *_, ranks, out = runs
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(out / "tiny-llama-0").parameters())
    for found in ranks if len(ranks) == 2 else ():
        for layout, most in found["held"].items():
            moment = 0 if layout == "d1t2" else 304 * 32  # all of embedding and head
            assert 0.5 * whole < most <= 0.51 * whole + moment, layout  # norms are whole under t


def test_a_head_that_is_cut_by_tokens_gives_what_the_whole_one_gives(runs):
    _, alone, ranks, _ = runs
    for found in ranks:
        for one, cut in zip(alone["vocabulary"], found["vocabulary"], strict=True):
            for name, value in one.items():
                torch.testing.assert_close(cut[name], value, atol=2e-5, rtol=1e-4, msg=name)
