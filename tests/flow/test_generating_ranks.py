"""Every data-parallel rank generates: the same tokens, rewards, evaluation and step as on one rank."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tandem.config.arithmetic import generating_ranks, total_steps
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.evaluation.validation import evaluate
from tandem.flow.conductor import of_all_ranks
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import Process
from tests.engines_train.steps import distance
from tests.flow.test_fewer_ranks import CHEAP, CLOCKS, one_step
from tests.ranks import alone_and_on_two
from tests.tiny import tiny_model_folder

STEPS = 3


def config_of(out, *more):
    items = [f"run.root={out}", f"actor.path={out / 'tiny-llama-0'}", "actor.dtype=float32", "rollout.dtype=float32"]
    items += ["actor.optimizer.lr=0.05", "actor.optimizer.eps=0.1"]  # nearly proportional to the gradient: rounding stays so
    items += ["rollout.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8", "rollout.engine.kv_cache_gib=0.05"]
    items += ["train_dataset.path=addition", "evaluate.every_steps=1", "evaluate.max_rows=5", "evaluate.n_samples=2"]
    items += ["algorithm=grpo", "algorithm.filter=dynamic_sampling", "threads=1", "deterministic=true"]
    return load_config(TrainConfig, None, [*items, f"reward={CHEAP}", f"total_train_steps={STEPS}", *more]).config


def trained(out, ranks):
    """Batches, metrics, evaluations and tokens of each engine of some steps, and the weights after them."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if ranks > 1 else 0
    config, process = config_of(out, f"actor.backend=fsdp:d{ranks}"), Process("cpu", 1, rank, ranks)
    rows = open_rows(config)
    with open_session(config, process, rows, total_steps(config, len(rows.train)), "run") as session:
        steps, evaluations = [], []
        for _ in range(STEPS):
            steps.append(one_step(session))
            evaluations.append(evaluate(config, session, rows))
        measured = session.measured()
        session.trainer.save(out / f"weights-{ranks}")
        return {
            "batches": [batch for batch, _ in steps],
            "metrics": [metrics for _, metrics in steps],
            "evaluations": evaluations,
            "generated": session.engine.statistics()["generated_tokens"],
            "judged": "time/judge_s" in measured,
        }


@pytest.mark.slow
@pytest.mark.invariant
def test_two_ranks_that_generate_take_the_steps_of_one(tmp_path):
    tiny_model_folder(tmp_path)
    alone, (first, second) = alone_and_on_two(trained, tmp_path, out=tmp_path)
    assert 0.3 < first["generated"] / (first["generated"] + second["generated"]) < 0.7
    assert first["generated"] + second["generated"] == alone["generated"] and first["judged"] and second["judged"]
    for one, other, same in zip(alone["batches"], first["batches"], second["batches"], strict=True):
        assert one.keys() == other.keys()
        assert torch.equal(one["input_ids"], other["input_ids"]) and torch.equal(one["reward"], other["reward"])
        assert torch.allclose(one["rollout_logprobs"], other["rollout_logprobs"], atol=1e-4, equal_nan=True)
        assert all(torch.equal(other[name].nan_to_num(), same[name].nan_to_num()) for name in other)
    for one, other in zip(alone["metrics"] + alone["evaluations"], first["metrics"] + first["evaluations"], strict=True):
        plain = {name: value for name, value in one.items() if not name.startswith((*CLOCKS, "gap/"))}
        assert plain and {name: other[name] for name in plain} == pytest.approx(plain, rel=5e-3, abs=1e-5, nan_ok=True)
    before = load_file(tmp_path / "tiny-llama-0" / "model.safetensors")
    ours, theirs = (load_file(tmp_path / f"weights-{ranks}" / "model.safetensors") for ranks in (1, 2))
    assert distance(ours, theirs) <= 1e-3 * distance(before, ours)


@pytest.mark.parametrize(
    ("items", "ranks"),
    [
        (["actor.backend=fsdp:d4"], (0, 1, 2, 3)),
        (["actor.backend=fsdp:d2t2"], (0, 2)),
        (["actor.backend=fsdp:d1c2"], (0,)),
        (["actor.backend=fsdp:d2r2"], (0, 1, 2, 3)),
        (["actor.backend=fsdp:d2", "async_training=true"], (0,)),
        (["actor.backend=fsdp:d2", "placement=decoupled"], (0,)),
        (["actor.backend=fsdp:d2", "rollout.backend=tandem:d1"], (0,)),
    ],
)
def test_the_first_rank_of_each_data_parallel_index_generates_in_turns(items, ranks, tmp_path):
    assert generating_ranks(config_of(tmp_path, *items, "deterministic=false")) == ranks


def test_metrics_of_several_ranks_are_those_of_all_samples():
    one = {"tokens_per_s/generate": 100.0, "time/judge_s": 1.0, "time/judge_max_s": 3.0, "rollout/preempted": 3.0}
    other = {"tokens_per_s/generate": 60.0, "time/judge_s": 5.0, "time/judge_max_s": 9.0, "rollout/preempted": 4.0}
    found = [(6, {**one, "fleet/servers": 2.0}), (2, other), (0, {})]
    expected = {"tokens_per_s/generate": 160.0, "time/judge_s": 2.0, "time/judge_max_s": 9.0, "rollout/preempted": 7.0}
    expected["fleet/servers"] = 2.0
    assert of_all_ranks(found) == expected
