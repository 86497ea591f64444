"""`tandem verify-weights`: tests whether an engine serves the weights of a model folder, by scoring its answers again."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import pack
from tandem.api.chat_template import render
from tandem.api.engines import InferenceEngine
from tandem.api.requests import LLMRequest, LLMResponse, NoiseKey
from tandem.api.team import Team
from tandem.config.errors import ConfigError
from tandem.config.experiment import TrainConfig
from tandem.config.load import load_config
from tandem.config.rollout import GenerationConfig, VerifyConfig
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tandem.models.catalog import resolve
from tandem.models.hardware import resolve_dtype
from tandem.models.tokenizer import load_tokenizer
from tandem.proof.verification import Scorer, Verifier, beginning
from tandem.state.existing import checkpoints, step_of
from tandem.state.resuming import named_run
from tandem.weights.publisher import VersionArchive

QUESTIONS = (
    "What is {} + {}?",
    "Name {} animals that live in water, then {} that live on land.",
    "Write a sentence of {} words, and one of {} words.",
    "Count from {} to {}.",
)
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Model:
    """The expected weights, and others that the engine may have instead."""

    folder: Path
    number: int
    """Version of the expected weights: the step of a checkpoint, 0 for a model folder."""

    others: Mapping[int, Path]
    """Version → folder of the other weights."""


def find_model(path: str) -> Model:
    """Finds the expected weights. ``path``: a model, or a run (its newest checkpoint, or that of a named step).

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
    with contextlib.suppress(ConfigError):  # another kind of run, or its model is gone: then its first weights are unknown
        others[0] = resolve(load_config(TrainConfig, run / "config.yaml").config.actor.path)
    return Model(expected, step_of(expected), others)


def encode(tokenizer: PreTrainedTokenizerBase, number: int) -> tuple[int, ...]:
    """Returns the tokens of question ``number``, as a chat if the model has a template."""
    text = QUESTIONS[number % len(QUESTIONS)].format(2 + number // 2, 3 + number)
    if not tokenizer.chat_template:
        return tuple(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    return tuple(tokenizer.encode(render(tokenizer, messages, add_generation_prompt=True), add_special_tokens=False))


async def ask(engine: InferenceEngine, prompts: Sequence[tuple[int, ...]], gconfig: GenerationConfig) -> list[LLMResponse]:
    """Returns one answer per prompt, all generated together."""
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
    dtype: Literal["bfloat16", "float32"],
    questions: int,
    tolerance: float | None,
    device: str = "cpu",
) -> dict[str, float]:
    """Returns metrics ``gap/*`` of the engine's answers under the expected weights, and the ``version`` that it reports.

    ``dtype``: that of the engine.

    Raises:
        DeliveryDisproved: the engine has other weights, another temperature or tokenizer; the message names a checkpoint
            that fits, if there is one.
    """
    tokenizer = load_tokenizer(model.folder)
    responses = asyncio.run(ask(engine, [encode(tokenizer, i) for i in range(questions)], gconfig))
    rows = []
    for number, response in enumerate(responses):
        size, drawn = len(response.input_ids), len(response.output_ids)
        rows.append(
            {
                "input_ids": torch.tensor(response.input_ids + response.output_ids),
                "loss_mask": torch.tensor([False] * size + [True] * drawn),
                "rollout_logprobs": torch.tensor([0.0] * size + list(response.logprobs)),
                "versions": torch.tensor([-1] * size + [model.number] * drawn),
                "temperature": response.temperature,
                "group_id": number,
            }
        )
    trainer = SpreadEngine(TrainEngineConfig(path=str(model.folder), dtype=dtype), total_steps=0, device=device)
    archive = VersionArchive(lambda number: True, model.number)
    for number, folder in model.others.items():
        source = beginning(folder, trainer)
        if source is not None:
            archive.keep(number, source)
    verifier = Verifier(
        Scorer(trainer, archive, resolve_dtype(dtype, device), Team(), rounds=False),
        VerifyConfig(every_steps=1, tolerance=tolerance),
        resolve_dtype(dtype, device),
        trajectories=questions,
        confirmations=1,
    )
    metrics = verifier.verify(pack(rows), model.number)
    return metrics | {"version": float(engine.version.number), "tokens": float(sum(len(r.output_ids) for r in responses))}
