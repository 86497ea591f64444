"""Makes tests/algorithms/trl_preference.json: what TRL's trainers compute of given log-probabilities and scores.

Run it with a Python that has TRL 1.16; nothing is trained and no model is loaded. The trainers are made without their
constructors and are given a model that answers with the tensors of the fixture.

    VENV/bin/python scripts/trl_preference_fixtures.py
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from torch import nn
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

TARGET = Path(__file__).resolve().parent.parent / "tests/algorithms/trl_preference.json"
PROMPT = 2
LENGTHS = {"chosen": [3, 1, 5, 2], "rejected": [4, 2, 1, 6]}


class Answers(nn.Module):
    """A model that answers with given outputs, one after another."""

    def __init__(self, *outputs: SimpleNamespace):
        super().__init__()
        self.outputs = list(outputs)

    def forward(self, **_: object) -> SimpleNamespace:
        return self.outputs.pop(0)


def identity(value: torch.Tensor) -> torch.Tensor:
    return value


def bare(kind: type, **attributes: object) -> object:
    """A trainer without its constructor."""
    trainer = object.__new__(kind)
    accelerator = SimpleNamespace(device="cpu", gather=identity, gather_for_metrics=identity)
    common = {
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "model": nn.Linear(1, 1),
    }
    trainer.__dict__.update(common | attributes)
    return trainer


def padded(rows: list[torch.Tensor], size: int) -> torch.Tensor:
    """Per-token values behind a prompt, shifted as TRL has them: ``[N, size − 1]``."""
    behind = size - PROMPT
    return torch.stack([nn.functional.pad(row, (PROMPT - 1, behind - len(row))) for row in rows])


def outputs(log_probs: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(
        log_probs=log_probs,
        entropy=torch.zeros_like(log_probs),
        mean_logits=torch.zeros_like(log_probs),
        is_top1=torch.zeros_like(log_probs, dtype=torch.bool),
    )


def inputs(lengths: list[int], size: int) -> dict[str, torch.Tensor]:
    at = torch.arange(size)[None]
    length = torch.tensor(lengths)[:, None]
    attention = (at < PROMPT + length).long()
    return {
        "input_ids": torch.zeros(len(lengths), size, dtype=torch.long),
        "attention_mask": attention,
        "completion_mask": attention * (at >= PROMPT),
    }


def with_gradient(loss: torch.Tensor, sums: torch.Tensor) -> dict[str, object]:
    (gradient,) = torch.autograd.grad(loss, sums)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def spread(sums: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Tokens whose log-probabilities add up to the given sums."""
    return [total / length * torch.ones(length) for total, length in zip(sums, lengths, strict=True)]


def draw(count: int, generator: torch.Generator) -> torch.Tensor:
    return -6 * torch.rand(count, generator=generator)


def pairs(generator: torch.Generator) -> dict[str, object]:
    """DPO, IPO and SimPO."""
    lengths = LENGTHS["chosen"] + LENGTHS["rejected"]
    policy, reference = draw(8, generator).requires_grad_(), draw(8, generator)
    size = PROMPT + max(lengths)
    found: dict[str, object] = {"policy": policy.tolist(), "reference": reference.tolist(), "lengths": lengths}
    for name, loss_type in (("dpo", "sigmoid"), ("ipo", "ipo")):
        trainer = bare(
            DPOTrainer,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=0.1,
            use_weighting=False,
            label_smoothing=0.0,
        )
        given = inputs(lengths, size) | {"ref_chosen_logps": reference[:4], "ref_rejected_logps": reference[4:]}
        loss = trainer._compute_loss(Answers(outputs(padded(spread(policy, lengths), size))), given, False)
        found[name] = with_gradient(loss, policy)
    cpo = bare(
        CPOTrainer, alpha=0.0, loss_type="simpo", beta=2.5, simpo_gamma=1.375, label_smoothing=0.0, use_weighting=False
    )
    means = policy / torch.tensor(lengths)
    found["simpo"] = with_gradient(cpo.cpo_loss(means[:4], means[4:])[0].mean(), policy)
    return found


def labelled(generator: torch.Generator) -> dict[str, object]:
    """KTO, with the completions of the row before behind each prompt."""
    lengths, label = [3, 1, 5, 2], [True, False, False, True]
    policy, reference = draw(4, generator).requires_grad_(), draw(4, generator)
    other, other_reference = draw(4, generator) + 1.5, draw(4, generator)
    others = [lengths[-1], *lengths[:-1]]
    size = PROMPT + max(lengths)
    mismatched = {f"KL_{name}": value for name, value in inputs(others, size).items()}
    given = inputs(lengths, size) | mismatched | {"label": torch.tensor(label)}
    given |= {"ref_logps": reference, "ref_KL_logps": other_reference}
    trainer = bare(
        KTOTrainer,
        calculate_KL=True,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.1,
        desirable_weight=1.3,
        undesirable_weight=0.7,
    )
    answers = Answers(outputs(padded(spread(other, others), size)), outputs(padded(spread(policy, lengths), size)))
    loss = trainer._compute_loss(answers, given, False)
    return {
        "policy": policy.tolist(),
        "reference": reference.tolist(),
        "label": label,
        "other": other.tolist(),
        "other_reference": other_reference.tolist(),
        "weights": [1.3, 0.7],
        **with_gradient(loss, policy),
    }


def odds(generator: torch.Generator) -> dict[str, object]:
    """ORPO. Its likelihood is over prompt and answer, the mean over the batch: with a prompt of one token, which nothing
    predicts, and better sides of equal length, that is the mean over each answer's tokens."""
    size, count, vocabulary = 5, 3, 11
    logits = torch.randn(2 * count, size, vocabulary, generator=generator).requires_grad_()
    ids = torch.randint(0, vocabulary, (2 * count, size), generator=generator)
    lengths = [4, 4, 4, 2, 4, 3]  # trained tokens
    mask = torch.arange(size)[None] <= torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~mask, -100)
    labels[:, 0] = -100
    batch = {}
    for side, rows in (("chosen", slice(0, count)), ("rejected", slice(count, None))):
        batch |= {
            f"{side}_input_ids": ids[rows],
            f"{side}_attention_mask": mask[rows].long(),
            f"{side}_labels": labels[rows],
        }
    trainer = bare(ORPOTrainer, is_encoder_decoder=False, padding_value=0, beta=0.1)

    def model(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(logits=logits)

    loss, _ = trainer.get_batch_loss_metrics(model, batch, "train")
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].masked_fill(~mask[:, 1:], 0.0)
    return {"policy": logprobs.sum(1).tolist(), "lengths": lengths, "loss": loss.item()}


def scores(generator: torch.Generator) -> dict[str, object]:
    """The reward model's loss, with margins."""
    values = (2 * torch.randn(6, 1, generator=generator)).requires_grad_()
    margin = torch.rand(3, generator=generator)
    trainer = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=None))
    given = {"attention_mask": torch.ones(6, 1), "margin": margin}
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=values), given)
    return {"scores": values[:, 0].tolist(), "margin": margin.tolist(), **with_gradient(loss, values)}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    found = {
        "trl": trl.__version__,
        "pairs": pairs(generator),
        "labelled": labelled(generator),
        "odds": odds(generator),
        "scores": scores(generator),
    }
    TARGET.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
