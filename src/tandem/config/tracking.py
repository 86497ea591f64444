"""Metrics, pictures and what else is written while a run goes on."""

from dataclasses import dataclass

from tandem.config.terms import Spec


@dataclass(frozen=True)
class TrackingConfig:
    """Sinks and samples beside `metrics.jsonl`, which is always written."""

    sinks: tuple[Spec, ...] = ()
    """Where metrics go besides `metrics.jsonl`: any of `tensorboard`, `wandb`, `trackio`, or your own, `my_file.py:Name`."""

    trajectories_per_step: int = 2
    """How many samples a step are written with text, reward and versions."""

    plot_every_steps: int | None = 10
    """Draw the curves again every so many steps, and at the end; `null`: no pictures, which saves a second."""

    project: str = "tandem"
    """Project name given to Weights & Biases and trackio."""
