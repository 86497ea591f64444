"""Measures what recording a step costs: seconds of training's thread, processor seconds of the thread that writes, and disk.

    python benchmarks/recording.py                 # batches of 64 samples, of which 16 or all are recorded

The batches have the fields of a run with a reference and a critic; their numbers are random, which compress worst.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tensordict import TensorDict

from tandem.api.workflow import Group, Sample, Trajectory
from tandem.rollout.executor import collate
from tandem.tracking.records import StepRecorder

SHAPES = {"addition": (40, 8), "gsm8k": (120, 256), "long": (200, 2048)}
"""Tokens of a prompt and of an answer."""

STEPS = 9


def sample(number: int, prompt: int, answer: int) -> Sample:
    """One of random tokens."""
    size, texts = prompt + answer, ("word " * prompt, "word " * answer)
    mask = torch.arange(size) >= prompt
    tokens = torch.randint(0, 49152, (size,))
    return Sample(
        (Trajectory(tokens, mask, torch.randn(size), torch.where(mask, 3, -1)),),
        reward=float(number % 2),
        rewards={"right": float(number % 2)},
        prompt_text=texts[0],
        completion_text=texts[1],
        messages=({"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}),
    )


def made(prompt: int, answer: int) -> tuple[list[Group], TensorDict]:
    """Eight groups of eight, and the batch as it would be trained."""
    groups = [Group(tuple(sample(i, prompt, answer) for i in range(8)), number) for number in range(8)]
    batch = collate(groups, version=3, max_head_offpolicyness=0)
    names = ("advantages", "proximal_logprobs", "reference_logprobs", "entropy", "values", "returns")
    more = {name: torch.randn(len(batch["input_ids"])) for name in names}
    return groups, TensorDict({**dict(batch.items()), **more}, batch_size=[])


class Timed(StepRecorder):
    """Keeps the processor time of each record."""

    def _write(self, item: object) -> None:
        began = time.thread_time()
        super()._write(item)  # type: ignore[arg-type]
        self.written.append(time.thread_time() - began)


def measure(prompt: int, answer: int, per_step: int | None) -> dict[str, float]:
    """Medians of a few steps."""
    groups, batch = made(prompt, answer)
    with tempfile.TemporaryDirectory() as place:
        recorder, taken = Timed(Path(place), per_step, None), []
        recorder.written = []
        for step in range(1, STEPS + 1):
            began = time.perf_counter()
            recorder.record(step, groups, batch, (), {})
            taken.append(time.perf_counter() - began)
            recorder.flush()
        recorder.close()
        size = sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file()) / STEPS
    waits_s, writes_s = statistics.median(taken), statistics.median(recorder.written)
    return {"training_waits_ms": waits_s * 1e3, "thread_computes_ms": writes_s * 1e3, "kb_a_step": size / 1e3}


if __name__ == "__main__":
    for name, shape in SHAPES.items():
        for per_step in (16, None):
            figures = {what: round(value, 2) for what, value in measure(*shape, per_step).items()}
            print(json.dumps({"batch": name, "recorded": per_step or 64, **figures}))
