"""Metrics, pictures and what else is written while a run goes on."""

from dataclasses import dataclass

from tandem.config.terms import Spec


@dataclass(frozen=True)
class TrackingConfig:
    """Sinks and samples beside `metrics.jsonl`, which is always written."""

    sinks: tuple[Spec, ...] = ()
    """Destinations of metrics besides `metrics.jsonl`: any of `tensorboard`, `wandb`, `trackio`, `prometheus`, or your
    own, `my_file.py:Name`."""

    trajectories_per_step: int | None = 16
    """Number of samples a step that are recorded, and at most as many dropped prompts: texts, rewards, and the batch as it
    was trained (docs/records.md). `null`: all of them; 0: none."""

    trajectories_gib: float | None = 1.0
    """GiB of disk that these records may take: those of the oldest steps make room for new ones. `null`: no limit."""

    plot_every_steps: int | None = 10
    """Draw the curves again every so many steps, and at the end; `null`: no pictures, which saves a second."""

    project: str = "tandem"
    """Project name given to Weights & Biases and trackio."""
