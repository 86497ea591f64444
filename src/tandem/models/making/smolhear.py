"""Makes ``smolhear-135m``: Qwen2-Audio's class with Whisper tiny.en's encoder before SmolLM2-135M. What joins the two is
trained here, on spoken digits."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from tandem.media.sounds import read_sound
from tandem.media.store import RATE
from tandem.models.making.folder import chat_tokenizer, frozen_text_model, question_tokens, write_folder
from tandem.models.making.learning import Lesson, learn
from tandem.models.making.whisper import read_encoder
from tandem.models.precision import resolve_dtype

WINDOW_S = 2
"""Longest sound: Whisper's 30 seconds cost fifteen times as much, however short the sound is."""

POSITIONS = WINDOW_S * 50
SOUND, BEGIN, END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
QUESTIONS = (
    "Which digit was said? Answer with just the number.",
    "What number do you hear? Answer with just the number.",
    "Write down the digit that was said, and nothing else.",
)
TAKES = range(5, 15)
"""Takes that are learnt, of 50 of each digit and speaker; the first five are the data set's test split."""

STEPS, SIZE = 80, 16
RIDGE = 100.0


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
@torch.enable_grad()
def make(base: Path, whisper: Path, recordings: Sequence[Path], folder: Path, steps: int = STEPS) -> None:
    """Writes the model into ``folder``. ``base``: SmolLM2-135M; ``whisper``: tiny.en's ``model.bin``."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer(base, [BEGIN, SOUND, END], "audio", BEGIN + SOUND + END)
    text = frozen_text_model(base, len(tokenizer), resolve_dtype("auto", "cpu"))
    text.config.tie_word_embeddings = False  # the class has no tied weights
    placeholder = tokenizer.convert_tokens_to_ids(SOUND)
    config = Qwen2AudioConfig(
        audio_config=Qwen2AudioEncoderConfig(
            num_mel_bins=80,
            d_model=384,
            encoder_layers=4,
            encoder_attention_heads=6,
            encoder_ffn_dim=1536,
            max_source_positions=POSITIONS,
        ),
        text_config=text.config,
        audio_token_index=placeholder,
    )
    model = Qwen2AudioForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    tower, projector = model.model.audio_tower, model.model.multi_modal_projector
    weights = read_encoder(whisper)
    weights["embed_positions.weight"] = weights["embed_positions.weight"][:POSITIONS]
    tower.load_state_dict(weights)
    processor = make_processor(tokenizer)
    files = [file for file in recordings if int(file.stem.split("_")[2]) in TAKES]
    embeddings = text.get_input_embeddings().weight.float()
    word_of = {digit: embeddings[tokenizer.convert_tokens_to_ids(digit)] for digit in "0123456789"}
    heard = hear(tower, processor.feature_extractor, [read_sound(file.read_bytes()) / np.float32(2**15) for file in files])

    begin_with_words(projector.linear, heard, [word_of[file.stem[0]] for file in files])

    def features(questions: Sequence[Lesson]) -> Tensor:
        return projector(torch.cat([heard[question.medium] for question in questions]))

    batches = draw_batches(digit_questions(files, heard, tokenizer))
    learn("smolhear-135m", text, None, placeholder, batches, features, [(projector, 5e-4)], steps)
    write_folder(folder, model, processor)


def make_processor(tokenizer: PreTrainedTokenizerBase) -> Qwen2AudioProcessor:
    """Qwen2-Audio's processor for sounds of `WINDOW_S`."""
    extractor = WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW_S, return_attention_mask=True)
    return Qwen2AudioProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)


@torch.no_grad()
def hear(tower: Qwen2AudioEncoder, extractor: WhisperFeatureExtractor, sounds: Sequence[np.ndarray]) -> list[Tensor]:
    """The frozen encoder's rows ``[n, 384]`` of each sound, 25 a second."""
    rows: list[Tensor] = []
    for start in range(0, len(sounds), 16):
        some = list(sounds[start : start + 16])
        batch = extractor(some, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        states, lengths = tower._get_feat_extract_output_lengths(batch["attention_mask"].sum(-1))
        inside = (torch.arange(POSITIONS) < states[:, None])[:, None, None].expand(-1, 1, POSITIONS, -1)
        found = tower(batch["input_features"], attention_mask=inside).last_hidden_state
        rows += [row[:length] for row, length in zip(found, lengths.tolist(), strict=True)]
    return rows


def begin_with_words(projector: nn.Linear, heard: Sequence[Tensor], words: Sequence[Tensor]) -> None:
    """Sets the projector to the ridge regression from the rows of a sound ``[n, D]`` to the embedding ``[H]`` of its word:
    the language model then finds the word nearly written in the prompt."""
    rows = torch.cat(list(heard))
    targets = torch.cat([word.expand(len(sound), -1) for word, sound in zip(words, heard, strict=True)])
    mean, middle = rows.mean(0), targets.mean(0)
    rows, targets = rows - mean, targets - middle
    solution = torch.linalg.solve(rows.T @ rows + RIDGE * torch.eye(rows.shape[1]), rows.T @ targets)
    with torch.no_grad():
        projector.weight.copy_(solution.T)
        projector.bias.copy_(middle - mean @ solution)


def digit_questions(
    files: Sequence[Path], heard: Sequence[Tensor], tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = QUESTIONS
) -> list[Lesson]:
    """Each recording once with each question."""
    questions = []
    for number, (file, rows) in enumerate(zip(files, heard, strict=True)):
        answer = tuple(tokenizer(file.stem[0] + "<|im_end|>", add_special_tokens=False)["input_ids"])
        for text in texts:
            prompt = question_tokens(tokenizer, "audio", SOUND, SOUND * len(rows), text)
            questions.append(Lesson(prompt, answer, number))
    return questions


def draw_batches(questions: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """`SIZE` questions at a time, without end."""
    draw = random.Random(0)
    while True:
        yield draw.sample(questions, SIZE)
