"""Measures what it costs that models take turns in memory: `time/switch_s` against the whole step.

    python benchmarks/switching.py [--run grpo] [--path smollm2-135m] [--judges 3] [--limit-gib 2.5] [--steps 5]
    python benchmarks/switching.py --run ppo [--awake trained]
    python benchmarks/switching.py --prompts 2 --new-tokens 32 --judges 2

Without `--limit-gib`, the limit of `ppo` is the smallest under which no optimizer state moves in a step
(`--awake optimizer`, the default), or nothing of what is trained (`--awake trained`): the frozen models take turns.

Reach: at most 5 % of the step. `grpo` has a reference and reward models of the actor's shape, each with a base of its own.
`ppo` has a critic, a reference, two reward models, a cost model, and a judge that writes. In the first two steps each
model sleeps for the first time and its folder is compared with it; they are left out. Medians of the others.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.plan import plan_run
from tandem.flow.sleep_plan import GIB, sleep_plan_here
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.trainers.loop import train

MOST = 0.05


def make_judges(path: str, folder: Path, count: int, dtype: str) -> list[Path]:
    """Reward models of one shape whose numbers all differ, so that none shares anything."""
    made = []
    for number in range(count):
        torch.manual_seed(number)
        engine = SpreadEngine(TrainEngineConfig(path=path, dtype=dtype), total_steps=1, head="scalar")
        engine.load_weights((name, x + 0.001 * torch.randn_like(x)) for name, x in list(engine.weights()))
        made.append(folder / f"judge-{number}")
        engine.save(made[-1])
        load_tokenizer(resolve(path)).save_pretrained(made[-1])
    return made


def make_writer(path: str, folder: Path) -> Path:
    """A model of that shape that says "Score: 7" whatever it reads: each token of it is followed by the next one."""
    source = resolve(path)
    tokenizer, model = load_tokenizer(source), AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.001)
    model.config.tie_word_embeddings = False
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=True, add_generation_prompt=True)
    spoken = [list(asked["input_ids"])[-1], *tokenizer("Score: 7", add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for token, following in zip(spoken, [*spoken[1:], tokenizer.eos_token_id], strict=True):
            hidden = model.model.norm(model.model.embed_tokens.weight[token])
            model.lm_head.weight[following] = 10 * hidden / hidden.norm()
    model.save_pretrained(folder / "writer")
    tokenizer.save_pretrained(folder / "writer")
    return folder / "writer"


def grpo(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Keys of a reference and reward models."""
    judges = make_judges(arguments.path, folder, arguments.judges, arguments.dtype)
    reward = " + ".join(f"0.1*model(path={judge}, name=j{number})" for number, judge in enumerate(judges))
    return [f"reward=gsm8k + {reward}", "algorithm.kl.coefficient=0.05", f"memory_limit_gib={arguments.limit_gib or 2.5}"]


def ppo(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Keys of every kind of model."""
    first, second, cost = make_judges(arguments.path, folder, 3, arguments.dtype)
    reward = f"gsm8k + 0.1*model(path={first}, name=first) + 0.1*model(path={second}, name=second)"
    reward += f" + model(path={cost}, name=cost) + 0.1*judge(model={make_writer(arguments.path, folder)}, max_tokens=16)"
    keys = [f"reward={reward}", "constraint.cost=cost", "constraint.limit=0.5", "algorithm=ppo"]
    limit = f"memory_limit_gib={arguments.limit_gib or 99}"
    return [*keys, "algorithm.kl.coefficient=0.05", limit]


def smallest_limit(keys: list[str], awake: str) -> float:
    """The smallest `memory_limit_gib`, in steps of 0.05, under which no step moves what shall stay awake."""
    config = load_config(TrainConfig, None, keys).config
    plan = sleep_plan_here(config, plan_run(config))
    assert plan is not None, "a limit is set"
    limit = plan.least(plan.largest)
    while True:
        limit += int(0.05 * GIB)
        steady = replace(plan, limit=limit).steady()
        moving = {part for done in steady if done.stage.each_step for part in (*done.moves.sleep, *done.moves.wake)}
        if awake == "trained":
            moves = any(part.resident in ("actor", "critic") for part in moving)
        else:
            moves = any(part.what == "optimizer" for part in moving)
        if not moves:
            return round(limit / GIB, 2)


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--awake", choices=("optimizer", "trained"), default="optimizer")
    parser.add_argument("--path", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--judges", type=int, default=3)
    parser.add_argument("--limit-gib", type=float)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"actor.path={arguments.path}", f"actor.dtype={arguments.dtype}", f"run.root={folder}/runs"]
        keys += ["train_dataset.path=addition", *(grpo if arguments.run == "grpo" else ppo)(arguments, Path(folder))]
        keys += [f"rollout.batch_size={arguments.prompts}", f"gconfig.max_new_tokens={arguments.new_tokens}"]
        keys += ["gconfig.n_samples=8", "evaluate.every_steps=null"]
        keys += ["rollout.engine.kv_cache_gib=0.25", "checkpoint.resumable=false"]
        keys += ["rollout.verify.every_steps=null", "checkpoint.at_end=false", "tracking.plot_every_steps=null"]
        keys += [f"total_train_steps={arguments.steps}"]
        if "memory_limit_gib=99" in keys:
            keys += [f"memory_limit_gib={smallest_limit(keys, arguments.awake)}"]
        config = load_config(TrainConfig, None, keys)
        run = train(config).folder
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row.get("step", 0) > 2 and "time/switch_s" in row]
    names = sorted(name for name in rows[-1] if name.startswith(("time/", "memory/moved")))
    share = statistics.median(row["time/switch_s"] / row["time/step_s"] for row in rows)
    medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in names}
    figures = {"share": share, "reached": share <= MOST, "limit_gib": config.config.memory_limit_gib, **medians}
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
