"""The ten configurations of `benchmarks/plan.py`, and their models."""

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tandem.models.catalog import resolve

STEPS = 6  # the first one warms up

REWARD = """
import hashlib

def spread(completion, **_):
    return hashlib.sha256(completion.encode()).digest()[0] / 255
"""

MODELS = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4},
    "medium": {"hidden_size": 448, "intermediate_size": 1216, "num_hidden_layers": 12, "num_attention_heads": 7},
}
"""18.6 and 47.1 million parameters."""


@dataclass(frozen=True)
class Cell:
    """One configuration. ``fitted``: it is one of the five whose measurement the calibration sees."""

    name: str
    command: str
    model: str
    keys: tuple[str, ...]
    fitted: bool
    ranks: int = 1

    @property
    def missing(self) -> str | None:
        """The libraries that are not installed, and have to be."""
        needs = "deepspeed" if any("deepspeed" in key for key in self.keys) else None
        return needs if needs is not None and find_spec(needs) is None else None


def _rl(batch_size: int, samples: int, new_tokens: int, *more: str) -> tuple[str, ...]:
    fixed = f"gconfig.min_new_tokens={new_tokens}", f"gconfig.max_new_tokens={new_tokens}"
    fixed += ("algorithm.allow_truncated_sampling=true",)  # at a learning rate of nothing it spoils nothing
    return (
        f"rollout.batch_size={batch_size}", f"gconfig.n_samples={samples}", *fixed, "rollout.engine.kv_cache_gib=0.5",
        "actor.max_tokens_per_micro_batch=1024", "evaluate.every_steps=null", *more,
    )  # fmt: skip


def _rows(batch_size: int, *more: str) -> tuple[str, ...]:
    # the rows have 47 and 48 tokens, and the plan's memory is that of the longest row that may come
    return f"batch_size={batch_size}", "max_length=48", "actor.max_tokens_per_micro_batch=1024", *more


CELLS = (
    Cell("GRPO, small", "train", "small", _rl(8, 8, 32), True),
    Cell("GRPO, 135M", "train", "smollm2-135m", _rl(4, 4, 24), True),
    Cell("GRPO with a reference, small", "train", "small", _rl(8, 4, 64, "algorithm.kl.coefficient=0.05"), True),
    Cell("GRPO with adapters, medium", "train", "medium", _rl(8, 4, 32, "actor.lora.rank=16"), True),
    Cell("SFT, medium", "sft", "medium", _rows(32), True),
    Cell("PPO with a critic, small", "train", "small", _rl(8, 4, 48, "algorithm=ppo"), False),
    Cell("asynchronous GRPO with a reference, small", "train", "small",
         _rl(8, 6, 40, "async_training=true", "algorithm.kl.coefficient=0.05"), False),
    Cell("SFT with adapters, small", "sft", "small", _rows(48, "actor.lora.rank=16"), False),
    Cell("SFT on two ranks, checkpointing, summed each, small", "sft", "small",
         _rows(96, "actor.backend=fsdp:d2", "actor.gradient_checkpointing=true", "actor.gradient_sync=micro_batch"),
         False, ranks=2),
    Cell("SFT on two ranks, DeepSpeed, checkpointing, medium", "sft", "medium",
         _rows(48, "actor.backend=deepspeed:zero3:d2", "actor.gradient_checkpointing=true"), False, ranks=2),
)  # fmt: skip


def make_model(name: str, folder: Path) -> str:
    """A random model with the built-in one's tokenizer, or the built-in name itself."""
    if name not in MODELS:
        return name
    import torch  # noqa: PLC0415 - only where a model is made
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415

    place = folder / name
    if not place.is_dir():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152, num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, pad_token_id=2, **MODELS[name],
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
        for file in resolve("smollm2-135m").iterdir():
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, place)
    return str(place)


def arguments(cell: Cell, folder: Path) -> list[str]:
    """Keys of the run, as the plan gets them too."""
    data = {"preference": "addition_pairs"}.get(cell.command, "addition")
    keys = [f"actor.path={make_model(cell.model, folder)}", f"train_dataset.path={data}", *cell.keys]
    keys += [
        "actor.optimizer.lr=1e-9",
        "checkpoint.at_end=false",
        f"total_train_steps={STEPS}",
        f"run.root={folder / 'runs'}",
    ]
    if cell.command == "train":
        keys.append(f"reward={folder / 'spread.py'}:spread")
    return keys
