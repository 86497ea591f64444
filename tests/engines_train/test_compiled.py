"""Compiled layers take the same step."""

import pytest
import torch

from tandem.config.train_engine import LoRAConfig
from tests.engines_train.layouts import batch_of_prompts, engine_on, loss_with_scores
from tests.engines_train.steps import distance, random_batch, weights_of
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]

LAYOUTS = {1: ("d1", "d1 adapted"), 2: ("d2 recomputed", "d1t2", "d2 adapted")}


def steps(folder, ranks):
    """By layout and whether it is compiled: weights before and after three steps, and how many programs were made."""
    torch.set_num_threads(1)
    found = {}
    for layout in LAYOUTS[ranks]:
        for compiled in (False, True) if ranks == 1 else (True,):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            lora = LoRAConfig(rank=4) if "adapted" in layout else LoRAConfig()
            spread = layout.removesuffix(" adapted")
            torch.manual_seed(7)
            engine = engine_on(folder, spread, lr=1e-2, eps=1e-2, compile=compiled, lora=lora)
            before = weights_of(engine)
            programs = []
            for batch in (batch_of_prompts(), random_batch((4, 2, 17, 6)), random_batch((19, 3, 8), seed=2)):
                engine.train_batch(batch, loss_with_scores, entropy=True)
                programs.append(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
            found[f"{layout} {compiled}"] = before, weights_of(engine), programs
    return found


def test_compiled_layers_take_the_step_of_others(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    folder = tiny_model_folder(tmp_path, "llama")
    one, several = alone_and_on_two(steps, folder, out=tmp_path)
    for kind in ("", " adapted"):
        before, after, programs = one[f"d1{kind} False"]
        assert programs == [0, 0, 0]
        moved = distance(before, after)
        assert moved > 0
        for found in (one, *several):
            for name, (_, theirs, programs) in found.items():
                if name.endswith("True") and ("adapted" in name) == bool(kind):
                    assert 0 < programs[1] == programs[2], "ragged batches have the programs of those before"
                    assert distance(theirs, after) <= 1e-3 * moved, name
