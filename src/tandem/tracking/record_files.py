"""Paths of the recorded steps in a run's folder; imports no torch."""

from pathlib import Path

LINES, TENSORS = "trajectories", "batches"
TIMELINE = "timeline.jsonl"
"""File with one line a step: the spans of each rank, as `tandem.tracking.statistics.Span`."""

TIMES, TIMES_OF = "requests.times", "requests.sample_id"
"""Names of two tensors that are stored with the fields of the batch: the `RequestTiming` of each request ``[R, 3]``, and the
``sample_id`` of each request ``[R]``."""


def lines_path(run: Path, step: int) -> Path:
    """Returns the file with the samples of a step."""
    return run / LINES / f"step_{step}.jsonl"


def tensors_path(run: Path, step: int) -> Path:
    """Returns the file with the batch of a step."""
    return run / TENSORS / f"step_{step}.safetensors.gz"


def recorded_steps(run: Path) -> list[int]:
    """Returns the recorded steps of a run, in order: those whose file of samples exists."""
    names = (path.name.removeprefix("step_").removesuffix(".jsonl") for path in (run / LINES).glob("step_*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)
