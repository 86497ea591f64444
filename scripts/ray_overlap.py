"""Measures how the stages of PPO overlap on Ray, and what a remote stage costs: ``python scripts/ray_overlap.py PICTURE``.

Reference and values are in pools of their own, one thread each. It prints the figures of docs/cluster.md and draws one step.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.trainers.script import open_training
from tests.tiny import tiny_model_folder

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4}
REPEATS = 7


def keys(folder, model):
    rewards = Path(__file__).parents[1] / "tests" / "trainers" / "small_rewards.py"
    return [
        *(f"run.root={folder}", f"actor.path={model}", f"reward={rewards}:even", "runner=ray", "threads=1"),
        *("algorithm=ppo", "algorithm.kl.coefficient=0.1", "reference.backend=fsdp:d1", "total_train_steps=4"),
        *("rollout.batch_size=16", "gconfig.n_samples=8", "gconfig.max_new_tokens=48", "gconfig.min_new_tokens=48"),
        "algorithm.allow_truncated_sampling=true",
        *("actor.dtype=float32", "rollout.dtype=float32", "tracking.trajectories_per_step=0", "evaluate.every_steps=null"),
        *("train_dataset.path=addition", "checkpoint.at_end=false", "tracking.plot_every_steps=null"),
    ]


def timed(session, batch, *names):
    """Runs these stages on a batch that lies in the object store; seconds of all together, and of the work in each."""
    began = time.monotonic()
    for name in names:
        stage = session.plan.stage(name)
        session.conductor.run(stage, session.roles[stage.role], batch)
    session.conductor.settle(batch, {})
    return time.monotonic() - began, [costs[0].seconds for _, costs, _ in session.conductor.calls]


def stored(ray):
    """Bytes ever laid into the object stores of all nodes; one that reads what is elsewhere lays a copy there."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address  # noqa: PLC0415

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.cumulative_created_bytes


def overhead_ms(ray, member):
    """The cost of a call that does nothing and reads 1 MB: from the tensor here to the answer here, without the work."""
    tensor, found = torch.zeros(250_000), []
    for _ in range(40):
        began = time.monotonic()
        call = member.run.remote("reference", "state_dict", (), None, (), {}, ray.put(tensor))
        seconds = ray.get(call)[1].seconds
        found.append(time.monotonic() - began - seconds)
    return 1000 * statistics.median(found), 1000 * sorted(found)[int(0.95 * len(found))]


def draw(calls, pools, path):
    """A bar for each call, a row for each pool."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 the backend first

    rows = list(dict.fromkeys(costs[0].process for _, costs, _ in calls))
    first = min(costs[0].began for _, costs, _ in calls)
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.7 * len(rows)), layout="constrained")
    for number, (stage, costs, _) in enumerate(calls):
        at, row = costs[0].began - first, rows.index(costs[0].process)
        axes.barh(row, costs[0].seconds, left=at, color=f"C{number % 10}", height=0.6, label=stage.name)
    names = {costs[0].process: pools[stage.role] for stage, costs, _ in calls}
    axes.set_yticks(range(len(rows)), [f"pool {names[one]}" for one in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the batch was collected")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.savefig(path, dpi=110)


def main(path):
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model_folder(Path(folder), **SIZES, num_hidden_layers=4)
        config = load_config(TrainConfig, None, keys(folder, model)).config
        with open_training(config) as (_, session):
            ray, pools = session.pools.ray, session.pools
            read, fields, counted = [], [], []
            for _ in range(3):
                before = stored(ray)
                batch, metrics = session.step()
                time.sleep(3)  # nodes tell their counters now and then
                session.end_step()
                read.append(metrics["remote/read_mib"])
                counted.append((stored(ray) - before) / 2**20)
                fields.append(sum(one.nbytes for one in session.conductor.value(batch).values()) / 2**20)
            draw(session.conductor.calls, pools.of_role, path)
            alone, together = [], []
            for _ in range(REPEATS):
                alone.append(timed(session, batch, "reference")[1][0] + timed(session, batch, "values")[1][0])
                together.append(timed(session, batch, "reference", "values")[0])
            middle, high = overhead_ms(ray, pools.pools["reference"].members[0])
    ratio = statistics.median(one / other for one, other in zip(together, alone, strict=True))
    print(f"reference and values: {statistics.median(together):.2f} s together, {statistics.median(alone):.2f} s of work")
    print(f"each alone: {ratio:.2f} of the sum (median of {REPEATS})")
    print(f"overhead of a remote stage, 1 MB: {middle:.1f} ms (95 % within {high:.1f} ms)")
    print("bytes that stages read, MiB a step:", ", ".join(f"{one:.2f}" for one in read))
    print("bytes of all fields, each once:", ", ".join(f"{one:.2f}" for one in fields))
    print("bytes laid into object stores, by their own counters:", ", ".join(f"{one:.2f}" for one in counted))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    main(parser.parse_args().picture)
