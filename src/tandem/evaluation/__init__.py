"""Evaluation: beside training, and of a model alone."""

from tandem.evaluation.training import Evaluation, evaluate_if_due

__all__ = ["Evaluation", "evaluate_if_due"]
