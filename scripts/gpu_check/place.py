"""The place where a check runs, its models and sizes, and the lines that it yields."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.gpu_check import cuda_only
from tandem.api.engines import TrainEngine
from tandem.config.train_engine import OptimizerConfig, TrainEngineConfig
from tandem.engines.train.engine import SpreadEngine
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_model_folder, tiny_tokenizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""bfloat16 first: it is what is trained with."""

SMALL = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 2048, "initializer_range": 0.1}
"""Heads of a size that all kernels take; four of queries on two of keys."""

QWEN_1_5B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "initializer_range": 0.04,
}
"""The sizes of Qwen2.5-1.5B. Scores of attention spread by about 2.5, as in a trained model, not by 0.6."""

QUICK = QWEN_1_5B | {"hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 3, "vocab_size": 2048}
"""1.4M parameters."""


@dataclass(frozen=True)
class Place:
    """One run of the check."""

    device: str
    scratch: Path
    out: Path
    """The folder of results."""

    quick: bool
    """Everything at a size that a CPU has done in seconds."""

    vllm_python: str | None = None
    """The Python of an environment that has vLLM; None: there is none."""

    @property
    def model(self) -> Path:
        """The folder of a small random model."""
        return self._made("small", lambda part: tiny_model_folder(part, **SMALL))

    @property
    def large(self) -> Path:
        """The folder of a random model of 1.5B parameters, or 1.4M, with a tokenizer of bytes."""
        return self._made("large", self._make_large)

    def _made(self, name: str, make: Callable[[Path], Path]) -> Path:
        folder = self.scratch / name
        if not folder.exists():  # it comes at once: a check may be killed in the middle of making it
            make(self.scratch / f"{name}-unfinished").rename(folder)
        return folder

    def _make_large(self, folder: Path) -> Path:
        config = tiny_config("qwen2", **(QUICK if self.quick else QWEN_1_5B))
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return folder

    def of(self, full: int, quick: int) -> int:
        """A size."""
        return quick if self.quick else full

    def reference(self, dtype: str, model: Path | None = None) -> PreTrainedModel:
        """The model (None: the small one) by transformers, with its own attention."""
        found = AutoModelForCausalLM.from_pretrained(model or self.model, dtype=DTYPES[dtype])
        return found.to(self.device).eval()

    def trainer(
        self, dtype: str, *, model: Path | None = None, lr: float = 1e-4, max_tokens: int = 16384, **options: Any
    ) -> TrainEngine:
        """A training engine of a model (None: the small one); ``options`` are keys of its configuration."""
        name = "float32" if dtype == "fp32" else "bfloat16"
        config = TrainEngineConfig(
            path=str(model or self.model),
            dtype=name,
            optimizer=OptimizerConfig(lr=lr),
            max_tokens_per_micro_batch=max_tokens,
            **options,
        )
        return SpreadEngine(config, total_steps=1000, device=self.device)

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """Median time of a call, the device waited for, after one that warms up."""
        call()
        times = []
        for _ in range(repeats):
            cuda_only.synchronize(self.device)
            began = time.perf_counter()
            call()
            cuda_only.synchronize(self.device)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def prompts(self, lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
        """Random tokens, which all models here have."""
        generator = torch.Generator().manual_seed(seed)
        return [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in lengths]


@dataclass(frozen=True)
class Line:
    """One thing that was seen."""

    what: str
    found: str
    limit: str = ""
    good: bool | None = None
    """True if it passed; None for a figure, which cannot fail."""
