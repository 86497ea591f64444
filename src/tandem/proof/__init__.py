"""Proof of weight delivery: tests which weights generated the tokens of a batch, and explains a difference."""
