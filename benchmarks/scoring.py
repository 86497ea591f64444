"""Measures what scoring costs: a scalar reward model reads 64 answers, against the actor's update of the same tokens.

    python benchmarks/scoring.py [--path smollm2-135m] [--rounds 5]

Reach: at most 0.35. The reward model has the actor's shape, and a base and a head of its own. *Scoring* is everything that a
run does for the term: rendering and encoding the conversations, the forward pass, the values. *Update* is `ppo_update` of
GRPO on the same sequences, answers trained. Questions that groups share, answers of uneven length. The two are measured in
turns; the ratio is that of the medians.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from tandem.api.batch import pack
from tandem.api.workflow import Sample
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.flow.plan import plan_run
from tandem.flow.residents import open_reader
from tandem.flow.scoring import ScoreRole
from tandem.models.catalog import resolve
from tandem.models.tokenizer import load_tokenizer
from tandem.roles.actor import Actor

MOST = 0.35
TEXT = "the sum of these numbers is first we add ten and five then take away two so that three apples are left for her"
WORDS = TEXT.split(" ")


def make_judge(path: str, folder: Path, dtype: str) -> None:
    """A reward model of the same shape with other numbers, so that it shares nothing."""
    torch.manual_seed(1)
    engine = SpreadEngine(TrainEngineConfig(path=path, dtype=dtype), total_steps=1, head="scalar")
    engine.load_weights((name, x + 0.01 * torch.randn_like(x)) for name, x in list(engine.weights()))
    engine.save(folder)
    load_tokenizer(resolve(path)).save_pretrained(folder)


def samples_of(prompts: int, samples: int, prompt_words: int, most_words: int) -> list[Sample]:
    """Answers of a tenth of ``most_words`` up to all of it, to questions that a group shares."""
    draw, made = random.Random(0), []
    for _ in range(prompts):
        question = {"role": "user", "content": " ".join(draw.choices(WORDS, k=prompt_words))}
        for _ in range(samples):
            text = " ".join(draw.choices(WORDS, k=draw.randint(most_words // 10, most_words)))
            made.append(Sample((), 0.0, completion_text=text, messages=(question, {"role": "assistant", "content": text})))
    return made


def training_batch(sequences: Sequence[Mapping[str, Any]], samples: int) -> TensorDict:
    """The same sequences as a batch of the actor, with spread in every group."""
    rows = []
    for number, sequence in enumerate(sequences):
        mask = torch.tensor(sequence["loss_mask"])
        facts = {"input_ids": torch.tensor(sequence["input_ids"]), "loss_mask": mask, "temperature": 1.0}
        facts |= {"rollout_logprobs": torch.full((len(mask),), -10.0), "versions": torch.where(mask, 0, -1)}
        facts |= {"reward": float(number % 2), "stop_reason": 0, "group_id": number // samples, "sample_id": number}
        rows.append(facts | {"in_statistics": True, "in_loss": True})
    return pack(rows)


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--most-words", type=int, default=120)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_judge(arguments.path, Path(folder), arguments.dtype)
        keys = [f"actor.path={arguments.path}", f"actor.dtype={arguments.dtype}", "actor.optimizer.lr=0"]
        keys += ["train_dataset.path=addition", f"reward=model(path={folder})"]
        config = load_config(TrainConfig, None, keys).config
        plan = plan_run(config)
        (planned,) = plan.scores
        resident = plan.resident(planned.resident)
        assert resident is not None and resident.engine is not None
        engine = SpreadEngine(resident.engine, total_steps=0, head="scalar", trained=False)
        tokenizer = load_tokenizer(resolve(arguments.path))
        role = ScoreRole(planned, engine, open_reader(folder, tokenizer), len(tokenizer))
        trained = SpreadEngine(config.actor, total_steps=1000)
        actor = Actor(trained, config.algorithm, config.actor, max_head_offpolicyness=10**6)
        samples = samples_of(arguments.prompts, arguments.samples, arguments.prompt_words, arguments.most_words)
        result = measure(role, actor, samples, arguments.samples, arguments.rounds)
    print(json.dumps(result, indent=1))


def measure(role: ScoreRole, actor: Actor, samples: Sequence[Sample], group: int, rounds: int) -> dict[str, Any]:
    """Both, in turns."""

    def score() -> list[Mapping[str, Any]]:
        sequences = [role.read(sample, {}) for sample in samples]
        role.score(pack(sequences))
        return sequences

    batch = training_batch(score(), group)
    batch = actor.compute_advantages(actor.compute_proximal(batch))
    calls = {"score_s": score, "update_s": lambda: actor.ppo_update(batch)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}  # the first one warms up
    ratio = medians["score_s"] / medians["update_s"]
    found = {"score_to_update": ratio, "reached": ratio <= MOST, "answers": len(samples)}
    return found | {"tokens": int(batch["cu_seqlens"][-1]), "trained_tokens": int(batch["loss_mask"].sum()), **medians}


if __name__ == "__main__":
    main()
