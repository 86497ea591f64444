"""Predicts the memory, time and disk space that a run needs, before it starts. See docs/planning.md."""
