"""Proof of weight delivery: which weights made which tokens, and what a difference means."""
