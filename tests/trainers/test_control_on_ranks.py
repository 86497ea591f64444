"""A reward that is changed where several ranks generate: it is another one on all of them from the same step on."""

import json
import os
from pathlib import Path

import pytest
import torch

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.recipes import Change
from tandem.state.control import FOLDER, ask
from tandem.trainers import loop
from tests.ranks import on_two

SMALL = Path(__file__).parent / "small_rewards.py"


def changed(items, root, ranks):
    """Trains a step, asks for changes of which one is refused, and trains two more steps."""
    rank = torch.distributed.get_rank()
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    resolved = load_config(TrainConfig, None, [*items, f"run.root={root}"])
    loop.train(resolved, until=1)
    torch.distributed.barrier()
    if rank == 0:
        ask(root / "tandem" / "trial", Change("reward.add", f"0.5*{SMALL}:short(normalise=running)"))
        ask(root / "tandem" / "trial", Change("reward.add", f"{SMALL}:nothing"))
        ask(root / "tandem" / "trial", Change("reward.weight", "even=2"))
    torch.distributed.barrier()
    loop.train(resolved)
    torch.distributed.barrier()


@pytest.mark.slow
@pytest.mark.invariant
def test_all_ranks_that_generate_judge_by_the_changed_reward_from_the_same_step_on(model, tmp_path):
    items = [f"actor.path={model}", "actor.backend=fsdp:d2", "actor.dtype=float32", "rollout.dtype=float32", "threads=1"]
    items += ["train_dataset.path=addition", "deterministic=true", "evaluate.every_steps=null", f"reward={SMALL}:even"]
    items += ["rollout.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8", "rollout.engine.kv_cache_gib=0.05"]
    items += ["checkpoint.every_steps=1", "total_train_steps=3", "tracking.trajectories_per_step=99"]
    (tmp_path / "out").mkdir()
    on_two(changed, [*items, "tracking.plot_every_steps=null"], tmp_path, out=tmp_path / "out")
    folder = tmp_path / "tandem" / "trial"
    answers = [json.loads(path.read_text()) for path in sorted((folder / FOLDER).glob("*.answer"))]
    assert [answer.get("step") for answer in answers] == [2, None, 2]
    for step, names in ((1, set()), (2, {"even", "short"}), (3, {"even", "short"})):
        lines = (folder / "trajectories" / f"step_{step}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == 16 and all(set(sample["rewards"]) == names for sample in samples)
        for sample in samples if names else ():
            assert sample["rewards"]["even"] == pytest.approx(2 * sample["raw_rewards"]["even"])
    assert sum(sample["rewards"]["short"] for sample in samples) != 0  # by the mean of both steps
