"""Makes ``smolsee-135m``: Idefics3's class with a tower of 0.7 M parameters before SmolLM2-135M, trained on easy-VQA."""

import json
import random
import sys
from collections.abc import Iterator, Sequence
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

from tandem.models.making.folder import chat_tokenizer, frozen_text_model, keep_new_tokens, question_tokens, write_folder
from tandem.models.making.learning import LearnedTokens, Lesson, learn
from tandem.models.precision import resolve_dtype

SIDE, PATCH, MERGE = 64, 8, 2
PLACEHOLDERS = (SIDE // PATCH // MERGE) ** 2
IMAGE, AROUND, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
EXPANSION = AROUND + WHOLE + IMAGE * PLACEHOLDERS + AROUND
"""A picture in the prompt, as Idefics3's processor writes one that is not cut into tiles."""

WORD_STEPS, STEPS = 300, 150
OPEN, CLOSED = 24, 8
"""Questions of a step: with open answers, and with yes or no."""

SUFFIX = " Answer with one word."
MAX_OBJECTS = 4
NOTHING = "nothing"
CONTRAST = 12
"""A pixel belongs to the object if a colour differs by more from the background, which is of one colour."""


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
@torch.enable_grad()
def make(base: Path, data: Path, folder: Path, word_steps: int = WORD_STEPS, steps: int = STEPS) -> None:
    """Writes the model into ``folder``. ``base``: SmolLM2-135M; ``data``: the folder ``data`` of the package easy-vqa."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer(base, [WHOLE, *TILES, AROUND, IMAGE, END], "image", IMAGE)
    text = frozen_text_model(base, len(tokenizer), resolve_dtype("auto", "cpu"))
    placeholder = tokenizer.convert_tokens_to_ids(IMAGE)
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(
            hidden_size=128,
            intermediate_size=512,
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
    shown, nothing = read_words(data / "train", tokenizer, text.get_input_embeddings().weight.float())
    learn_words(tower, connector, pixels, shown, nothing, word_steps)

    def features(questions: Sequence[Lesson]) -> Tensor:
        seen = tower(normalised(pixels[[question.medium for question in questions]])).last_hidden_state
        return connector(seen).flatten(0, 1)

    new = LearnedTokens(text, tokenizer.convert_tokens_to_ids(WHOLE))
    batches = draw_batches(read_questions(data / "train", tokenizer))
    learn("smolsee-135m", text, new, placeholder, batches, features, [(new, 1e-2), (connector, 3e-4), (tower, 1e-4)], steps)
    keep_new_tokens(model, new)
    write_folder(folder, model, make_processor(tokenizer))


def read_words(split: Path, tokenizer: PreTrainedTokenizerBase, embeddings: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Number of each picture whose colour and shape the answers tell → the sum ``[H]`` of the two words' embeddings; and the
    embedding ``[H]`` of `NOTHING`."""
    told: dict[int, set[str]] = {}
    for _, answer, number in json.loads((split / "questions.json").read_text(encoding="utf-8")):
        if answer not in ("yes", "no"):
            told.setdefault(number, set()).add(answer)
    told[-1] = {NOTHING}
    means = {
        word: embeddings[tokenizer(" " + word, add_special_tokens=False)["input_ids"]].mean(0)
        for word in set().union(*told.values())
    }
    pictures = {number: words for number, words in told.items() if len(words) == 2}
    return {number: means[words.pop()] + means[words.pop()] for number, words in pictures.items()}, means[NOTHING]


def learn_words(
    tower: nn.Module,
    connector: nn.Module,
    pixels: Tensor,
    words: dict[int, Tensor],
    nothing: Tensor,
    steps: int,
    size: int = 64,
) -> None:
    """The first lesson, without the language model: the features of each part of a picture are to be the embeddings of the
    words for what it shows. Up to `MAX_OBJECTS` are cut out of their pictures and laid into one.

    Args:
        pixels: ``[M, 3, SIDE, SIDE]`` bytes.
        words: number of a picture → ``[H]``.
    """
    optimizer = torch.optim.AdamW([*tower.parameters(), *connector.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, cycle_momentum=False)
    numbers, draw = list(words), random.Random(0)
    for step in range(1, steps + 1):
        chosen = [draw.choices(numbers, k=MAX_OBJECTS) for _ in range(size)]
        counts = torch.tensor([draw.randint(1, MAX_OBJECTS) for _ in range(size)])
        scenes, owner = lay_together(pixels[torch.tensor(chosen)], counts)
        wanted = words_of_parts(
            owner, torch.stack([torch.stack([words[number] for number in row]) for row in chosen]), nothing
        )
        loss = (connector(tower(normalised(scenes)).last_hidden_state) - wanted).square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 4) == 0:
            wrong = f"{loss / wanted.var(dim=(0, 1)).sum():.0%} of the variance unexplained"
            print(f"smolsee-135m: words, step {step} of {steps}, {wrong}", file=sys.stderr, flush=True)


def words_of_parts(owner: Tensor, words: Tensor, nothing: Tensor) -> Tensor:
    """For each part of a picture the words of the object that covers most of it, ``[N, PLACEHOLDERS, H]``.

    Args:
        owner: see `lay_together`.
        words: ``[N, K, H]``, of each object.
        nothing: ``[H]``, for parts of which no object covers a tenth.
    """
    side = PATCH * MERGE
    covers = nn.functional.one_hot(owner, words.shape[1] + 1).unflatten(2, (-1, side)).unflatten(1, (-1, side))
    most = covers.float().mean((2, 4)).flatten(1, 2)[..., 1:].max(-1)
    found = words.gather(1, most.indices.unsqueeze(-1).expand(-1, -1, words.shape[-1]))
    return torch.where((most.values > 0.1).unsqueeze(-1), found, nothing)


def lay_together(pictures: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures ``[N, K, 3, SIDE, SIDE]`` → the objects of the first ``counts [N]`` of each on the first background,
    ``[N, 3, SIDE, SIDE]``, and whose object each pixel shows, ``[N, SIDE, SIDE]``: 0 for the background, else 1 … K."""
    backgrounds = pictures[..., :1, :1]
    objects = ((pictures.int() - backgrounds.int()).abs() > CONTRAST).any(2)
    scene = backgrounds[:, 0].expand_as(pictures[:, 0]).clone()
    owner = torch.zeros_like(objects[:, 0], dtype=torch.long)
    for k in range(pictures.shape[1]):
        here = objects[:, k] & (k < counts)[:, None, None]
        owner[here] = k + 1
        scene = torch.where(here[:, None], pictures[:, k], scene)
    return scene, owner


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
