"""Places of the record of each step in a run's folder; imports no torch."""

from pathlib import Path

LINES, TENSORS = "trajectories", "batches"
TIMELINE = "timeline.jsonl"
"""One line a step: what each rank did when, as `tandem.tracking.statistics.Span` has it."""

TIMES, TIMES_OF = "requests.times", "requests.sample_id"
"""Beside the fields of the batch: `RequestTiming` of each request ``[R, 3]``, and the sample that it belongs to ``[R]``."""


def lines_path(run: Path, step: int) -> Path:
    """File of the samples of a step."""
    return run / LINES / f"step_{step}.jsonl"


def tensors_path(run: Path, step: int) -> Path:
    """File of the batch of a step."""
    return run / TENSORS / f"step_{step}.safetensors.gz"


def recorded_steps(run: Path) -> list[int]:
    """The steps that a run folder has the lines of, in order."""
    names = (path.name.removeprefix("step_").removesuffix(".jsonl") for path in (run / LINES).glob("step_*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)
