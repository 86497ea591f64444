"""Evaluation: beside training, and of a model alone."""

from tandem.evaluation.training import evaluate

__all__ = ["evaluate"]
