"""Prediction of a run's needs before it starts: memory, time, disk. See docs/planning.md."""
