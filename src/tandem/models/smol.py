"""The parts that both built-in media models share: SmolLM2 with tokens for media, chat template, training and saving.

The language model is frozen; tower and connector are trained by the cross-entropy of its answers about images or sounds.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from tandem.api.weights import save_tensors


@dataclass(frozen=True)
class Lesson:
    """A question about one medium (image or sound) and its answer, in tokens."""

    prompt: tuple[int, ...]
    """Tokens of the prompt, in which the medium has one placeholder for each row of features."""

    answer: tuple[int, ...]
    medium: int
    """Number of the medium in the data set."""


class LearnedTokens(nn.Module):
    """Trained embeddings of the tokens that were added to the frozen language model."""

    def __init__(self, text: PreTrainedModel, first: int):
        """``first``: the first new token; all higher ids are new too."""
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(text.get_input_embeddings().weight[first:].float().clone())

    def forward(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """Returns ``embeddings`` of ``ids``, in which new tokens have their trained embeddings."""
        trained = self.weight[(ids - self.first).clamp(min=0)].to(embeddings.dtype)
        return torch.where((ids >= self.first).unsqueeze(-1), trained, embeddings)


def answer_logits(
    text: PreTrainedModel, new: LearnedTokens | None, questions: Sequence[Lesson], placeholder: int, features: Tensor
) -> Tensor:
    """Computes the logits ``[A, V]`` of all answers' tokens, concatenated; each token is predicted from the correct
    preceding tokens.

    ``features [M, H]`` replace the placeholders of all prompts, in order.
    """
    rows = [question.prompt + question.answer for question in questions]
    longest = max(map(len, rows))
    ids = torch.tensor([row + (0,) * (longest - len(row)) for row in rows])  # causal: padding at the end needs no mask
    embeddings = text.get_input_embeddings()(ids)
    embeddings = embeddings if new is None else new(ids, embeddings)
    here = (ids == placeholder).unsqueeze(-1)
    embeddings = embeddings.masked_scatter(here, features.to(embeddings.dtype))
    hidden = text.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    places = [(i, len(question.prompt) - 1 + j) for i, question in enumerate(questions) for j in range(len(question.answer))]
    row, column = torch.tensor(places).T
    return text.lm_head(hidden[row, column]).float()


def answers_right(questions: Sequence[Lesson], logits: Tensor) -> list[bool]:
    """Returns for each question whether all tokens of its answer are the most likely ones, as in greedy generation."""
    predicted = logits.argmax(-1).split([len(question.answer) for question in questions])
    return [tuple(tokens.tolist()) == question.answer for question, tokens in zip(questions, predicted, strict=True)]


def rise_and_fall(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Returns a schedule: each learning rate rises to its value in the optimizer over a tenth of the steps, then falls to 0
    along a cosine."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1, cycle_momentum=False)


def learn(
    what: str,
    text: PreTrainedModel,
    new: LearnedTokens | None,
    placeholder: int,
    batches: Iterator[list[Lesson]],
    features: Callable[[Sequence[Lesson]], Tensor],
    learners: Sequence[tuple[nn.Module, float]],
    steps: int,
) -> None:
    """Trains for ``steps`` steps with AdamW on the cross-entropy of answers, and prints progress to stderr.

    Args:
        what: the model's name, for progress messages.
        features: computes the rows ``[M, H]`` for the placeholders of some questions with the learners.
        learners: the modules to train, each with its largest learning rate, see `rise_and_fall`.
    """
    optimizer = torch.optim.AdamW([{"params": list(module.parameters()), "lr": rate} for module, rate in learners])
    schedule = rise_and_fall(optimizer, steps)
    began, right = time.monotonic(), []
    for step in range(1, steps + 1):
        questions = next(batches)
        logits = answer_logits(text, new, questions, placeholder, features(questions))
        targets = torch.tensor([token for question in questions for token in question.answer])
        loss = nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        right += answers_right(questions, logits)
        if step % max(1, steps // 10) == 0:
            eta_s = (time.monotonic() - began) / step * (steps - step)
            print(
                f"{what}: step {step} of {steps}, {sum(right) / len(right):.0%} of the answers right, {eta_s:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
            right = []


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if 'KIND' in part['type'] %}MARKER"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's chat template, without the default system message, and with support for messages of several parts."""


def chat_tokenizer(base: Path, tokens: list[str], kind: str, marker: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer in ``base`` with added special tokens, and a template that writes ``marker`` for a medium."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = CHAT.replace("KIND", kind).replace("MARKER", marker)
    return tokenizer


def frozen_text_model(base: Path, size: int, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the language model in ``base``, frozen and enlarged to ``size`` embeddings; new ones are the mean of the
    old."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    old = model.config.vocab_size
    model.resize_token_embeddings(size, mean_resizing=False)
    weight = model.get_input_embeddings().weight.data
    weight[old:] = weight[:old].float().mean(0).to(dtype)
    model.config._name_or_path = ""
    return model.requires_grad_(False).eval()


def question_tokens(
    tokenizer: PreTrainedTokenizerBase, kind: str, marker: str, expansion: str, text: str
) -> tuple[int, ...]:
    """Returns the tokens of a chat with one medium and the question ``text``, up to the beginning of the answer."""
    message = {"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}
    chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(chat.replace(marker, expansion), add_special_tokens=False)["input_ids"])


def keep_new_tokens(model: PreTrainedModel, new: LearnedTokens) -> None:
    """Copies the trained embeddings into the model that will be saved."""
    with torch.no_grad():
        model.get_input_embeddings().weight[new.first :] = new.weight


def write_folder(folder: Path, model: PreTrainedModel, processor: ProcessorMixin) -> None:
    """Saves weights in bfloat16, configuration, tokenizer and processor as transformers reads them."""
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    weights = model.state_dict()
    if getattr(model.config, "tie_word_embeddings", False):
        del weights["lm_head.weight"]  # the same tensor as the embeddings
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder)
    text = model.config.get_text_config()
    stops = GenerationConfig(bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    stops.save_pretrained(folder)
    processor.save_pretrained(folder)
