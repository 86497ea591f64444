"""A frozen language model teaches what stands in front of it: cross-entropy of answers about pictures or sounds."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Lesson:
    """A question about one medium, in tokens."""

    prompt: tuple[int, ...]
    """With the placeholders expanded."""

    answer: tuple[int, ...]
    medium: int
    """Number of the medium among those of the data set."""


class LearnedTokens(nn.Module):
    """Embeddings that are learned too: of the tokens that the language model did not have before."""

    def __init__(self, text: PreTrainedModel, first: int):
        """``first``: the first new token; all behind it are new."""
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(text.get_input_embeddings().weight[first:].float().clone())

    def forward(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """``embeddings`` of ``ids`` with those of the new tokens in their places."""
        own = self.weight[(ids - self.first).clamp(min=0)].to(embeddings.dtype)
        return torch.where((ids >= self.first).unsqueeze(-1), own, embeddings)


def answer_logits(
    text: PreTrainedModel, new: LearnedTokens | None, questions: Sequence[Lesson], placeholder: int, features: Tensor
) -> Tensor:
    """The logits ``[A, V]`` of all answers' tokens, one question after the other, each given the answer before it.

    ``features [M, H]`` take the placeholders of all the prompts in order.
    """
    rows = [question.prompt + question.answer for question in questions]
    longest = max(map(len, rows))
    ids = torch.tensor([row + (0,) * (longest - len(row)) for row in rows])  # attention is causal: no mask for what follows
    embeddings = text.get_input_embeddings()(ids)
    embeddings = embeddings if new is None else new(ids, embeddings)
    here = (ids == placeholder).unsqueeze(-1)
    embeddings = embeddings.masked_scatter(here, features.to(embeddings.dtype))
    hidden = text.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    places = [(i, len(question.prompt) - 1 + j) for i, question in enumerate(questions) for j in range(len(question.answer))]
    row, column = torch.tensor(places).T
    return text.lm_head(hidden[row, column]).float()


def answers_right(questions: Sequence[Lesson], logits: Tensor) -> list[bool]:
    """True for each question whose answer the most likely tokens spell: what greedy generation would say."""
    spelled = logits.argmax(-1).split([len(question.answer) for question in questions])
    return [tuple(tokens.tolist()) == question.answer for question, tokens in zip(questions, spelled, strict=True)]


def rise_and_fall(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule by which the rates rise to the optimizer's own for a tenth of the steps and then fall to 0 by a cosine."""
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
    """``steps`` steps of AdamW on the cross-entropy of answers; progress on stderr.

    Args:
        features: rows ``[M, H]`` for the placeholders of some questions, computed by the learners.
        learners: modules with their largest learning rate, see `rise_and_fall`.
    """
    optimizer = torch.optim.AdamW([{"params": list(module.parameters()), "lr": rate} for module, rate in learners])
    schedule = rise_and_fall(optimizer, steps)
    began, right = time.monotonic(), []
    for step in range(1, steps + 1):
        questions = next(batches)
        logits = answer_logits(text, new, questions, placeholder, features(questions))
        wanted = torch.tensor([token for question in questions for token in question.answer])
        loss = nn.functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        right += answers_right(questions, logits)
        if step % max(1, steps // 10) == 0:
            left = (time.monotonic() - began) / step * (steps - step)
            print(
                f"{what}: step {step} of {steps}, {sum(right) / len(right):.0%} of the answers right, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
            right = []
