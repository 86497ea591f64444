"""Shows whether a change of the code left results the same to the bit.

`record` makes a short deterministic float32 run of everything that trains: each preset, PPO with both critics, references,
filters, replay, asynchronous training, adapters, two ranks, SFT, preferences, reward models, distillation. It writes a
digest of each final weight tensor and every metric that is no time, rate or memory. `compare` makes the same runs again
and says of each whether it is the same, or what differs first and by how much; it exits with 1 if anything differs.

Everything goes through `python -m tandem` and the files of a run, so PYTHONPATH chooses the source that runs:

    PYTHONPATH=../before/src python scripts/same_runs.py record before.json
    PYTHONPATH=src python scripts/same_runs.py compare before.json
    PYTHONPATH=src python scripts/same_runs.py compare before.json --only ppo --only 'sft*'

Figures are only equal on one machine with one version of torch; `compare` says where a record comes from another.
"""

import argparse
import fnmatch
import hashlib
import io
import json
import math
import multiprocessing
import os
import platform
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is imported: this process forks, and threads would not come along
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}

import numpy
import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tests.tiny import tiny_model_folder  # noqa: E402

LIMIT_S = 300.0
"""A run that takes longer is ended and counts as failed."""

NOT_COMPARED = re.compile(r"(^|/)time(/|$)|^memory/|_per_s(/|$)|_s$|_gib$")
"""Metrics that measure the machine: times, rates and memory."""

SKETCH = 4
"""Numbers that are written of a tensor beside its digest, to estimate how far another one is from it."""

# ------------------------------------------------------------------ the runs

EACH = (
    "run.root=INPUTS/runs actor.path=INPUTS/tiny-llama-0 actor.dtype=float32 actor.optimizer.lr=0.01 device=cpu threads=1 "
    "deterministic=true total_train_steps=3 checkpoint.resumable=false"
)
ROLLOUT = (
    "train_dataset.path=INPUTS/rows rollout.dtype=float32 rollout.batch_size=4 rollout.engine.kv_cache_gib=0.05 "
    "gconfig.n_samples=4 gconfig.max_new_tokens=12 gconfig.stop=[e,a,t] actor.mini_batches=2 rollout.wait_timeout_s=240 "
    "reward=INPUTS/rewards.py:parts"
)
SUMS = "train_dataset.path=addition train_dataset.size=24 batch_size=8"
PAIRS = "train_dataset.path=addition_pairs train_dataset.size=24 batch_size=8 evaluate.every_steps=3 evaluate.max_rows=4"
BEHIND = (
    "deterministic=false async_training=true train_dataset.shuffle=false reward_timeout_s=240 total_train_steps=4 "
    "rollout.engine.max_running=1 rollout.engine.kv_cache_gib=0.00002 system_prompt=Add."
)
"""Asynchronous training in which nothing is left to timing: the rewards decide when a step's samples are done, and the
engine has room for one sequence, so that it batches none with another and none reads the prompt of another. The system
prompt is for that: prompts of at most 32 tokens would fit beside an answer in a row of their own, and then timing decides
whether the others of a prompt have arrived when the first is admitted, and so whether it shares its prompt."""

REFERENCE = "algorithm=grpo algorithm.kl.coefficient=0.1"
REPLAY = "rollout.replay.groups=2 rollout.replay.max_uses=2 total_train_steps=4"
PRESETS = {
    "opo": "actor.mini_batches=1",
    "ppo": "critic.optimizer.lr=0.01",
    "ttrl": "reward= gconfig.n_samples=6 gconfig.max_new_tokens=24 algorithm.update_samples=3",
}
"""Keys that a preset is given besides; most need none."""

TRAIN = {
    "ppo/critic": "algorithm=ppo critic.optimizer.lr=0.01 critic.warmup_steps=1 critic.value_clip=0.05 "
    "algorithm.advantage.gamma=0.99 algorithm.advantage.lam=0.9 gconfig.n_samples=1",
    "ppo/shared": "algorithm=ppo critic.shared=true critic.loss_weight=0.5 algorithm.advantage.lam=0.9",
    "ppo/kl_in_reward": "algorithm=ppo critic.optimizer.lr=0.01 algorithm.kl.coefficient=0.1 algorithm.kl.where=reward "
    "algorithm.kl.target=0.01 algorithm.kl.horizon=100",
    "ppo/refresh": "algorithm=ppo critic.optimizer.lr=0.01 algorithm.kl.coefficient=0.1 reference.refresh_every_steps=2",
    "reference/k1": f"{REFERENCE} algorithm.kl.estimator=k1 algorithm.kl.importance=true",
    "reference/k2": f"{REFERENCE} algorithm.kl.estimator=k2",
    "reference/k3": REFERENCE,
    "reference/k3_plus": f"{REFERENCE} algorithm.kl.estimator=k3_plus",
    "reference/refresh": f"{REFERENCE} reference.refresh_every_steps=1",
    "reference/other": f"{REFERENCE} reference.path=INPUTS/tiny-llama-1",
    "reference/target": f"{REFERENCE} algorithm.kl.target=0.01 algorithm.kl.horizon=100",
    "filter/dynamic_sampling": "algorithm=grpo algorithm.filter=dynamic_sampling reference.refresh_every_steps=2 "
    "algorithm.kl.coefficient=0.1 gconfig.n_samples=3",
    "filter/accuracy_band": "algorithm=grpo algorithm.filter=accuracy_band algorithm.filter.high=0.6",
    "filter/top_entropy": "algorithm=grpo algorithm.token_filter=top_entropy algorithm.entropy_coefficient=0.01",
    "shaping": "algorithm=grpo 'algorithm.shaping=[{name: scale, factor: 2}, {name: clip, high: 1.5}, penalize_truncated, "
    "{name: overlong, buffer_tokens: 4}]'",
    "shaping/mask_truncated": "algorithm=grpo algorithm.shaping=[mask_truncated]",
    "advantage/gae": "algorithm=grpo algorithm.advantage=gae algorithm.advantage.whitened=false critic.shared=true",
    "loss/dual_clip": "algorithm=grpo algorithm.policy_loss.dual_clip=1.1 algorithm.policy_loss.two_sided=1.5",
    "loss/cispo": "algorithm=cispo algorithm.policy_loss.clip_low=0.1 algorithm.policy_loss.clip_high=0.2",
    "loss/dppo": "algorithm=dppo algorithm.policy_loss.threshold=0.01",
    "loss/gspo_token": "algorithm=gspo algorithm.policy_loss=gspo_token",
    "loss/clip_cov": "algorithm=grpo algorithm.policy_loss=clip_cov algorithm.policy_loss.share=0.1 "
    "algorithm.policy_loss.low=0.01",
    "loss/kl_cov": "algorithm=grpo algorithm.policy_loss=kl_cov algorithm.policy_loss.share=0.1",
    "replay/mask": f"algorithm=grpo {REPLAY}",
    "replay/truncate": f"algorithm=dapo algorithm.correction.weight=truncate {REPLAY}",
    "replay/sequences": f"algorithm=gspo {REPLAY}",
    "replay/reject": f"algorithm=sapo {REPLAY} algorithm.correction.reject.low=0.1 algorithm.correction.reject.high=3",
    "replay/geometric": f"algorithm=sapo {REPLAY} algorithm.correction.reject=geometric "
    "algorithm.correction.reject.low=0.8 algorithm.correction.reject.high=1.2",
    "replay/negative_drift": f"algorithm=grpo {REPLAY} algorithm.correction.reject=negative_drift "
    "algorithm.correction.reject.threshold=0.05",
    "replay/m2po": f"algorithm=m2po {REPLAY}",
    "replay/dppo": f"algorithm=dppo algorithm.policy_loss.divergence=kl algorithm.policy_loss.threshold=0.01 {REPLAY}",
    "replay/vespo": f"algorithm=vespo {REPLAY}",
    "replay/importance": f"algorithm=grpo {REPLAY} algorithm.kl.coefficient=0.1 algorithm.kl.importance=true",
    "micro_batches": "algorithm=grpo actor.max_tokens_per_micro_batch=48 actor.epochs_per_batch=2 "
    "actor.gradient_checkpointing=true",
    "optimizer": "algorithm=grpo actor.optimizer.schedule=cosine actor.optimizer.warmup_steps=2 "
    "actor.optimizer.weight_decay=0.1 actor.optimizer.max_grad_norm=0.1",
    "curriculum": "algorithm=grpo curriculum.round_rows=6 total_train_steps=4",
    "sources": "algorithm=grpo train_dataset.path=null "
    "'train_dataset.sources=[{path: INPUTS/rows, weight: 2}, {path: addition, reward: math}]'",
    "evaluation": "algorithm=grpo evaluate.every_steps=2 evaluate.n_samples=4 evaluate.max_rows=4",
    "multi_turn": "algorithm=grpo workflow=multi_turn reward=INPUTS/rewards.py:never_right total_train_steps=2 "
    "rollout.engine.max_running=1",  # later turns come in any order
    "sampling": "algorithm=grpo gconfig.top_p=0.9 gconfig.top_k=50 gconfig.min_new_tokens=3 gconfig.temperature=0.8 "
    "algorithm.allow_truncated_sampling=true",
    "first_token": "algorithm=grpo gconfig.first_token_temperature=3",
    "decoupled": "algorithm=grpo placement=decoupled",
    "asynchronous/1": f"{BEHIND} {REFERENCE} rollout.max_head_offpolicyness=1 reward=INPUTS/rewards.py:one_behind",
    "asynchronous/2": f"{BEHIND} algorithm=ppo critic.optimizer.lr=0.01 rollout.max_head_offpolicyness=2 "
    "reward=INPUTS/rewards.py:two_behind",
    "lora": "algorithm=grpo actor.lora.rank=4 algorithm.kl.coefficient=0.1",
    "lora/ppo": "algorithm=ppo critic.optimizer.lr=0.01 actor.lora.rank=4 critic.lora.rank=2",
    "two_ranks/grpo": f"{REFERENCE} actor.backend=fsdp:d2 reference.refresh_every_steps=1",
    "two_ranks/ppo": "algorithm=ppo critic.optimizer.lr=0.01 actor.backend=fsdp:d2",
    "two_ranks/tensor": "algorithm=dapo actor.backend=fsdp:d1t2",
}
OTHERS = {
    "sft": ("sft", f"{SUMS} evaluate.every_steps=3 evaluate.max_rows=4"),
    "sft/lora": ("sft", f"{SUMS} actor.lora.rank=4 actor.lora.dropout=0.2"),
    "sft/two_ranks": ("sft", f"{SUMS} actor.backend=fsdp:d2"),
    **{f"preference/{loss}": ("preference", f"{PAIRS} loss={loss}") for loss in ("dpo", "ipo", "kto", "simpo", "orpo")},
    "preference/two_ranks": ("preference", f"{PAIRS} loss=dpo actor.backend=fsdp:d2"),
    "reward/pairs": ("reward", f"{PAIRS} margin=0.1"),
    "reward/steps": ("reward", "train_dataset.path=INPUTS/steps.jsonl batch_size=8 supervision=steps"),
    "distill": ("distill", f"{ROLLOUT} gconfig.n_samples=1 actor.mini_batches=1 teacher.path=INPUTS/tiny-llama-1"),
}
"""Name → another command than `train`, and its keys."""

REWARDS = '''
import asyncio

SAMPLES, PROMPTS = 4, 4  # gconfig.n_samples and rollout.batch_size
called, returned = [], []


def share(completion_ids):
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))


async def parts(completion_ids):
    even = share(completion_ids)
    low = sum(token < 99 for token in completion_ids) / max(1, len(completion_ids))
    return {"even": even, "low": low, "accuracy": float(even >= 0.5)}


def never_right(completion_ids):
    return {"reward": share(completion_ids) - 1.0, "accuracy": 0.0}


async def in_turn(completion_ids, place, eta):
    """Judges a step's samples once those of the `eta` steps after it are written, and one prompt after another: so no answer
    is written while weights change, and each step is trained on answers that are `eta` versions old."""
    called.append(place)
    ahead = (place // PROMPTS + 1 + eta) * PROMPTS * SAMPLES
    while len(called) < ahead or len(returned) < place * SAMPLES:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)  # the prompt before it becomes a group
    returned.append(place)
    return share(completion_ids)


async def one_behind(completion_ids, place):
    return await in_turn(completion_ids, place, 1)


async def two_behind(completion_ids, place):
    return await in_turn(completion_ids, place, 2)
'''


def all_runs(presets: Sequence[str]) -> dict[str, list[str]]:
    """Name → words of its command line, in which `INPUTS` stands for the folder of inputs."""
    lines = {f"preset/{name}": f"train {EACH} {ROLLOUT} algorithm={name} {PRESETS.get(name, '')}" for name in presets}
    lines |= {name: f"train {EACH} {ROLLOUT} {items}" for name, items in TRAIN.items()}
    lines |= {name: f"{command} {EACH} {items}" for name, (command, items) in OTHERS.items()}
    return {name: _words(line) for name, line in lines.items()}


def _words(line: str) -> list[str]:
    """The last of several equal keys counts; one without a value is left out."""
    words = {word.partition("=")[0]: word for word in shlex.split(line)}
    return [word for word in words.values() if not word.endswith("=")]


# ------------------------------------------------------------------ making them


def make_inputs(folder: Path) -> str:
    """Writes the models, rows and rewards of the runs; returns a digest of them all."""
    for seed in (0, 1):
        tiny_model_folder(folder, seed=seed)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "rows").mkdir()
    for split, first, count in (("train", 0, 32), ("test", 40, 8)):
        numbers = range(first, first + count)
        rows = ({"question": f"What is the sum of {n} and 4?", "answer": f"{n + 4}", "place": n - first} for n in numbers)
        (folder / f"rows/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    step = {"prompt": "2 + 2?", "completions": ["Two and two", "make 4"]}
    steps = (step | {"labels": [i % 2 == 0, i % 3 == 0]} for i in range(24))
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """One run."""

    command: list[str]
    """Words behind `tandem`; `INPUTS` stands for the folder of inputs."""

    seconds: float
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Step → name → value, without those that measure the machine."""

    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File and name of each tensor of the last checkpoint → its digest, its norm and its sketch."""

    error: str = ""
    """The end of its output, which says how it failed."""


def run(name: str, command: Sequence[str], inputs: Path) -> Outcome:
    """Makes one run in a process that is forked from this one, so that nothing is imported again."""
    words = [word.replace("INPUTS", str(inputs)) for word in command]
    trial, log = name.replace("/", "."), inputs / f"{name.replace('/', '.')}.log"
    began = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_tandem, args=([*words, f"trial_name={trial}"], log))
    process.start()
    try:
        process.join(LIMIT_S)
    finally:  # also after Ctrl-C, which a session of its own does not hear
        late = process.is_alive()
        if late and process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    seconds = round(time.monotonic() - began, 1)
    if late or process.exitcode:
        how = f"not done after {LIMIT_S:g} s" if late else f"exit code {process.exitcode}"
        lines = ["it printed nothing", *log.read_text(errors="replace").replace(str(inputs), "INPUTS").strip().splitlines()]
        cause = next((line for line in lines if line.startswith("error:")), lines[-1])
        return Outcome(list(command), seconds, error=f"{how}: {cause}")
    folder = inputs / "runs/tandem" / trial
    return Outcome(list(command), seconds, metrics_of(folder), tensors_of(folder))


def _tandem(words: Sequence[str], log: Path) -> None:
    """`python -m tandem`, in a session of its own, with its output in a file."""
    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.argv = ["tandem", *words]
    runpy.run_module("tandem", run_name="__main__")


def metrics_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Every line of a run's `metrics.jsonl`, by step."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {str(row.pop("step")): {name: x for name, x in row.items() if not NOT_COMPARED.search(name)} for row in rows}


def tensors_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Every tensor of a run's last checkpoint."""
    last = max((folder / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    described = {}
    for path in sorted(last.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                described[f"{path.relative_to(last)}:{name}"] = describe(file.get_tensor(name))
    return described


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Digest, norm and sketch: its products with fixed random signs. The mean square by which two sketches differ estimates
    the squared distance of the tensors."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    values = tensor.double().flatten().numpy()
    signs = numpy.random.default_rng(values.size).integers(0, 2, (SKETCH, values.size)) * 2.0 - 1.0
    digest = hashlib.sha256(kind.encode() + data).hexdigest()
    return {"digest": digest, "norm": float(numpy.linalg.norm(values)), "sketch": [float(x) for x in signs @ values]}


# ------------------------------------------------------------------ comparing them


@dataclass(frozen=True)
class Difference:
    """The differences of a run from what it was."""

    changed: list[str] = field(default_factory=list)
    """A sentence for each, in order of step and name; tensors last."""

    removed: list[str] = field(default_factory=list)
    """Metrics that are no more."""

    added: list[str] = field(default_factory=list)
    """Metrics that were not before; they make no run different."""


def compare(before: Outcome, after: Outcome) -> Difference:
    """The differences between two runs of one command."""
    if before.error or after.error:
        same = before.error == after.error
        return Difference([] if same else [f"before: {before.error or 'it ran'}; now: {after.error or 'it ran'}"])
    old, new = ({name for row in outcome.metrics.values() for name in row} for outcome in (before, after))
    changed = []
    for step in sorted(before.metrics.keys() | after.metrics.keys(), key=int):
        one, two = before.metrics.get(step), after.metrics.get(step)
        if one is None or two is None:
            changed.append(f"{'a new' if one is None else 'no'} line of metrics for step {step}")
            continue
        both = [name for name in {**one, **two} if name in old and name in new]
        changed += [f"step {step} {n}: {_by(one.get(n), two.get(n))}" for n in both if repr(one.get(n)) != repr(two.get(n))]
    changed += _tensors(before.tensors, after.tensors)
    return Difference(changed, sorted(old - new), sorted(new - old))


def _by(one: Any, two: Any) -> str:
    both = [value for value in (one, two) if isinstance(value, (int, float))]
    return f"{one!r} → {two!r}" + (f", by {two - one:.3g}" if len(both) == 2 else "")


def _tensors(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, old in before.items():
        if name not in after:
            yield f"tensor {name} is missing"
        elif old["digest"] != after[name]["digest"]:
            squares = [(x - y) ** 2 for x, y in zip(old["sketch"], after[name]["sketch"], strict=True)]
            far = math.sqrt(sum(squares) / len(squares))
            yield f"tensor {name}: moved by about {far:.2g}, its norm is {old['norm']:.4g}"
    yield from (f"tensor {name} is new" for name in after if name not in before)


def verdict(difference: Difference) -> str:
    """One line: what differs first, and how much does in all."""
    changed, removed = difference.changed, [f"no metric {name} any more" for name in difference.removed]
    if not changed and not removed:
        return "same"
    tensors = sum(text.startswith("tensor ") for text in changed)
    names = dict.fromkeys(text.split()[2].rstrip(":") for text in changed if text.startswith("step "))
    listed = f" ({', '.join([*names][:6])}{', …' if len(names) > 6 else ''})" if len(names) > 1 else ""
    return f"DIFFERENT  {[*changed, *removed][0]}; in all {len(names)} metrics{listed}, {tensors} tensors"


# ------------------------------------------------------------------ the command


def presets() -> list[str]:
    """Names of `tandem algorithms`."""
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "tandem", "algorithms", "--json"], capture_output=True, text=True, check=True
    )
    return [preset["name"] for preset in json.loads(answer.stdout)]


def surroundings(inputs: str) -> dict[str, str]:
    """Everything besides the source that decides about figures."""
    return {
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "inputs": inputs,
    }


def source() -> str:
    """The folder of the source of `tandem`, and its commit."""
    show = "import tandem, pathlib; print(pathlib.Path(tandem.__file__).parent)"
    folder = subprocess.run([sys.executable, "-P", "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    commit = subprocess.run(["git", "-C", folder, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return f"{folder} ({commit.stdout.strip() or 'no commit'})"


def import_once(runs: Mapping[str, Sequence[str]], inputs: Path) -> None:
    """Imports here what the runs need, by a dry run of each command."""
    for words in {command[0]: command for command in runs.values()}.values():
        sys.argv = ["tandem", *(word.replace("INPUTS", str(inputs)) for word in words), "--dry-run"]
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                runpy.run_module("tandem", run_name="__main__")
        except SystemExit:
            pass


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Names that are asked for: by themselves, with what is below them, or by a pattern; all of them where none is."""
    return [n for n in names if not only or any(fnmatch.fnmatch(n, p) or n.startswith(f"{p}/") for p in only)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path, metavar="FILE", help="the record, JSON")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="make these runs only; may be repeated")
    options = parser.parse_args(arguments)
    record = json.loads(options.file.read_text()) if options.command == "compare" else None
    with tempfile.TemporaryDirectory(prefix="same-runs-") as folder:
        inputs = Path(folder).resolve()
        around = surroundings(make_inputs(inputs))
        if record is not None and record["surroundings"] != around:
            print(
                f"warning: {options.file} was recorded with {record['surroundings']}, and here is {around}", file=sys.stderr
            )
        runs = all_runs(presets()) if record is None else {n: o["command"] for n, o in record["runs"].items()}
        names = chosen(list(runs), options.only)
        if not names:
            parser.error(f"--only names no run; there are {', '.join(runs)}")
        before = "" if record is None else f", compared with {record['source']}"
        print(f"{len(names)} runs of {source()}{before}", flush=True)
        import_once({name: runs[name] for name in names}, inputs)
        outcomes, differences = {}, {}
        for name in names:
            outcomes[name] = run(name, runs[name], inputs)
            said = outcomes[name].error or "done"
            if record is not None:
                differences[name] = compare(Outcome(**record["runs"][name]), outcomes[name])
                said = verdict(differences[name])
            print(f"{name:<28}{outcomes[name].seconds:6.1f} s  {said}", flush=True)
    if record is None:
        text = {"source": source(), "surroundings": around, "runs": {name: asdict(one) for name, one in outcomes.items()}}
        options.file.write_text(json.dumps(text))
        return int(any(one.error for one in outcomes.values()))
    return summary(differences)


def summary(differences: Mapping[str, Difference]) -> int:
    """Prints what came of all runs; returns the exit status."""
    for what in ("added", "removed"):
        runs: dict[str, int] = {}
        for difference in differences.values():
            for name in getattr(difference, what):
                runs[name] = runs.get(name, 0) + 1
        if runs:
            print(f"metrics {what}: {', '.join(f'{name} ({count} runs)' for name, count in sorted(runs.items()))}")
    different = [name for name, one in differences.items() if one.changed or one.removed]
    print(f"{len(differences) - len(different)} of {len(differences)} runs are the same")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
