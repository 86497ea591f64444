"""TRL's `GRPOTrainer._compute_loss` on fixed log-probabilities: every loss type, values and gradients.

The method is called as it stands, on an object that has the settings it reads; only the forward pass is replaced, by the
log-probabilities themselves, so that the gradient with respect to them can be taken.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOTrainer

LENGTHS = (5, 2, 7, 1)
MAX_LENGTH = 8
COMMON = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2}
CASES = {
    "grpo": {},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "two_sided": {"delta": 1.5},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "gspo": {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 0.03,
        "epsilon_high": 0.04,
    },
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "k3": {"beta": 0.1},
    "k3_times_ratio": {"beta": 0.1, "use_bias_correction_kl": True},
    "negative_drift": {"off_policy_mask_threshold": 0.05},
}


class OneProcess:
    """The part of accelerate that the method asks for, for a process alone."""

    num_processes = 1
    sync_gradients = True
    device = torch.device("cpu")

    def gather(self, x):
        return x

    def gather_for_metrics(self, x):
        return x

    def reduce(self, x, reduction="sum"):
        return x


def tensors() -> dict[str, torch.Tensor]:
    """Log-probabilities, padded ``[B, S]`` float32, and an advantage for each sample."""
    generator = torch.Generator().manual_seed(7)
    shape = (len(LENGTHS), MAX_LENGTH)
    old = (-2 + 0.7 * torch.randn(shape, generator=generator)).clamp(max=-0.05)
    near = [(old + 0.3 * torch.randn(shape, generator=generator)).clamp(max=-0.01) for _ in range(3)]
    return {
        "policy": near[0],
        "proximal": old,
        "rollout": near[1],
        "reference": near[2],
        "advantages": torch.tensor([1.2, -0.7, -1.5, 0.4]),
    }


def trainer(settings: dict, policy: torch.Tensor) -> SimpleNamespace:
    """The attributes of a trainer that the loss reads."""
    given = COMMON | settings
    arguments = {
        "delta": given.pop("delta", None),
        "use_bias_correction_kl": given.pop("use_bias_correction_kl", False),
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    return SimpleNamespace(
        **{"off_policy_mask_threshold": None} | given,
        args=SimpleNamespace(**arguments),
        accelerator=OneProcess(),
        model=SimpleNamespace(training=False),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )


def case(settings: dict, given: dict[str, torch.Tensor], mask: torch.Tensor) -> dict:
    """Loss and gradient with respect to the policy's log-probabilities."""
    policy = given["policy"].clone().requires_grad_()
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["proximal"],
        "sampling_per_token_logps": given["rollout"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer(settings, policy), None, inputs)
    slope = torch.autograd.grad(loss, policy)[0]
    return {"settings": COMMON | settings, "loss": loss.item(), "gradient": slope.tolist()}


def fixtures() -> dict:
    """Inputs, and what TRL makes of them for each case."""
    given = tensors()
    mask = (torch.arange(MAX_LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
    return {
        "inputs": {name: value.tolist() for name, value in given.items()} | {"mask": mask.tolist()},
        "max_tokens": MAX_LENGTH,
        "cases": {name: case(settings, given, mask) for name, settings in CASES.items()},
    }
