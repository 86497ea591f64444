"""Environments as chat partners of the model, run in worker processes, and adapters for environments of other libraries."""
