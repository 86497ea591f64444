"""Makes ``smolhear-135m``: a model of Qwen2-Audio's class with Whisper tiny.en's encoder before SmolLM2-135M. The projector
between the two is trained here, on spoken digits.

The encoder is read from a Whisper model that was converted for CTranslate2.
"""

import random
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

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

from tandem.media.decoding import read_sound
from tandem.media.store import RATE
from tandem.models.hardware import resolve_dtype
from tandem.models.smol import Lesson, chat_tokenizer, frozen_text_model, learn, question_tokens, write_folder

TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}

NAMES = {
    r"encoder/layer_(\d+)/ffn/linear_0": r"layers.\1.fc1",
    r"encoder/layer_(\d+)/ffn/linear_1": r"layers.\1.fc2",
    r"encoder/layer_(\d+)/ffn/layer_norm": r"layers.\1.final_layer_norm",
    r"encoder/layer_(\d+)/self_attention/layer_norm": r"layers.\1.self_attn_layer_norm",
    r"encoder/layer_(\d+)/self_attention/linear_1": r"layers.\1.self_attn.out_proj",
    r"encoder/(conv\d|layer_norm)": r"\1",
    "/gamma": ".weight",
    "/beta": ".bias",
    "/(weight|bias)": r".\1",
}
"""Patterns in CTranslate2's tensor names → their replacements in transformers' names."""


def read_encoder(file: Path) -> dict[str, torch.Tensor]:
    """Reads the encoder's weights, float32, by transformers' names; ``embed_positions`` has all 1,500 positions."""
    weights = {}
    for name, value in read_variables(file).items():
        tensor = torch.from_numpy(value).float() if value.dtype == np.float16 else None
        if tensor is None or not name.startswith("encoder/"):
            continue
        if stacked := re.fullmatch(r"encoder/layer_(\d+)/self_attention/linear_0/(weight|bias)", name):
            for projection, part in zip(("q_proj", "k_proj", "v_proj"), tensor.chunk(3), strict=True):
                weights[f"layers.{stacked[1]}.self_attn.{projection}.{stacked[2]}"] = part
        elif name == "encoder/position_encodings/encodings":
            weights["embed_positions.weight"] = tensor
        else:
            for pattern, replacement in NAMES.items():
                name = re.sub(pattern, replacement, name)
            weights[name] = tensor
    # Whisper's key projections have no bias; CTranslate2 stores zeros for it
    return {name: tensor for name, tensor in weights.items() if not name.endswith("k_proj.bias")}


def read_variables(file: Path) -> dict[str, np.ndarray]:
    """Reads all variables of a CTranslate2 model, stored one after another as name, rank, sizes, type and bytes."""
    with file.open("rb") as data:
        _version, _spec, _revision = _number(data, "I"), _text(data), _number(data, "I")
        variables = {}
        for _ in range(_number(data, "I")):
            name = _text(data)
            shape = [_number(data, "I") for _ in range(_number(data, "B"))]
            kind = TYPES[_number(data, "B")]
            variables[name] = np.frombuffer(bytearray(data.read(_number(data, "I"))), kind).reshape(shape)
        return variables


def _number(data: IO[bytes], kind: str) -> int:
    return int(struct.unpack(f"<{kind}", data.read(struct.calcsize(f"<{kind}")))[0])


def _text(data: IO[bytes]) -> str:
    return data.read(_number(data, "H")).rstrip(b"\0").decode()


WINDOW_S = 2
"""Longest sound in seconds. Whisper's usual window of 30 s would cost fifteen times as much for every sound."""

POSITIONS = WINDOW_S * 50
SOUND, BEGIN, END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
QUESTIONS = (
    "Which digit was said? Answer with just the number.",
    "What number do you hear? Answer with just the number.",
    "Write down the digit that was said, and nothing else.",
)
TAKES = range(5, 15)
"""Numbers of the recordings used for training, of 50 per digit and speaker; the first five are the test split."""

STEPS, SIZE = 80, 16
RIDGE = 100.0


@torch.random.fork_rng(devices=[])  # keeps the caller's random state
@torch.enable_grad()
def make(base: Path, whisper: Path, recordings: Sequence[Path], folder: Path, steps: int = STEPS) -> None:
    """Trains the model and writes it into ``folder``. ``base``: folder of SmolLM2-135M; ``whisper``: tiny.en's
    ``model.bin``; ``recordings``: sound files of spoken digits."""
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
    """Makes Qwen2-Audio's processor for sounds of at most `WINDOW_S` seconds."""
    extractor = WhisperFeatureExtractor(feature_size=80, chunk_length=WINDOW_S, return_attention_mask=True)
    return Qwen2AudioProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template)


@torch.no_grad()
def hear(tower: Qwen2AudioEncoder, extractor: WhisperFeatureExtractor, sounds: Sequence[np.ndarray]) -> list[Tensor]:
    """Computes the frozen encoder's rows ``[n, 384]`` for each sound, 25 per second."""
    rows: list[Tensor] = []
    for start in range(0, len(sounds), 16):
        chunk = list(sounds[start : start + 16])
        batch = extractor(chunk, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        states, lengths = tower._get_feat_extract_output_lengths(batch["attention_mask"].sum(-1))
        inside = (torch.arange(POSITIONS) < states[:, None])[:, None, None].expand(-1, 1, POSITIONS, -1)
        encoded = tower(batch["input_features"], attention_mask=inside).last_hidden_state
        rows += [row[:length] for row, length in zip(encoded, lengths.tolist(), strict=True)]
    return rows


def begin_with_words(projector: nn.Linear, heard: Sequence[Tensor], words: Sequence[Tensor]) -> None:
    """Initialises the projector by ridge regression from the rows of each sound ``[n, D]`` to the embedding ``[H]`` of its
    word, so that the language model reads each sound almost as its word."""
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
    """Returns every combination of a recording and a question."""
    questions = []
    for number, (file, rows) in enumerate(zip(files, heard, strict=True)):
        answer = tuple(tokenizer(file.stem[0] + "<|im_end|>", add_special_tokens=False)["input_ids"])
        for text in texts:
            prompt = question_tokens(tokenizer, "audio", SOUND, SOUND * len(rows), text)
            questions.append(Lesson(prompt, answer, number))
    return questions


def draw_batches(questions: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """Yields random batches of `SIZE` questions without end."""
    draw = random.Random(0)
    while True:
        yield draw.sample(questions, SIZE)
