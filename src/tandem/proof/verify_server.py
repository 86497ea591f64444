"""`tandem verify-weights`: does an engine serve the weights of a model folder? Asks it, and scores what it says."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import pack
from tandem.api.chat_template import render
from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey
from tandem.api.team import Team
from tandem.config.delivery import VerifyConfig
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.generation import GenerationConfig
from tandem.config.load import load_config
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.build import build_train_engine
from tandem.models.catalog import resolve
from tandem.models.precision import resolve_dtype
from tandem.models.tokenizer import load_tokenizer
from tandem.proof.scoring import Scorer, beginning
from tandem.proof.verification import Verifier
from tandem.state.existing import checkpoints, step_of
from tandem.state.named import named_run
from tandem.weights.archive import VersionArchive

QUESTIONS = (
    "What is {} + {}?",
    "Name {} animals that live in water, then {} that live on land.",
    "Write a sentence of {} words, and one of {} words.",
    "Count from {} to {}.",
)
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Model:
    """The weights that are expected, and others that the engine may have instead."""

    folder: Path
    number: int
    """Its version: the step of a checkpoint, 0 for a model folder."""

    others: Mapping[int, Path]


def find_model(path: str) -> Model:
    """``path``: a model, or a run, whose newest checkpoint is expected, or the one of a step.

    Raises:
        ConfigError: there is no such model, or the run has no checkpoint.
    """
    named = named_run(path)
    if named is None:
        return Model(resolve(path), 0, {})
    run, saved = named.folder, checkpoints(named.folder / "checkpoints")
    if not saved:
        raise ConfigError(f"{run} has no checkpoint whose weights could be compared; set checkpoint.every_steps")
    expected = saved[-1] if named.step is None else named.checkpoint
    others = {step_of(folder): folder for folder in saved if folder != expected}
    with contextlib.suppress(ConfigError):  # of another kind of run, or its model is gone: then its beginning is not known
        others[0] = resolve(load_config(TrainConfig, run / "config.yaml").config.actor.path)
    return Model(expected, step_of(expected), others)


def encode(tokenizer: PreTrainedTokenizerBase, number: int) -> tuple[int, ...]:
    """Question ``number``, as a chat where the model has a template."""
    text = QUESTIONS[number % len(QUESTIONS)].format(2 + number // 2, 3 + number)
    if not tokenizer.chat_template:
        return tuple(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    return tuple(tokenizer.encode(render(tokenizer, messages, add_generation_prompt=True), add_special_tokens=False))


async def ask(engine: InferenceEngine, prompts: Sequence[tuple[int, ...]], gconfig: GenerationConfig) -> list[LLMResponse]:
    """One answer each, all together."""
    requests = [
        LLMRequest(ids, gconfig, NoiseKey(0, group=i), affinity=f"verify-{i}", deadline_s=DEADLINE_S)
        for i, ids in enumerate(prompts)
    ]
    return list(await asyncio.gather(*(engine.agenerate(request) for request in requests)))


def verify_engine(
    engine: InferenceEngine,
    model: Model,
    gconfig: GenerationConfig,
    *,
    dtype: str,
    questions: int,
    tolerance: float | None,
    device: str = "cpu",
) -> dict[str, float]:
    """Metrics ``gap/*`` of the engine's answers under the expected weights, and ``version`` as the engine says it.

    ``dtype``: ``bfloat16`` or ``float32``, of the engine.

    Raises:
        DeliveryDisproved: the engine has other weights, another temperature or tokenizer; names a checkpoint that fits.
    """
    tokenizer = load_tokenizer(model.folder)
    responses = asyncio.run(ask(engine, [encode(tokenizer, i) for i in range(questions)], gconfig))
    rows = []
    for number, response in enumerate(responses):
        size, made = len(response.input_ids), len(response.output_ids)
        rows.append(
            {
                "input_ids": torch.tensor(response.input_ids + response.output_ids),
                "loss_mask": torch.tensor([False] * size + [True] * made),
                "rollout_logprobs": torch.tensor([0.0] * size + list(response.logprobs)),
                "versions": torch.tensor([-1] * size + [model.number] * made),
                "temperature": response.temperature,
                "group_id": number,
            }
        )
    trainer = build_train_engine(TrainEngineConfig(path=str(model.folder), dtype=dtype), total_steps=0, device=device)
    archive = VersionArchive(lambda number: True, model.number)
    for number, folder in model.others.items():
        source = beginning(folder, trainer)
        if source is not None:
            archive.keep(number, source)
    verifier = Verifier(
        Scorer(trainer, archive, resolve_dtype(dtype, device), Team(), rounds=False),
        VerifyConfig(every_steps=1, trajectories=questions, tolerance=tolerance),
        resolve_dtype(dtype, device),
        confirmations=1,
    )
    metrics = verifier.verify(pack(rows), model.number)
    return metrics | {"version": float(engine.version.number), "tokens": float(sum(len(r.output_ids) for r in responses))}
