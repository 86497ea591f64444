"""Metrics, pictures and what else is written while a run goes on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrackingConfig:
    """Sinks and samples beside `metrics.jsonl`, which is always written."""

    sinks: tuple[str, ...] = ()
    """Further sinks: any of `tensorboard`, `wandb`, `trackio`."""

    trajectories_per_step: int = 2
    """Samples whose text, reward and versions are written at each step."""

    plot_every_steps: int = 10
    """The pictures are drawn anew every so many steps, and at the end."""

    project: str = "tandem"
    """Project name given to Weights & Biases and trackio."""
