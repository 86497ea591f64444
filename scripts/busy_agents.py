"""Agents with heavy Python in each turn, on 0, 1 and 2 rollout workers: ``python scripts/busy_agents.py`` prints the table
of docs/cluster.md. Start it at real-time priority on an idle machine: ``chrt -r 5 python scripts/busy_agents.py``.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tandem import ChatWorkflow
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.script import open_training
from tests.tiny import tiny_model_folder

TURNS, BUSY_S, STEPS = 3, 0.03, 4


class Busy(ChatWorkflow):
    """Three turns, each with 30 ms of Python of its own, as a parser or a simulator has."""

    async def arun_episode(self, engine, data):
        chat = self.start(data)
        for _ in range(TURNS):
            began = time.thread_time()
            while time.thread_time() - began < BUSY_S:
                sum(range(1000))
            chat.add(await engine.agenerate(chat.request(self.gconfig)))
            chat.say("Go on.")
        return chat.sample(0.0)


def measured(workers, model, folder):
    """Turns a second of the last steps."""
    keys = [
        *(f"run.root={folder}", f"actor.path={model}", f"workflow={__file__}:Busy", "runner=ray", "threads=1"),
        *(f"rollout.workers={workers}", f"trial_name=w{workers}", "rollout.batch_size=32", "gconfig.n_samples=4"),
        *("gconfig.max_new_tokens=4", f"total_train_steps={STEPS}", "evaluate.every_steps=null", "checkpoint.at_end=false"),
        *("actor.dtype=float32", "rollout.dtype=float32", "tracking.trajectories_per_step=0"),
        *("train_dataset.path=addition", "tracking.plot_every_steps=null", "reward=null"),
    ]
    with open_training(load_config(TrainConfig, None, keys).config) as (run, session):
        seconds = []
        for _ in range(run.steps):
            began = time.monotonic()
            session.rollout.prepare_batch(session.loader, session.workflow)
            seconds.append(time.monotonic() - began)
            session.rollout.end_step()
    return 32 * 4 * TURNS * (STEPS - 1) / sum(seconds[1:])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model_folder(Path(folder))
        for workers in (0, 1, 2):
            print(f"{workers} rollout workers: {measured(workers, model, folder):.1f} turns a second", flush=True)
