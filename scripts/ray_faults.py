"""Kills workers of runs on Ray at random instants: ``python scripts/ray_faults.py`` prints a row for each kill.

Each run has an actor, critic, reference, reward model, two rollout workers and an engine in a process of its own; three
of its processes are killed, one after another, at instants of a seeded generator. A command that ends is given again. In the
end the weights of every step, and the ledger, are compared with those of a run that nobody disturbed.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import ray

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.scalar_judge import save_judge
from tests.tiny import tiny_model_folder

ROOT = Path(__file__).parents[1]
VICTIMS = ("actor", "critic", "reference", "judge", "rollout", "engine", "controller", "command")
KILLS, RUNS, LONGEST_GAP_S = 3, 7, 4.0


def keys(folder, trial, steps):
    reward = f"0.5*model(path={folder / 'judge'}, name=judge) + {ROOT / 'tests/trainers/small_rewards.py'}:even"
    return [
        *(f"run.root={folder}", f"trial_name={trial}", f"actor.path={folder / 'tiny-llama-0'}", f"reward={reward}"),
        *("runner=ray", "deterministic=true", "threads=1", "algorithm=ppo", "algorithm.kl.coefficient=0.1"),
        *("reference.backend=fsdp:d1", "placement=decoupled", "rollout.workers=2", f"total_train_steps={steps}"),
        *("checkpoint.every_steps=2", "recover.max_restarts=20", "actor.optimizer.lr=0.01", "evaluate.every_steps=null"),
        *("actor.dtype=float32", "rollout.dtype=float32", "rollout.batch_size=4", "gconfig.n_samples=4"),
        *("gconfig.max_new_tokens=32", "train_dataset.path=addition", "tracking.plot_every_steps=null"),
    ]


class Watched:
    """A run, its command and what its log says."""

    def __init__(self, folder, trial, steps):
        self.command = [sys.executable, "-m", "tandem", "train", *keys(folder, trial, steps)]
        self.folder, self.restarts = folder / "tandem" / trial, -1
        self.begin()

    def begin(self):
        self.restarts += 1
        with open(self.folder.parent.parent / "said.txt", "ab") as said:
            self.process = subprocess.Popen(self.command, stdout=said, stderr=said, start_new_session=True)
        self.heard = len(self.log())

    def log(self):
        file = self.folder / "log.txt"
        return file.read_text() if file.exists() else ""

    def deaths(self):
        """Number of deaths that the run has noticed."""
        return len(re.findall(r" died|ended by signal", self.log()))

    def lines(self, name):
        file = self.folder / name
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [json.loads(line) for line in whole.splitlines() if line]

    def step(self):
        return max((line["step"] for line in self.lines("metrics.jsonl")), default=0)

    def victim(self, name):
        """A process of this kind that lives, or None."""
        if name == "command":
            return self.process.pid
        if name in ("controller", "engine"):
            try:
                controller = psutil.Process(self.process.pid).children()[0]
                mine = [(one.memory_info().rss, one.pid) for one in controller.children(recursive=True)]
            except (psutil.Error, IndexError):
                return None
            return controller.pid if name == "controller" else max(mine, default=(0, None))[1]
        pids = {}
        said = r"pool (\S+): process\(es\) ([\d, ]+)|process (\d+) of a model on Ray died; process (\d+) has"
        for pool, several, old, new in re.findall(said, self.log()[self.heard :]):
            if pool:
                pids[pool] = several.split(", ")
            else:
                pids = {pool: [new if one == old else one for one in some] for pool, some in pids.items()}
        alive = [int(one) for one in pids.get(name, ()) if psutil.pid_exists(int(one))]
        return random.choice(alive) if alive else None

    def wait(self, true, seconds):
        """Seconds until it is true; None: it is not. The command is given again where it has ended before the last step."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            if true():
                return time.monotonic() - began
            if self.process.poll() not in (None, 0):
                self.begin()
            time.sleep(0.02)
        return None


def disturbed(folder, trial, steps, chance):
    """The lines of the table for the kills of a run, which it does all."""
    run, told = Watched(folder, trial, steps), []
    for _ in range(KILLS):
        before = run.step()
        run.wait(lambda step=before: run.step() > step or run.process.poll() == 0, 240)
        time.sleep(chance.uniform(0, LONGEST_GAP_S))
        for name in chance.sample(VICTIMS, len(VICTIMS)):
            pid = run.victim(name) if run.process.poll() is None else None
            if pid is not None:
                break
        else:
            break
        step, died = run.step(), run.deaths()
        os.kill(pid, 9)
        seconds = run.wait(lambda n=died: run.process.poll() is not None or run.deaths() > n, 30)
        told.append((name, step, seconds, "command given again" if run.process.poll() is not None else "went on"))
    run.wait(lambda: run.process.poll() == 0, 240)
    if run.process.poll() is None:
        os.killpg(run.process.pid, 9)
    return run, told


def weights(run):
    return {line["step"]: line["tensors"] for line in run.lines("weights.jsonl")}


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--minutes", type=float, default=20.0, help="begin no further run after this")
    given = options.parse_args()
    chance, began = random.Random(given.seed), time.monotonic()
    random.seed(given.seed)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, _system_config={"worker_niceness": 0})
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = tiny_model_folder(folder)
        save_judge(folder / "judge", policy, policy)
        whole = Watched(folder, "whole", given.steps)
        whole.process.wait()
        trained = {line["step"]: line["episodes/trained"] for line in whole.lines("metrics.jsonl")}
        print("| run | killed | after step | noticed | then |\n|---|---|---|---|---|")
        for number in range(RUNS):
            if time.monotonic() - began > 60 * given.minutes:
                break
            run, told = disturbed(folder, f"r{number}", given.steps, chance)
            for victim, step, seconds, then in told:
                noticed = "no" if seconds is None else f"{seconds:.1f} s"
                print(f"| {number + 1} | {victim} | {step} | {noticed} | {then} |")
            same = weights(run) == weights(whole)
            once = {line["step"]: line["episodes/trained"] for line in run.lines("metrics.jsonl")} == trained
            print(
                f"| {number + 1} | | {run.step()} | | weights {'equal' if same else 'NOT EQUAL'}, "
                f"prompts {'each once' if once else 'NOT once'}, command given {run.restarts + 1} times |",
                flush=True,
            )
            if not (same and once):
                print((folder / "said.txt").read_text()[-3000:], run.log()[-6000:], file=sys.stderr)
        print(f"{time.monotonic() - began:.0f} s")
    ray.shutdown()


if __name__ == "__main__":
    main()
