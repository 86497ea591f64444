"""Several turns on a real engine: what is trained is what it saw and made, whatever the chat template does with history."""

import json
from pathlib import Path

import pytest
import torch

from tandem.api.plugins import load_object
from tandem.api.workflow import RolloutWorkflow
from tandem.cli.main import main
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.flow.opening import open_rows, open_session
from tandem.flow.process import start_process
from tandem.rollout.workflows import Repeated
from tests.tiny import CHATML, tiny_model_folder

ROOT = Path(__file__).resolve().parents[2]
REWARDS = Path(__file__).parent / "small_rewards.py"
WORKFLOW = f"{ROOT / 'examples/multi_turn.py'}:RetryUntilCorrect"
TURNS = 3
# Of an earlier reply only its length is told: each turn is a new trajectory.
REWRITING = CHATML.replace("message['content']", "(message['content'] | length | string if message['role'] == 'assistant' "
                           "else message['content'])")  # fmt: skip


class Taped(RolloutWorkflow):
    """Runs a workflow and keeps what the engine was asked and what it answered, by sample."""

    def __init__(self, workflow):
        self.workflow, self.tapes = workflow, []

    async def arun_episode(self, engine, data):
        tape = Tape(engine)
        self.tapes.append(tape)
        return await self.workflow.arun_episode(tape, data)


class Tape:
    def __init__(self, engine):
        self.engine, self.responses = engine, []

    async def agenerate(self, request):
        self.responses.append(await self.engine.agenerate(request))
        return self.responses[-1]


def items(overrides, folder):
    """Every second token ends a reply, and no reply is right."""
    more = [
        f"actor.path={folder}",
        f"reward={REWARDS}:never_right",
        f"workflow={WORKFLOW}",
        "gconfig.max_new_tokens=60",
        f"gconfig.stop_token_ids={list(range(3, 300, 2))}",
        "rollout.batch_size=2",
        "total_train_steps=1",
    ]
    return list({item.partition("=")[0]: item for item in [*overrides, *more]}.values())


def trained(batch):
    """Tokens, and which of them are trained, of each sequence."""
    bounds = batch["cu_seqlens"].tolist()
    pieces = [slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]
    return sorted((batch["input_ids"][piece].tolist(), batch["loss_mask"][piece].tolist()) for piece in pieces)


def appended(responses):
    """The one sequence of a chat that only grew: its last turn, with all that the engine made in its places."""
    last = responses[-1]
    ids = [*last.input_ids, *last.output_ids]
    mask = [False] * len(ids)
    for response in responses:
        begin, end = len(response.input_ids), len(response.input_ids) + len(response.output_ids)
        assert ids[:end] == [*response.input_ids, *response.output_ids]  # what an earlier turn saw and made stands there
        mask[begin:end] = [True] * (end - begin)
    return [(ids, mask)]


def one_each(responses):
    """A sequence for each turn."""
    return [([*r.input_ids, *r.output_ids], [False] * len(r.input_ids) + [True] * len(r.output_ids)) for r in responses]


@pytest.mark.parametrize(("template", "expected"), [(CHATML, appended), (REWRITING, one_each)], ids=["appends", "rewrites"])
def test_what_is_trained_is_what_the_engine_saw_and_made(overrides, tmp_path, template, expected):
    folder = tiny_model_folder(tmp_path, chat_template=template)
    config = load_config(TrainConfig, None, items(overrides, folder)).config
    rows = open_rows(config)
    make = load_object(WORKFLOW)
    with open_session(config, start_process(config), rows, 1, "test/multi_turn") as session:
        taped = Taped(make(session.episodes.reward, config.gconfig, session.tokenizer))
        batch = session.rollout.prepare_batch(session.loader, Repeated(taped, config.gconfig.n_samples))
        before = torch.cat([tensor.flatten().clone() for _, tensor in session.trainer.weights()])
        scored = session.actor.compute_advantages(session.actor.compute_proximal(batch))
        metrics = session.actor.ppo_update(scored)
        after = torch.cat([tensor.flatten() for _, tensor in session.trainer.weights()])
        turns = session.rollout.metrics()["turns"]

    assert turns == TURNS and {len(tape.responses) for tape in taped.tapes} == {TURNS}
    assert len(taped.tapes) == 2 * config.gconfig.n_samples
    assert trained(batch) == sorted(piece for tape in taped.tapes for piece in expected(tape.responses))
    assert metrics["gap/max"] < 1e-3  # the trainer sees each token behind the same tokens as the engine did
    assert not torch.equal(before, after)


def test_the_command_trains_on_several_turns(overrides, model, tmp_path):
    assert main(["train", *items(overrides, model)]) == 0
    (metrics,) = tmp_path.glob("*/*/metrics.jsonl")
    row = json.loads(metrics.read_text().splitlines()[-1])
    assert row["turns"] == TURNS
    assert row["gap/max"] < 1e-3 and row["grad_norm"] > 0
