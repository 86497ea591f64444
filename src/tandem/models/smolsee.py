"""Makes ``smolsee-135m``: a model of Idefics3's class with a tower of 0.7 M parameters before SmolLM2-135M, trained on
easy-VQA."""

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerBase,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tandem.media.scenes import COLOURS, draw_scenes, render, things_by_patch
from tandem.media.scenes import SHAPES as SOLIDS
from tandem.models.hardware import fast_bfloat16, resolve_dtype
from tandem.models.smol import (
    LearnedTokens,
    Lesson,
    chat_tokenizer,
    frozen_text_model,
    keep_new_tokens,
    learn,
    question_tokens,
    rise_and_fall,
    write_folder,
)

SIDE, PATCH, MERGE, WIDTH = 64, 8, 2, 128
PLACEHOLDERS = (SIDE // PATCH // MERGE) ** 2
IMAGE, AROUND, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
EXPANSION = AROUND + WHOLE + IMAGE * PLACEHOLDERS + AROUND
"""The text for an image in a prompt, as Idefics3's processor writes it for an image that is not split into tiles."""

SCENES, KIND_STEPS, STEPS = 2400, 600, 240
OPEN, CLOSED = 10, 6
"""Number of questions per step with open answers, and with yes-or-no answers."""

SUFFIX = " Answer with one word."
SHAPES = ("circle", "rectangle", "triangle")
UNKNOWN = -100
CONTRAST = 12
"""A pixel belongs to the object if a colour channel differs from the uniform background by more than this (0 to 255)."""


@torch.random.fork_rng(devices=[])  # keeps the caller's random state
@torch.enable_grad()
def make(
    base: Path, data: Path, folder: Path, scenes: int = SCENES, kind_steps: int = KIND_STEPS, steps: int = STEPS
) -> None:
    """Trains the model and writes it into ``folder``. ``base``: folder of SmolLM2-135M; ``data``: the folder ``data`` of the
    package easy-vqa."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer(base, [WHOLE, *TILES, AROUND, IMAGE, END], "image", IMAGE)
    text = frozen_text_model(base, len(tokenizer), resolve_dtype("auto", "cpu"))
    placeholder = tokenizer.convert_tokens_to_ids(IMAGE)
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=text.config,
        scale_factor=MERGE,
        image_token_id=placeholder,
        tie_word_embeddings=True,
        pad_token_id=text.config.pad_token_id,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(text.model.state_dict())
    tower, connector = model.model.vision_model, model.model.connector
    pixels = read_pixels(data / "train")
    kinds, words = read_kinds(data / "train", len(pixels))
    for word in (*COLOURS, *SOLIDS):
        words.setdefault(word, len(words))
    print(f"smolsee-135m: drawing {scenes:,} scenes …", file=sys.stderr, flush=True)
    lessons = [(describe(pixels, kinds, nothing=len(words)), 16), (draw_pictures(scenes, words), 32)]
    learn_kinds(tower, lessons, len(words), kind_steps)

    def features(questions: Sequence[Lesson]) -> Tensor:
        return connector(states(tower, pixels[[question.medium for question in questions]])).flatten(0, 1)

    new = LearnedTokens(text, tokenizer.convert_tokens_to_ids(WHOLE))
    batches = draw_batches(read_questions(data / "train", tokenizer))
    learn("smolsee-135m", text, new, placeholder, batches, features, [(new, 1e-2), (connector, 2e-3), (tower, 1e-4)], steps)
    keep_new_tokens(model, new)
    write_folder(folder, model, make_processor(tokenizer))


@dataclass(frozen=True)
class Pictures:
    """Images, with labels of the objects in each of their patches."""

    pixels: Tensor
    """``[M, 3, SIDE, SIDE]`` uint8."""

    kinds: Tensor
    """``[M, patches, 4]``: word numbers for colour and shape of the object that the patch partly shows, then for those of
    the object whose centre is in the patch. The total number of words means no object, `UNKNOWN` means unknown."""


def describe(pixels: Tensor, kinds: Tensor, nothing: int) -> Pictures:
    """Labels the patches of images with one object each. ``kinds [M, 2]``: colour and shape; ``nothing``: label for no
    object."""
    shown = shows_object(pixels)
    places = torch.cartesian_prod(*2 * [torch.arange(SIDE // PATCH)]).float()
    middles = (shown.float() @ places / shown.sum(1, keepdim=True).clamp(min=1)).round().long()
    middle = nn.functional.one_hot(middles @ torch.tensor([SIDE // PATCH, 1]), shown.shape[1]) > 0
    return Pictures(
        pixels, torch.cat([torch.where(here[..., None], kinds[:, None], nothing) for here in (shown, middle)], -1)
    )


def draw_pictures(count: int, words: Mapping[str, int]) -> Pictures:
    """Draws and labels ``count`` scenes with several objects, like those of `clevr_count`."""
    pixels, kinds = [], []
    for things in draw_scenes(count, seed=0):
        numbers = [(words[thing.colour], words[thing.shape]) for thing in things] + [(len(words),) * 2]  # -1: no object
        pixels.append(np.asarray(render(things)))
        kinds.append(np.concatenate([np.array(numbers)[indices] for indices in things_by_patch(things, PATCH)], -1))
    return Pictures(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.from_numpy(np.stack(kinds)))


def read_kinds(split: Path, pictures: int) -> tuple[Tensor, dict[str, int]]:
    """Returns colour and shape of each image as far as the answers tell them, ``[M, 2]`` (word numbers, or `UNKNOWN`), and
    the number of each word."""
    kinds = torch.full((pictures, 2), UNKNOWN)
    words: dict[str, int] = {}
    for _, answer, picture in json.loads((split / "questions.json").read_text(encoding="utf-8")):
        if answer not in ("yes", "no"):
            kinds[picture, int(answer in SHAPES)] = words.setdefault(answer, len(words))
    return kinds, words


def shows_object(pixels: Tensor) -> Tensor:
    """Returns ``[N, patches]`` bool: True for patches of which the object covers more than a tenth."""
    differs = ((pixels.int() - pixels[..., :1, :1].int()).abs() > CONTRAST).any(1)
    return nn.functional.avg_pool2d(differs.float(), PATCH).flatten(1) > 0.1


def states(tower: nn.Module, pixels: Tensor) -> Tensor:
    """Computes the tower's states ``[N, patches, WIDTH]`` for uint8 images."""
    with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16("cpu")):
        encoded: Tensor = tower(normalised(pixels)).last_hidden_state
    return encoded.float()


def learn_kinds(tower: nn.Module, lessons: Sequence[tuple[Pictures, int]], words: int, steps: int) -> None:
    """Pretrains the tower without the language model: a linear head predicts the labels of each patch, see `Pictures`.

    Args:
        lessons: images, and how many of them are used per step; every other step mirrors them.
    """
    for module in tower.modules():  # transformers' std of 0.02 is meant for wider layers; here activations would vanish
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
    head = nn.Linear(WIDTH, 4 * (words + 1))
    matrices = [weight for weight in tower.encoder.parameters() if weight.ndim == 2]
    inside = set(matrices)
    others = [weight for weight in (*tower.parameters(), *head.parameters()) if weight not in inside]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=2e-3),
    ]
    schedules = [rise_and_fall(optimizer, steps) for optimizer in optimizers]
    for step in range(1, steps + 1):
        chosen = [(pictures, torch.randint(len(pictures.pixels), (size,))) for pictures, size in lessons]
        pixels = torch.cat([pictures.pixels[numbers] for pictures, numbers in chosen])
        labels = torch.cat([pictures.kinds[numbers] for pictures, numbers in chosen])
        if step % 2:
            pixels, labels = mirrored(pixels, labels)
        logits = head(states(tower, pixels)).unflatten(-1, (4, -1))
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), ignore_index=UNKNOWN)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % max(1, steps // 4) == 0:
            labelled = (labels != UNKNOWN) & (labels != words)
            right = (logits.argmax(-1) == labels)[labelled].float().mean()
            print(f"smolsee-135m: words, step {step} of {steps}, {right:.0%} right", file=sys.stderr, flush=True)


def mirrored(pixels: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Returns horizontally mirrored images and their labels; see `Pictures`."""
    return pixels.flip(-1), kinds.unflatten(1, (SIDE // PATCH, -1)).flip(2).flatten(1, 2)


def make_processor(tokenizer: PreTrainedTokenizerBase) -> Idefics3Processor:
    """Makes Idefics3's processor for images of one size that are not split into tiles."""
    longest = {"longest_edge": SIDE}
    half = [0.5, 0.5, 0.5]
    images = Idefics3ImageProcessorPil(
        size=longest, max_image_size=longest, do_image_splitting=False, image_mean=half, image_std=half
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=PLACEHOLDERS, chat_template=tokenizer.chat_template)


def read_pixels(split: Path) -> Tensor:
    """Reads the images of a split in the order of their numbers, ``[M, 3, SIDE, SIDE]`` uint8."""
    files = [split / "images" / f"{number}.png" for number in range(len(list((split / "images").glob("*.png"))))]
    return torch.from_numpy(np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])).permute(0, 3, 1, 2)


def normalised(pixels: Tensor) -> Tensor:
    """Scales uint8 values to -1 … 1, as the processor does."""
    return pixels.float() / 127.5 - 1


def read_questions(split: Path, tokenizer: PreTrainedTokenizerBase) -> list[Lesson]:
    """Reads all questions of a split."""
    prompts: dict[str, tuple[int, ...]] = {}
    questions = []
    for text, answer, number in json.loads((split / "questions.json").read_text(encoding="utf-8")):
        if text not in prompts:
            prompts[text] = question_tokens(tokenizer, "image", IMAGE, EXPANSION, text + SUFFIX)
        answer_ids = tuple(tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"])
        questions.append(Lesson(prompts[text], answer_ids, number))
    return questions


def draw_batches(questions: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """Yields without end random batches of `OPEN` questions with open answers and `CLOSED` with one of the two most frequent
    answers (yes and no)."""
    answers = [question.answer for question in questions]
    yes_no = sorted(set(answers), key=answers.count)[-2:]
    groups = [[q for q in questions if q.answer not in yes_no], [q for q in questions if q.answer in yes_no]]
    draw = random.Random(0)
    while True:
        yield [*draw.sample(groups[0], OPEN), *draw.sample(groups[1], CLOSED)]
