"""Evaluation beside training: pass@k, outside the staleness budget, and rollouts go on."""

import json

import pytest

from tandem.cli.running import describe
from tandem.config.arithmetic import evaluation_gconfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig, TrainConfig
from tandem.config.load import load_config
from tandem.config.rollout import EmbeddedEngineConfig, GenerationConfig, RolloutConfig
from tandem.engines.inference.build import build_inference_engine
from tandem.evaluation.asking import EVALUATION_EPOCH
from tandem.models.tokenizer import load_tokenizer
from tandem.rollout.executor import Rollout
from tandem.rollout.workflows import Repeated, RLVRWorkflow
from tandem.trainers.loop import train
from tests.rollout.clockwork import Constant
from tests.trainers.evaluating import evaluate
from tests.trainers.test_rl import rows, run


def test_several_samples_give_pass_at_k_and_a_vote_in_each_evaluation(overrides):
    items = ["evaluate.every_steps=2", "evaluate.n_samples=4", "evaluate.max_rows=6", "reward=exact_number"]
    summary = run(overrides, *items, "total_train_steps=3")
    first = json.loads((summary.folder / "metrics.jsonl").read_text().splitlines()[0])
    for found in (first, rows(summary)[1], rows(summary)[2]):
        assert {"eval/accuracy", "eval/pass@2", "eval/pass@4", "eval/maj@4", "eval/extraction_failed"} <= found.keys()
        assert found["eval/accuracy"] <= found["eval/pass@2"] <= found["eval/pass@4"]
    assert "eval/pass@2" not in rows(summary)[0]
    assert 0 <= rows(summary)[0]["extracted"] <= 1
    assert set(summary.evaluations) == {0, 2, 3}


def test_a_reward_without_accuracy_is_evaluated_by_its_mean(overrides):
    reward = next(item for item in overrides if item.startswith("reward=")).replace(":even", ":points")
    summary = run(overrides, "evaluate.every_steps=1", "evaluate.max_rows=4", "total_train_steps=1", reward)
    assert "eval/reward" in rows(summary)[-1] and "eval/accuracy" not in rows(summary)[-1]
    assert summary.evaluations == {} and "Accuracy" not in describe(summary)


def test_evaluation_changes_nothing_of_a_deterministic_run(overrides):
    items = ["deterministic=true", "total_train_steps=1", "evaluate.max_rows=4"]
    with_it = run(overrides, *items, "trial_name=a", "evaluate.every_steps=1", "evaluate.n_samples=2")
    again = run(overrides, *items, "trial_name=b", "evaluate.every_steps=1", "evaluate.n_samples=2")
    without = run(overrides, *items, "trial_name=c")
    for name in ("reward/mean", "loss", "grad_norm"):
        assert [row[name] for row in rows(with_it)] == [row[name] for row in rows(without)]
    assert [row["eval/reward"] for row in rows(with_it)] == [row["eval/reward"] for row in rows(again)]


@pytest.mark.parametrize(
    ("items", "greedy", "temperature"),
    [
        ([], True, 0.7),
        (["evaluate.n_samples=4"], False, 0.7),
        (["evaluate.temperature=0.3"], False, 0.3),
        (["evaluate.temperature=0"], True, 0.7),
    ],
)
def test_one_sample_is_greedy_and_several_are_drawn(items, greedy, temperature):
    config = load_config(
        TrainConfig, None, ["train_dataset.path=addition", "evaluate.every_steps=2", "gconfig.temperature=0.7", *items]
    ).config
    found = evaluation_gconfig(config)
    assert (found.greedy, found.temperature) == (greedy, temperature)
    assert found.n_samples == config.evaluate.n_samples


def test_several_greedy_samples_are_refused():
    with pytest.raises(ConfigError, match="equal answers"):
        load_config(TrainConfig, None, ["train_dataset.path=addition", "evaluate.n_samples=4", "evaluate.temperature=0"])


def test_supervised_training_refuses_the_keys_of_generation():
    with pytest.raises(ConfigError, match=r"evaluate\.n_samples=4 is not used by supervised"):
        load_config(SFTConfig, None, ["train_dataset.path=addition", "evaluate.every_steps=2", "evaluate.n_samples=4"])


CONFIG = RolloutConfig(
    batch_size=4,
    max_concurrent=2,
    dtype="float32",
    engine=EmbeddedEngineConfig(max_running=16, kv_cache_gib=0.05, max_model_len=256, threads=1),
)


def questions(count):
    for index in range(count):
        content = [{"role": "user", "content": f"{index} + 1 ="}]
        yield {"messages": content, "answer": "1", "tandem.epoch": 0, "tandem.index": index, "tandem.source": "sums"}


def test_rollouts_go_on_during_an_evaluation_and_it_takes_no_slot(model):
    """η = 40 leaves the gate open for longer than the evaluation lasts, so whatever it took would show."""
    tokenizer = load_tokenizer(model)
    engine = build_inference_engine(CONFIG, folder=model, placement="colocate", threads=1, device="cpu", deterministic=False)
    training = Repeated(RLVRWorkflow(Constant(), GenerationConfig(max_new_tokens=4, min_new_tokens=4), tokenizer), 2)
    long = GenerationConfig(max_new_tokens=120, min_new_tokens=120, greedy=True)
    examiner, loader = RLVRWorkflow(Constant(), long, tokenizer), questions(1000)
    try:
        with Rollout(engine, CONFIG, max_head_offpolicyness=40) as rollout:
            rollout.prepare_batch(loader, training)
            rollout.end_step()
            before, seen = rollout.ledger.total("waiting"), engine.statistics()["generated_tokens"]
            found = evaluate(engine, examiner, list(questions(12)), loop=rollout.loop, max_concurrent=4)
            gate = rollout.gate
            after = rollout.ledger.total("waiting")

            assert found.rows == 12 and found.failed == 0
            assert after >= before + 10  # episodes finished while it went on
            assert engine.statistics()["generated_tokens"] - seen >= 12 * 120 + 10 * 2 * 4
            assert gate.running <= 2 and gate.capacity() <= 41 * 4 - after
            rollout.prepare_batch(loader, training)
            rollout.end_step()  # checks the ledger against the gate
            assert rollout.ledger.total("trained") == 8
            assert all(epoch != EVALUATION_EPOCH for epoch, *_ in rollout.ledger.state_dict()["prompts"])
            assert {group.data["tandem.index"] for group in rollout.last_groups} == {4, 5, 6, 7}
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.invariant
def test_an_asynchronous_run_is_evaluated_with_several_samples_within_its_staleness(overrides):
    items = ["async_training=true", "rollout.max_head_offpolicyness=1", "evaluate.every_steps=1", "evaluate.n_samples=2"]
    items += ["evaluate.max_rows=6", "reward=exact_number"]
    summary = train(load_config(TrainConfig, None, [*overrides[:-2], *items, "threads=1"]))
    found = rows(summary)
    assert all("eval/pass@2" in row for row in found)
    assert max(row["staleness/max"] for row in found) <= 1
    assert found[-1]["episodes/trained"] == 12
