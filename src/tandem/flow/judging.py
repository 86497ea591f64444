"""A reward model outside of a run: it judges what `tandem serve-reward` is asked."""

from collections.abc import Sequence
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from tandem.api.batch import pack
from tandem.api.failures import DataFailure
from tandem.api.media import reader_of
from tandem.config.errors import ConfigError
from tandem.config.train_engine import TrainEngineConfig
from tandem.engines.train.build import build_train_engine
from tandem.flow.scoring import ModelReader
from tandem.models.architecture import Architecture
from tandem.models.catalog import resolve
from tandem.models.foreign import read_hf_config
from tandem.models.heads import is_classifier
from tandem.models.tokenizer import load_tokenizer
from tandem.protocol.rewards import NotJudged, Question, Verdict
from tandem.rewards.serving import ServedJudge


def open_judge(
    path: str, device: str, dtype: Literal["auto", "bfloat16", "float32"], class_label: str | int | None = None
) -> ServedJudge:
    """The reward model in ``path``. ``class_label``: the class whose log-odds are
    the score, of a classifier with several.

    Raises:
        ConfigError: there is no model, it is no classifier, it has several classes and none is chosen, it has not the
            class that is, or it has no chat template.
    """
    folder = resolve(path)
    config = read_hf_config(folder)
    if not is_classifier(config):
        raise ConfigError(
            f"{path} is no reward model, because it has no trained head that scores; give a checkpoint that `tandem reward` "
            "wrote, or a sequence classifier"
        )
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder, chats=True)
    reader = ModelReader(tokenizer, same_tokens=False, max_length=Architecture.from_config(config).max_position_embeddings)
    engine = build_train_engine(
        TrainEngineConfig(path=str(folder), dtype=dtype),
        total_steps=0,
        device=device,
        head="scalar",
        trained=False,
        class_label=class_label,
    )

    def judge(questions: Sequence[Question]) -> list[Verdict]:
        verdicts: list[Verdict] = [NotJudged("not_read", "")] * len(questions)
        readable = []
        for number, question in enumerate(questions):
            try:
                text = question.prompt + question.completion
                sequence = reader.chat(question.messages) if question.messages else reader.text(text)
                readable.append((number, sequence))
            except DataFailure as failure:
                verdicts[number] = NotJudged(failure.reason, str(failure))
        if readable:
            batch = pack([sequence for _, sequence in readable])
            with torch.no_grad():
                scores = engine.forward(batch).scores
            assert scores is not None, "its head is scalar"
            last = scores[batch["cu_seqlens"][1:] - 1].float().tolist()
            for (number, _), score in zip(readable, last, strict=True):
                verdicts[number] = score
        return verdicts

    reads = reader_of(tokenizer)
    return ServedJudge(judge, () if reads is None else reads.kinds)
