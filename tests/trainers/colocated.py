"""PPO with a critic, a reference and two reward models, for tests of `memory_limit_gib`; also a process of its own:

python -m tests.trainers.colocated ROOT MODELS CAP_MIB KEY=VALUE…   (prints a JSON line: peaks over the start, in MiB)
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.api.weights import tensor_digest
from tandem.cli.main import run
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.engines.train.engine import SpreadEngine
from tandem.models.tokenizer import load_tokenizer
from tandem.trainers.loop import train
from tests.tiny import tiny_model_folder

JUDGES = ("first", "second")
CLOCK = ("time", "tokens_per_s/", "memory/")


def make_models(folder: Path, judges: Sequence[str] = JUDGES, **size: int) -> None:
    """A policy, and reward models with bases of their own: other numbers, and one layer more than the one before."""
    policy = tiny_model_folder(folder, **size)
    policy.rename(folder / "policy")
    for number, name in enumerate(judges, 1):
        layers = size.get("num_hidden_layers", 2) + number
        base = tiny_model_folder(folder / name, seed=number, **size | {"num_hidden_layers": layers})
        config = load_config(TrainConfig, None, [f"actor.path={base}", "actor.dtype=float32", "train_dataset.path=addition"])
        torch.manual_seed(number)
        judge = SpreadEngine(config.config.actor, 1, head="scalar")
        judge.load_weights((key, torch.randn_like(x) if x.shape[0] == 1 else x) for key, x in list(judge.weights()))
        judge.save(folder / f"{name}-judge")
        load_tokenizer(folder / "policy").save_pretrained(folder / f"{name}-judge")
        shutil.rmtree(folder / name)


def judge_folder(tmp, seed=5, says="Score: 7", **size):
    """A model that says the same whatever it reads: each token of it is followed by the next one."""
    folder = tiny_model_folder(tmp, seed=seed, max_position_embeddings=2048, **size)
    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = tokenizer("assistant\n", add_special_tokens=False)["input_ids"][-1]
    spoken = [first, *tokenizer(says, add_special_tokens=False)["input_ids"], 2]
    assert len(set(spoken)) == len(spoken)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedded = model.model.embed_tokens.weight
        for token, following in zip(spoken, spoken[1:], strict=False):
            hidden = model.model.norm(embedded[token])
            model.lm_head.weight[following] = 10 * hidden / hidden.norm()
    model.save_pretrained(folder)
    return folder


def keys_of(root: Path, models: Path, order: Sequence[str] = JUDGES, *more: str) -> list[str]:
    """The configuration of a run; of two equal keys the last one counts."""
    reward = " + ".join(f"0.5*model(path={models}/{name}-judge, name={name})" for name in order)
    keys = [
        f"run.root={root}",
        f"actor.path={models}/policy",
        "actor.optimizer.lr=0.001",
        "actor.dtype=float32",
        "rollout.dtype=float32",
        "rollout.batch_size=4",
        "rollout.engine.kv_cache_gib=0.00005",
        "rollout.verify.every_steps=null",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=4",
        "train_dataset.path=addition",
        "valid_dataset.path=addition",
        "evaluate.every_steps=null",
        "total_train_steps=2",
        "tracking.plot_every_steps=null",
        "tracking.trajectories_per_step=99",
        "threads=1",
        "deterministic=true",
        "algorithm=ppo",
        "algorithm.kl.coefficient=0.1",
        f"reward={reward}",
        *more,
    ]
    return list({key.partition("=")[0]: key for key in keys}.values())


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def outcome(folder):
    """All that a run came to, but for clocks: weights, metrics, rewards of each sample, ledger. The digests of versions in
    the samples have a key of the run's own, so they are left out; `weights` has what must be equal."""
    metrics = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows(folder)]
    samples = [path.read_text() for path in sorted((folder / "trajectories").iterdir())]
    with sqlite3.connect(folder / "ledger.sqlite") as ledger:
        tables = [name for (name,) in ledger.execute("select name from sqlite_master where type='table' order by name")]
        records = {table: ledger.execute(f"select * from {table}").fetchall() for table in tables if table != "run"}
    saved = {
        f"{path.relative_to(folder)} {name}": tensor_digest(tensor)
        for path in sorted(folder.glob("checkpoints/**/*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return {
        "weights": (folder / "weights.jsonl").read_text(),
        "metrics": metrics,
        "samples": [
            sorted(json.dumps(_without_digests(json.loads(line)), sort_keys=True) for line in text.splitlines())
            for text in samples
        ],
        "ledger": records,
        "saved": saved,
    }


def _without_digests(sample):
    for versions in sample.get("versions", ()):
        for version in versions:
            version.pop("digest", None)
    return sample


def train_and_die(keys, nth):
    """In a process of its own, which is gone when a model is to wake for the ``nth`` time."""
    from tandem.engines.train.asleep import EngineMemory  # noqa: PLC0415

    plain, count = EngineMemory.onload, 0

    def onload(self, parts):
        nonlocal count
        count += 1
        if count == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, parts)

    if nth:
        EngineMemory.onload = onload
    train(load_config(TrainConfig, None, keys))


def memory(name: str) -> float:
    """A line of this process's status, in MiB."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024


def watch(peaks: dict[str, float]) -> None:
    """Keeps the largest that was seen."""
    while True:
        for name in peaks:
            peaks[name] = max(peaks[name], memory(name))
        time.sleep(0.002)


def measured(cap_mib: int, work: Callable[[], object]) -> None:
    """Does the work, under a limit of this process's data unless ``cap_mib`` is 0, and prints its peaks."""
    peaks = {name: memory(name) for name in ("VmData", "RssAnon", "VmRSS")}
    start = dict(peaks)
    if cap_mib:
        cap = int(start["VmData"] + cap_mib) << 20
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    threading.Thread(target=watch, args=(peaks,), daemon=True).start()
    work()
    print(json.dumps({name: peaks[name] - start[name] for name in peaks}))


def main(root: str, models: str, cap_mib: str, *more: str) -> None:
    """Trains, under a limit of this process's data unless ``cap_mib`` is 0."""
    keys = keys_of(Path(root), Path(models), JUDGES, *more)
    work = partial(measured, int(cap_mib), lambda: train(load_config(TrainConfig, None, keys)))
    sys.exit(run(lambda _: work(), argparse.Namespace(debug=False)))  # errors are told as a command tells them


if __name__ == "__main__":
    main(*sys.argv[1:])
