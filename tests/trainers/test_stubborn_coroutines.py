"""A user's coroutine that swallows its cancellation: what is finished ends as finished, and the warning names it."""

import json

import pytest

from tandem.cli.main import main
from tests.trainers.evaluating import evaluated

OWN = """
import asyncio
from tandem.rollout.workflows import RLVRWorkflow

async def stubborn():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def hangs_on_some(completion_ids):
    if completion_ids[0] % 3 == 0:
        await stubborn()
    return float(completion_ids[0] % 2)

class Stubborn(RLVRWorkflow):
    async def arun_episode(self, engine, data):
        sample = await super().arun_episode(engine, data)
        if engine.noise_key.group % 5 == 4:
            await stubborn()
        return sample
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("kind", ["reward", "workflow"])
def test_a_finished_run_ends_as_finished(overrides, own, tmp_path, kind):
    items = ["rollout.min_group_size=1", "total_train_steps=2"]
    items += {
        "reward": [f"reward={own}:hangs_on_some", "reward_timeout_s=0.2"],
        "workflow": [f"workflow={own}:Stubborn", "async_training=true", "train_dataset.shuffle=false"],
    }[kind]
    keys = {item.partition("=")[0]: item for item in [*overrides, *items]}
    assert main(["train", *keys.values()]) == 0
    (info,) = tmp_path.glob("*/*/run.json")
    assert json.loads(info.read_text())["status"] == "finished"
    log = (info.parent / "log.txt").read_text()
    assert "left behind" in log and "stubborn (own.py:" in log
    assert kind == "reward" or "Stubborn.arun_episode (own.py:" in log


@pytest.mark.slow
@pytest.mark.invariant
def test_an_evaluation_ends_too(model, own, tmp_path, caplog):
    done = evaluated(model, tmp_path, f"reward={own}:hangs_on_some", "reward_timeout_s=0.2")
    assert done.judged
    assert "stubborn (own.py:" in caplog.text
