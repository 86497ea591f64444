"""Tandem: reinforcement learning of language models, on a CPU or on GPUs."""

__version__ = "0.1.0"
