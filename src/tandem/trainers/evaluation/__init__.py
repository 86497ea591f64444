"""Evaluation: beside training, and of a model alone."""

from tandem.trainers.evaluation.training import Evaluation, evaluate, evaluation_gconfig, evaluation_places, is_due

__all__ = ["Evaluation", "evaluate", "evaluation_gconfig", "evaluation_places", "is_due"]
