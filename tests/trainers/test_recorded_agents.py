"""Agents of a user's file train the tiny model: synchronous, asynchronous, resumed, and with what they really sampled."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.cli.main import main
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.loop import train
from tests.tiny import tiny_model_folder
from tests.trainers.witness import assert_trained_as_sampled, witnessed_batch

AGENTS = Path(__file__).parent / "recorded_agents.py"
SHORT = f"gconfig.stop_token_ids={list(range(3, 300, 2))}"  # every second token ends a reply
CLOCK = ("time", "tokens_per_s/", "memory/")
TURNS = 3
VLLM = os.environ.get("TANDEM_VLLM_PYTHON")


def items(overrides, *more):
    mine = [f"workflow={AGENTS}:three_turns", SHORT, "gconfig.max_new_tokens=60", "rollout.batch_size=2"]
    return list({item.partition("=")[0]: item for item in [*overrides, *mine, *more]}.values())


def run(overrides, *more, until=None):
    folder = train(load_config(TrainConfig, None, items(overrides, *more)), until=until).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]
    return rows, load_file(sorted(folder.glob("checkpoints/step_*/model.safetensors"))[-1])


def test_what_is_trained_is_what_the_engine_saw_and_a_reference_agrees_on_logprobs(overrides, model):
    pieces, workflow, recorded = witnessed_batch(items(overrides))
    assert len(workflow.log) == 2 * 4 * TURNS
    assert_trained_as_sampled(pieces, workflow, model)
    assert recorded["rollout/recorded/turns"] == TURNS
    assert recorded["rollout/recorded/roots"] == pytest.approx(1.0, abs=0.3)  # a reply that was cut begins another


def test_the_command_trains_an_agent_and_evaluates_it(overrides, tmp_path):
    more = ["evaluate.every_steps=1", "evaluate.max_rows=2", "total_train_steps=1", "workflow_args.turns=2"]
    assert main(["train", *items(overrides, *more)]) == 0
    (metrics,) = tmp_path.glob("*/*/metrics.jsonl")
    row = json.loads(metrics.read_text().splitlines()[-1])
    assert row["rollout/recorded/turns"] == 2 and row["letters"] > 0 and row["gap/max"] < 1e-3 and row["grad_norm"] > 0
    assert [name for name in row if name.startswith("eval/")]


def test_no_term_of_the_configured_reward_is_added_to_what_an_agent_says_of_itself(overrides, model):
    here = Path(__file__).parent
    terms = [f"{here}/small_rewards.py:even(normalise=group)", f"{here}/small_scores.py:Likely(path='{model}')"]
    rich = f"reward={' + '.join([*terms, f'{here}/changing.py:Shortest'])}"
    more = ["total_train_steps=1", "deterministic=true", "rollout.engine.max_running=1"]
    plain, judged = (run(overrides, *more, *extra)[0][0] for extra in ([], [rich, "trial_name=judged"]))
    assert judged["reward/mean"] == plain["reward/mean"] and not any(name.startswith("rewards/") for name in judged)
    row = run(overrides, *more, rich, f"workflow={AGENTS}:silent", "trial_name=silent")[0][0]
    assert {"rewards/even", "rewards/Likely", "rewards/Shortest"} <= set(row)


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("backend", ["embedded", "tandem:d1"])
def test_asynchronous_training_goes_on_over_weight_updates(overrides, backend):
    more = [f"rollout.backend={backend}", "rollout.max_head_offpolicyness=2", "rollout.verify.every_steps=1"]
    rows, _ = run(overrides, "async_training=true", "total_train_steps=4", *more)
    assert max(row["staleness/max"] for row in rows) >= 1
    assert all(row["gap/verified"] > 0 and row["gap/numeric"] <= 1e-4 for row in rows)
    assert all(row["rollout/recorded/turns"] == TURNS and row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM, reason="TANDEM_VLLM_PYTHON names no python of an environment that has vLLM")
def test_an_agent_on_a_vllm_server_is_trained_over_weight_updates(overrides, tmp_path):
    wide = tiny_model_folder(tmp_path, hidden_size=128, num_attention_heads=4, head_dim=32)
    more = [f"actor.path={wide}", "rollout.backend=vllm:d1", "rollout.verify.every_steps=1"]
    rows, _ = run(overrides, "total_train_steps=2", f"rollout.fleet.vllm_python={VLLM}", *more)
    assert all(row["gap/verified"] > 0 and row["gap/numeric"] <= 1e-3 for row in rows)
    assert all(row["rollout/recorded/turns"] == TURNS and row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.invariant
def test_a_deterministic_run_that_is_resumed_is_the_run_that_never_stopped(overrides):
    more = ["deterministic=true", "checkpoint.every_steps=1", "total_train_steps=3"]
    try:
        whole = run(overrides, *more, "trial_name=whole")
        run(overrides, *more, "trial_name=cut", until=1)
        cut = run(overrides, *more, "trial_name=cut")
    finally:
        torch.use_deterministic_algorithms(False)
    assert whole[0] == cut[0] and len(whole[0]) == 3
    assert [name for name in whole[1] if not torch.equal(whole[1][name], cut[1][name])] == []


@pytest.mark.slow
@pytest.mark.invariant
def test_agents_that_ask_for_several_turns_at_once_repeat_to_the_bit(overrides):
    # Which of these turns are computed together is chance: one at a time, so that each is computed alone.
    more = ["deterministic=true", "rollout.engine.max_running=1", f"workflow={AGENTS}:branching", "total_train_steps=1"]
    try:
        one, other = (run(overrides, *more, f"trial_name={name}") for name in ("one", "other"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert one[0] == other[0] and one[0][0]["rollout/recorded/turns"] == 9
    assert [name for name in one[1] if not torch.equal(one[1][name], other[1][name])] == []


@pytest.mark.parametrize(
    ("knob", "words"),
    [
        ("workflow_args.turn=2", "has no knob 'turn'"),
        ("workflow_args.side_calls=some", "side_calls"),
        ("workflow_args.max_turns=0", "max_turns"),
        ("system_prompt=Hello", "system_prompt is set"),
    ],
)
def test_an_agent_with_a_wrong_knob_is_refused_at_start(overrides, capsys, knob, words):
    assert main(["train", *items(overrides, knob)]) != 0
    assert words in capsys.readouterr().err
