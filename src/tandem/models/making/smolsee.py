"""Makes ``smolsee-135m``: Idefics3's class with a tower of 0.7 M parameters before SmolLM2-135M, trained on easy-VQA."""

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
from tandem.models.making.folder import chat_tokenizer, frozen_text_model, keep_new_tokens, question_tokens, write_folder
from tandem.models.making.learning import LearnedTokens, Lesson, learn, rise_and_fall
from tandem.models.precision import fast_bfloat16, resolve_dtype

SIDE, PATCH, MERGE, WIDTH = 64, 8, 2, 128
PLACEHOLDERS = (SIDE // PATCH // MERGE) ** 2
IMAGE, AROUND, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
EXPANSION = AROUND + WHOLE + IMAGE * PLACEHOLDERS + AROUND
"""A picture in the prompt, as Idefics3's processor writes one that is not cut into tiles."""

SCENES, KIND_STEPS, STEPS = 2400, 600, 240
OPEN, CLOSED = 10, 6
"""Questions of a step: with open answers, and with yes or no."""

SUFFIX = " Answer with one word."
SHAPES = ("circle", "rectangle", "triangle")
UNTOLD = -100
CONTRAST = 12
"""A pixel belongs to the object if a colour differs by more from the background, which is of one colour."""


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
@torch.enable_grad()
def make(
    base: Path, data: Path, folder: Path, scenes: int = SCENES, kind_steps: int = KIND_STEPS, steps: int = STEPS
) -> None:
    """Writes the model into ``folder``. ``base``: SmolLM2-135M; ``data``: the folder ``data`` of the package easy-vqa."""
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
    """Pictures, and what each of their patches shows."""

    pixels: Tensor
    """``[M, 3, SIDE, SIDE]``, bytes."""

    kinds: Tensor
    """``[M, patches, 4]``: numbers of words for the colour and shape of the object that the patch shows a part of, and for
    those of the object whose middle is in it; the number of all words where there is none, `UNTOLD` where nobody says."""


def describe(pixels: Tensor, kinds: Tensor, nothing: int) -> Pictures:
    """Pictures of one object each, of these kinds ``[M, 2]``."""
    shown = shows_object(pixels)
    places = torch.cartesian_prod(*2 * [torch.arange(SIDE // PATCH)]).float()
    middles = (shown.float() @ places / shown.sum(1, keepdim=True).clamp(min=1)).round().long()
    middle = nn.functional.one_hot(middles @ torch.tensor([SIDE // PATCH, 1]), shown.shape[1]) > 0
    return Pictures(
        pixels, torch.cat([torch.where(here[..., None], kinds[:, None], nothing) for here in (shown, middle)], -1)
    )


def draw_pictures(count: int, words: Mapping[str, int]) -> Pictures:
    """Scenes like those of `clevr_count`."""
    pixels, kinds = [], []
    for things in draw_scenes(count, seed=0):
        numbers = [(words[thing.colour], words[thing.shape]) for thing in things] + [(len(words),) * 2]  # -1: there is none
        pixels.append(np.asarray(render(things)))
        kinds.append(np.concatenate([np.array(numbers)[found] for found in things_by_patch(things, PATCH)], -1))
    return Pictures(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2), torch.from_numpy(np.stack(kinds)))


def read_kinds(split: Path, pictures: int) -> tuple[Tensor, dict[str, int]]:
    """The colour and the shape that each picture shows, as far as answers tell, ``[M, 2]``: numbers of words, or `UNTOLD`;
    and the numbers of the words."""
    kinds = torch.full((pictures, 2), UNTOLD)
    words: dict[str, int] = {}
    for _, answer, picture in json.loads((split / "questions.json").read_text(encoding="utf-8")):
        if answer not in ("yes", "no"):
            kinds[picture, int(answer in SHAPES)] = words.setdefault(answer, len(words))
    return kinds, words


def shows_object(pixels: Tensor) -> Tensor:
    """True for each patch ``[N, patches]`` of which the object covers a tenth."""
    differs = ((pixels.int() - pixels[..., :1, :1].int()).abs() > CONTRAST).any(1)
    return nn.functional.avg_pool2d(differs.float(), PATCH).flatten(1) > 0.1


def states(tower: nn.Module, pixels: Tensor) -> Tensor:
    """The states of the tower over pictures of bytes, ``[N, patches, WIDTH]``."""
    with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16("cpu")):
        seen: Tensor = tower(normalised(pixels)).last_hidden_state
    return seen.float()


def learn_kinds(tower: nn.Module, lessons: Sequence[tuple[Pictures, int]], words: int, steps: int) -> None:
    """The first lesson, without the language model: each patch tells the colour and the shape of the object that it shows a
    part of, and of the object whose middle it shows, or that there is none.

    Args:
        lessons: pictures, and how many of them a step sees; in every other step it sees them in a mirror.
    """
    for module in tower.modules():  # transformers' 0.02 is meant for wider layers: these would pass nearly nothing on
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
        wanted = torch.cat([pictures.kinds[numbers] for pictures, numbers in chosen])
        if step % 2:
            pixels, wanted = mirrored(pixels, wanted)
        logits = head(states(tower, pixels)).unflatten(-1, (4, -1))
        loss = nn.functional.cross_entropy(logits.flatten(0, 2), wanted.flatten(), ignore_index=UNTOLD)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % max(1, steps // 4) == 0:
            told = (wanted != UNTOLD) & (wanted != words)
            right = (logits.argmax(-1) == wanted)[told].float().mean()
            print(f"smolsee-135m: words, step {step} of {steps}, {right:.0%} right", file=sys.stderr, flush=True)


def mirrored(pixels: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures with left and right exchanged, and what their patches show then; see `Pictures`."""
    return pixels.flip(-1), kinds.unflatten(1, (SIDE // PATCH, -1)).flip(2).flatten(1, 2)


def make_processor(tokenizer: PreTrainedTokenizerBase) -> Idefics3Processor:
    """Idefics3's processor, for pictures of one size that are not cut into tiles."""
    longest = {"longest_edge": SIDE}
    half = [0.5, 0.5, 0.5]
    images = Idefics3ImageProcessorPil(
        size=longest, max_image_size=longest, do_image_splitting=False, image_mean=half, image_std=half
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=PLACEHOLDERS, chat_template=tokenizer.chat_template)


def read_pixels(split: Path) -> Tensor:
    """The pictures of a split by number, ``[M, 3, SIDE, SIDE]``, bytes."""
    files = [split / "images" / f"{number}.png" for number in range(len(list((split / "images").glob("*.png"))))]
    return torch.from_numpy(np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])).permute(0, 3, 1, 2)


def normalised(pixels: Tensor) -> Tensor:
    """Bytes as the processor gives them: from -1 to 1."""
    return pixels.float() / 127.5 - 1


def read_questions(split: Path, tokenizer: PreTrainedTokenizerBase) -> list[Lesson]:
    """All questions of a split."""
    prompts: dict[str, tuple[int, ...]] = {}
    questions = []
    for text, answer, number in json.loads((split / "questions.json").read_text(encoding="utf-8")):
        if text not in prompts:
            prompts[text] = question_tokens(tokenizer, "image", IMAGE, EXPANSION, text + SUFFIX)
        said = tuple(tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"])
        questions.append(Lesson(prompts[text], said, number))
    return questions


def draw_batches(questions: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """`OPEN` questions with open answers and `CLOSED` with one of the two most frequent answers, without end."""
    answers = [question.answer for question in questions]
    yes_no = sorted(set(answers), key=answers.count)[-2:]
    groups = [[q for q in questions if q.answer not in yes_no], [q for q in questions if q.answer in yes_no]]
    draw = random.Random(0)
    while True:
        yield [*draw.sample(groups[0], OPEN), *draw.sample(groups[1], CLOSED)]
