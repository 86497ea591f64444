"""Evaluation of models: within a run, beside it, and of a model by itself."""
