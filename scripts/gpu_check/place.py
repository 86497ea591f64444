"""The place where the checks run, their size, and the lines that they print."""

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from scripts.gpu_check import cuda_only
from tandem.api.engines import TrainEngine
from tandem.config.train_engine import OptimizerConfig, TrainEngineConfig
from tandem.engines.train.build import build_train_engine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Place:
    """One run of the check."""

    device: str
    model: Path
    scratch: Path
    quick: bool
    """Everything once, at a size that a CPU has done in seconds."""

    vllm_python: str | None = None
    """The Python of an environment that has vLLM; None: there is none."""

    @property
    def vocabulary(self) -> int:
        """Tokens of the model."""
        return int(AutoConfig.from_pretrained(self.model).vocab_size)

    def of(self, full: int, quick: int) -> int:
        """A size."""
        return quick if self.quick else full

    def reference(self, dtype: str) -> PreTrainedModel:
        """The model by transformers, with its own attention."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=DTYPES[dtype])
        return model.to(self.device).eval()

    def trainer(self, dtype: str, *, lr: float = 1e-4, max_tokens: int = 16384, **options: Any) -> TrainEngine:
        """A training engine; ``options`` are keys of its configuration."""
        name = "float32" if dtype == "fp32" else "bfloat16"
        config = TrainEngineConfig(
            path=str(self.model),
            dtype=name,
            optimizer=OptimizerConfig(lr=lr),
            max_tokens_per_micro_batch=max_tokens,
            **options,
        )
        return build_train_engine(config, total_steps=1000, device=self.device)

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
        """Random tokens."""
        generator = torch.Generator().manual_seed(seed)
        return [tuple(torch.randint(3, self.vocabulary, (n,), generator=generator).tolist()) for n in lengths]


@dataclass(frozen=True)
class Line:
    """One thing that was seen."""

    what: str
    found: str
    limit: str = ""
    good: bool | None = None
    """True if it passed; None for a figure, which cannot fail."""


class OutOfTime(Exception):
    """The time of all checks is over while one runs."""


@dataclass
class Findings:
    """All lines, by section."""

    sections: dict[str, list[Line]] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)
    """Checks for which no time was left, or that were cut off in the middle."""

    def run(self, section: str, check: Callable[[Place], Iterator[Line]], place: Place) -> None:
        """Adds the lines of a check; one that raises is a line that failed, and the others go on."""
        lines = self.sections.setdefault(section, [])
        began = time.perf_counter()
        try:
            for line in check(place):
                lines.append(line)
                mark = {True: "ok  ", False: "FAIL", None: "    "}[line.good]
                print(f"{mark} {line.what}: {line.found}{f' ({line.limit})' if line.limit else ''}", flush=True)
        except OutOfTime:
            self.not_run.append(f"{check.__name__} (cut off after {time.perf_counter() - began:.0f} s)")
        except Exception as error:  # the boundary of a check: its machine is lent for minutes, the others must run
            traceback.print_exc()
            lines.append(Line(check.__name__, f"{type(error).__name__}: {error}".splitlines()[0][:300], "to end", False))
            print(f"FAIL {check.__name__}: {error}", file=sys.stderr, flush=True)
        gc.collect()
        cuda_only.free(place.device)
        print(f"     {check.__name__} took {time.perf_counter() - began:.1f} s", flush=True)

    @property
    def failed(self) -> int:
        """Lines that are not as they must be."""
        return sum(line.good is False for lines in self.sections.values() for line in lines)
