"""Supervised fine-tuning: `tandem sft`. Rows with a question and an answer, packed, trained on the answer's tokens only."""

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import pack
from tandem.api.collective import together
from tandem.api.failures import DataFailure
from tandem.config.arithmetic import arithmetic, total_steps
from tandem.config.errors import ConfigError
from tandem.config.experiment import SFTConfig
from tandem.config.load import Resolved, describe
from tandem.data.loader import Loader
from tandem.engines.train.build import build_train_engine
from tandem.models.catalog import resolve
from tandem.models.tokenizer import check_chat_template, load_tokenizer
from tandem.roles.language_model import LanguageModel
from tandem.tracking.statistics import PhaseTimer, peak_memory_gib
from tandem.tracking.tracker import Tracker
from tandem.trainers.evaluation import is_due
from tandem.trainers.parts import check_sinks, open_rows
from tandem.trainers.process import start_process
from tandem.trainers.summary import Summary, open_run, save_if_due

log = logging.getLogger(__name__)


class Encoder:
    """Turns rows into trajectories: the chat template around question and answer, the loss on the answer alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: SFTConfig):
        check_chat_template(tokenizer)
        self.tokenizer, self.config = tokenizer, config

    def encode(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """``input_ids [S]``, ``loss_mask [S]`` and the temperature of one row.

        Raises:
            DataFailure: no answer, an answer that the template does not append, or more tokens than `max_length`.
        """
        if not row.get("answer"):
            raise DataFailure("no_answer", f"row {row.get('index')} has no answer to learn")
        messages = self._with_system(row["messages"])
        answered = [*messages, {"role": "assistant", "content": str(row["answer"])}]
        question = self._render(messages, add_generation_prompt=True)
        whole = self._render(answered, add_generation_prompt=False)
        if not whole.startswith(question):
            raise DataFailure("template_rewrites", "the chat template does not put the answer behind the question")
        prompt = self.tokenizer.encode(question, add_special_tokens=False)
        answer = self.tokenizer.encode(whole.removeprefix(question), add_special_tokens=False)
        if len(prompt) + len(answer) > self.config.max_length:
            raise DataFailure("too_long", f"{len(prompt) + len(answer)} tokens, max_length={self.config.max_length}")
        mask = torch.tensor([False] * len(prompt) + [True] * len(answer))
        return {"input_ids": torch.tensor(prompt + answer), "loss_mask": mask, "temperature": 1.0}

    def _with_system(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """As `Chat` does it: a row's own system message stays the only one."""
        if self.config.system_prompt is None or any(message["role"] == "system" for message in messages):
            return list(messages)
        return [{"role": "system", "content": self.config.system_prompt}, *messages]

    def _render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> str:
        kwargs = dict(self.config.chat_template_kwargs)
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )


class BatchMaker:
    """Draws rows until a batch is full; rows that cannot be trained on are counted by reason, never silently lost."""

    def __init__(self, loader: Loader, encoder: Encoder, batch_size: int):
        self.loader, self.encoder, self.batch_size = loader, encoder, batch_size
        self.dropped: Counter[str] = Counter()

    def next_batch(self) -> TensorDict:
        """The next ``batch_size`` sequences.

        Raises:
            ConfigError: a whole pass over the data gave too few usable rows.
        """
        rows: list[dict[str, Any]] = []
        for _ in range(self.batch_size + len(self.loader.dataset)):
            if len(rows) == self.batch_size:
                break
            try:
                rows.append(self.encoder.encode(next(self.loader)))
            except DataFailure as failure:
                self.dropped[failure.reason] += 1
                log.info("row dropped: %s", failure)
        if len(rows) < self.batch_size:
            raise ConfigError(f"no {self.batch_size} usable rows in a whole pass over the data: {dict(self.dropped)}")
        return pack(rows)


def train(resolved: Resolved, *, dry_run: bool = False) -> Summary:
    """Runs supervised fine-tuning; ``dry_run`` says what it would do."""
    config: SFTConfig = resolved.config
    check_sinks(config)
    rows = open_rows(config)
    steps = total_steps(config, len(rows.train))
    if dry_run:
        print(describe(resolved))
        print(arithmetic(config, len(rows.train)))
        return Summary(folder=None, steps=0)
    process = start_process(config)
    folder = resolve(config.actor.path)
    tokenizer = load_tokenizer(folder)
    encoder = Encoder(tokenizer, config)
    with contextlib.ExitStack() as stack:
        run = open_run(config, process, stack)
        engine = build_train_engine(config.actor, total_steps=steps, device=process.device)
        model = LanguageModel(engine)
        batches = BatchMaker(
            Loader(rows.train, seed=config.seed, shuffle=config.train_dataset.shuffle), encoder, config.batch_size
        )
        valid = validation_batch(encoder, rows.valid)
        tracker = (
            stack.enter_context(Tracker(run.path, config.tracking, total_steps=steps, run_name=run.path.name))
            if run
            else None
        )
        timer, checkpoint = PhaseTimer(), None
        before = evaluate_if_due(config, model, valid, 0, steps)
        if before and tracker is not None:
            tracker.log(0, before)
        timer.metrics()  # what came before the first step is not part of it
        for step in range(1, steps + 1):
            batch = batches.next_batch()
            with timer("train"):
                metrics = model.train_lm(batch)
            metrics |= {f"rows/dropped/{reason}": float(count) for reason, count in batches.dropped.items()}
            metrics |= evaluate_if_due(config, model, valid, step, steps)
            metrics |= timer.metrics() | {"memory/peak_gib": peak_memory_gib()}
            metrics["tokens_per_s/train"] = int(batch["cu_seqlens"][-1]) / metrics["time/train_s"]
            with together():  # a disk that is full ends all ranks
                if tracker is not None:
                    tracker.log(step, metrics)
            checkpoint = save_if_due(config, run, step, steps, engine, tokenizer.save_pretrained) or checkpoint
        return Summary(folder=run.path if run else None, steps=steps, metrics=metrics, checkpoint=checkpoint)


def evaluate_if_due(
    config: SFTConfig, model: LanguageModel, valid: TensorDict | None, step: int, steps: int
) -> dict[str, float]:
    """The loss of the held-out answers where `evaluate.every_steps` asks for it at this step; step 0 is before the first."""
    if valid is None or not is_due(config.evaluate.every_steps, step, steps):
        return {}
    return {f"eval/{name}": value for name, value in model.evaluate_lm(valid).items()}


def validation_batch(encoder: Encoder, rows: Sequence[Mapping[str, Any]]) -> TensorDict | None:
    """The held-out rows that fit, as one batch; None where there are no rows, because the run never evaluates.

    Raises:
        ConfigError: there are rows, and none of them can be used.
    """
    if not rows:
        return None
    encoded = []
    for row in rows:
        with contextlib.suppress(DataFailure):
            encoded.append(encoder.encode(row))
    if not encoded:
        raise ConfigError("evaluate.every_steps is set, but no row of valid_dataset can be used")
    return pack(encoded)
