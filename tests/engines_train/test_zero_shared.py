"""DeepSpeed in float32: masters in the memory of the parameters take the steps of masters that have their own."""

import logging
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tandem.api.team import Team
from tandem.engines.train.zero import share
from tandem.state.tree import read_tree, write_tree
from tests.engines_train.layouts import batch_of_prompts, engine_on
from tests.engines_train.steps import weighted_nll, weights_of
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed, an extra, is not installed"),
]
THREE = "zero3:d2"


def with_own_memory(engine):
    """Masters as DeepSpeed makes them."""
    holder = engine.holder
    for piece in holder.local_masters():
        piece.data = piece.data.clone()
    if holder.stage < 3:
        holder.zero._link_all_hp_params()
    holder.shared = False
    return engine


def storages(tensors):
    """Address → bytes of the memory behind them."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}


def counted(engine):
    """Bytes of parameters, masters and moments of this process."""
    holder = engine.holder
    found = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.model.parameters()]
    found += [*holder.masters.values()] if engine.ranks.layout.zero is None else holder.local_masters()
    found += [x for state in engine.optimizer.adamw.state.values() for x in state.values() if x.dim()]
    return sum(storages(found).values())


def together(engine):
    """Whether all masters are in the memory of parameters."""
    parameters = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.model.parameters()]
    return storages(engine.holder.local_masters()).keys() <= storages(parameters).keys()


def moved_elsewhere(engine):
    """Parameters go to host memory and come back to another place, as they do on a GPU."""
    holder, zero = engine.holder, engine.holder.zero
    holder.leave()
    for buffer in [zero.lp_param_buffer] if holder.stage == 3 else zero.bit16_groups_flat:
        buffer.data = buffer.data.clone()
    holder.come_back()
    return engine


def work(folder, layout, out, ranks):
    """What one process needs; or what two ranks found, name → (with shared memory, without)."""
    torch.set_num_threads(1)
    batch = batch_of_prompts()
    if ranks == 1:
        engine = engine_on(folder, "d1")
        engine.train_batch(batch, weighted_nll)
        return {"bytes": counted(engine), "numbers": sum(p.numel() for p in engine.model.parameters())}
    pair = [engine_on(folder, layout), with_own_memory(engine_on(folder, layout))]
    found = {"together": [together(engine) for engine in pair]}
    found["metrics"] = [[engine.train_batch(batch, weighted_nll) for _ in range(3)] for engine in pair]
    found["moved"] = [engine.moved() for engine in pair]
    found["weights"] = [weights_of(engine) for engine in pair]
    found["bytes"] = [counted(engine) for engine in pair]
    states = []
    for number, engine in enumerate(pair):
        write_tree(Team(), out / f"state-{number}", engine.state_dict())
        dist.barrier()
        states.append(read_tree(out / f"state-{number}"))
    found["moments"] = [state["optimizer"]["moments"] for state in states]
    found["masters"] = [state["masters"] for state in states]
    resumed = engine_on(folder, layout)
    resumed.load_state_dict(states[1])
    for engine in (moved_elsewhere(pair[0]), pair[1], resumed):
        engine.train_batch(batch, weighted_nll)
    found["next"] = [weights_of(engine) for engine in (*pair, resumed)]
    found["after"] = [together(pair[0]), together(resumed)]
    with pair[0].using((name, 0.5 * tensor) for name, tensor in found["weights"][0].items()):
        found["others"] = [weights_of(pair[0]), {name: 0.5 * tensor for name, tensor in found["weights"][0].items()}]
    found["back"] = [weights_of(pair[0]), found["next"][0]]
    return found | {"left": left_alone(pair[1])}


def left_alone(engine):
    """Of masters that have other numbers than the parameters: whether they share, what is logged, whether they stayed."""
    holder, heard = engine.holder, []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    log = logging.getLogger("tandem.train")
    log.addHandler(handler)
    piece = holder.local_masters()[0]
    with torch.no_grad():
        piece[0] += 1
    before = piece.data_ptr()
    shares = share(holder.zero, holder.stage, holder.rank, holder.local_masters())
    log.removeHandler(handler)
    return shares, heard, piece.data_ptr() == before


@pytest.fixture(scope="module", params=["zero1:d2", "zero2:d2", THREE])
def runs(request, tmp_path_factory):
    """(layout, what one process needs, what each rank found)."""
    out = tmp_path_factory.mktemp("shared")
    folder = tiny_model_folder(out, "qwen2")  # biases: two groups of masters
    return request.param, *alone_and_on_two(work, folder, request.param, out, out=out)


def test_steps_and_saved_files_are_to_the_bit_those_of_masters_with_their_own_memory(runs):
    for found in runs[2]:
        assert found["together"] == [True, False]
        shared, own = found["metrics"]
        assert shared == own and shared[0] != shared[2]
        for what in ("weights", "masters"):
            shared, own = found[what]
            assert shared.keys() == own.keys() and all(torch.equal(shared[name], own[name]) for name in own), what
        shared, own = found["moments"]
        assert all(torch.equal(shared[name][what], own[name][what]) for name in own for what in ("exp_avg", "exp_avg_sq"))


def test_it_is_known_how_far_a_step_moved_the_weights(runs):
    (shared, own), (other_rank, _) = (found["moved"] for found in runs[2])
    assert shared == own == other_rank and 0 < shared["actor/update_ratio"] < 0.1


def test_masters_share_again_after_parameters_moved_and_the_next_step_is_the_same(runs):
    for found in runs[2]:
        assert found["after"] == [True, True]
        shared, own, resumed = found["next"]
        assert any(not torch.equal(own[name], found["weights"][1][name]) for name in own)
        for name in own:
            assert torch.equal(shared[name], own[name]) and torch.equal(resumed[name], own[name]), name


def test_other_weights_are_lent_and_given_back(runs):
    for found in runs[2]:
        for what in ("others", "back"):
            one, other = found[what]
            assert all(torch.equal(one[name], other[name]) for name in other), what


def test_two_ranks_hold_what_the_stage_says_of_one_process(runs):
    layout, alone, ranks = runs
    assert alone["bytes"] == 12 * alone["numbers"]
    expected = (0.5, 4 / 6) if layout == THREE else (4 / 6, 5 / 6)  # with shared memory, without
    for found in ranks:
        ratios = [each / alone["bytes"] for each in found["bytes"]]
        assert ratios == pytest.approx(expected, rel=0.02)  # pieces are filled up
        assert layout != THREE or ratios[0] <= 0.6


def test_masters_that_differ_from_the_parameters_stay_and_one_line_says_so(runs):
    for found in runs[2]:
        shares, heard, stayed = found["left"]
        assert not shares and stayed and len(heard) == 1 and "masters and parameters have different values" in heard[0]
