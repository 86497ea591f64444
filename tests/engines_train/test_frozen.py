"""A model that nobody trains: the same numbers from a third of the memory."""

from dataclasses import replace

import pytest
import torch

from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tests.engines_train.steps import random_batch
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder


def parameter_bytes(engine):
    """Of all distinct tensors that hold weights."""
    held = [*engine.model.parameters(), *engine.holder.masters.values()]
    local = (p.to_local() if hasattr(p, "to_local") else p for p in held)
    return sum(p.untyped_storage().nbytes() for p in {p.data_ptr(): p for p in local}.values())


def scored(folder, batch, dtype, head, ranks):
    config = TrainEngineConfig(path=str(folder), dtype=dtype, backend=f"fsdp:d{ranks}")
    trained = SpreadEngine(config, 1, head=head)
    frozen = SpreadEngine(config, 1, head=head, trained=False)
    field = "scores" if head == "scalar" else "logprobs"
    return {
        "trained": getattr(trained.forward(batch), field),
        "frozen": getattr(frozen.forward(batch), field),
        "bytes": torch.tensor([parameter_bytes(trained), parameter_bytes(frozen)]),
    }


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 1 / 3)])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_a_frozen_engine_computes_what_a_trained_one_does_without_masters(tmp_path, dtype, share, head):
    found = scored(tiny_model_folder(tmp_path), random_batch([5, 9, 3]), dtype, head, 1)
    assert torch.equal(found["frozen"], found["trained"])
    trained, frozen = found["bytes"].tolist()
    assert frozen == pytest.approx(share * trained, rel=0.02)


def test_a_frozen_engine_on_two_ranks_computes_what_one_does(tmp_path):
    folder, batch = tiny_model_folder(tmp_path), random_batch([5, 9, 3])
    alone, on_two = alone_and_on_two(scored, folder, batch, "bfloat16", "lm", out=tmp_path)
    for found in on_two:
        assert torch.allclose(found["frozen"], alone["frozen"], atol=0.03) and torch.equal(found["frozen"], found["trained"])
        assert int(found["bytes"][1]) < int(found["bytes"][0])


def test_a_frozen_engine_refuses_to_be_trained(tmp_path):
    config = replace(TrainEngineConfig(), path=str(tiny_model_folder(tmp_path)))
    with pytest.raises(RuntimeError, match="built with trained=False"):
        SpreadEngine(config, 1, trained=False).train_batch(random_batch([4]), lambda outputs, view: (outputs.logprobs, {}))
