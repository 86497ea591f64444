"""Evaluation: beside training, and of a model alone."""

from tandem.evaluation.training import evaluate_if_due

__all__ = ["evaluate_if_due"]
